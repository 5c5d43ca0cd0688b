"""Work on transformers' models: distillation, the Trainer's callback, and the jobs of the command line."""

from typing import TYPE_CHECKING

from dynorm.distill.distill import DistillationReport, distill_, distillation_rate, output_loss
from dynorm.distill.pretrained import Pretrained, encode, load_pretrained, make_batches

if TYPE_CHECKING:
    from dynorm.distill.callbacks import AnnealCallback, MonitorCallback

__all__ = [
    "AnnealCallback",
    "DistillationReport",
    "MonitorCallback",
    "Pretrained",
    "distill_",
    "distillation_rate",
    "encode",
    "load_pretrained",
    "make_batches",
    "output_loss",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import transformers only when one of its callbacks is used."""
        if name not in ("AnnealCallback", "MonitorCallback"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dynorm.distill import callbacks

        return getattr(callbacks, name)
