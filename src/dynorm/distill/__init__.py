"""Work on transformers' models: distillation, the Trainer's callback, and the jobs of the command line."""

from typing import TYPE_CHECKING

from dynorm.distill.distill import DistillationReport, distill_, distillation_rate, output_loss
from dynorm.distill.pretrained import Pretrained, encode, load_pretrained, make_batches

if TYPE_CHECKING:
    from dynorm.distill.anneal import AnnealCallback
    from dynorm.distill.monitor import MonitorCallback

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
        from dynorm.distill import anneal, monitor

        return anneal.AnnealCallback if name == "AnnealCallback" else monitor.MonitorCallback
