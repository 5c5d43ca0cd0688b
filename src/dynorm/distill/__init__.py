"""Roads to other libraries: transformers' models, its Trainer, and the command line's pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynorm.distill.anneal import AnnealCallback

__all__ = ["AnnealCallback"]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dynorm.distill.anneal import AnnealCallback

    return AnnealCallback
