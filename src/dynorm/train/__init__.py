"""Train converted models: anneal norms to point-wise layers, distill, and monitor a run.

Callbacks for the Trainer are in :mod:`dynorm.train.callbacks`, which imports transformers.
"""

from dynorm.train.anneal import AnnealSchedule, AnnealStart, finalize_, set_anneal_
from dynorm.train.distill import DistillationReport, distill_, output_loss
from dynorm.train.monitor import Monitor

__all__ = [
    "AnnealSchedule",
    "AnnealStart",
    "DistillationReport",
    "Monitor",
    "distill_",
    "finalize_",
    "output_loss",
    "set_anneal_",
]
