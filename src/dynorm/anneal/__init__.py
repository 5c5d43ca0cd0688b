"""Move a model from its norms to point-wise functions while it trains."""

from dynorm.anneal.schedule import AnnealSchedule, finalize_, set_anneal_
from dynorm.anneal.start import AnnealStart

__all__ = ["AnnealSchedule", "AnnealStart", "finalize_", "set_anneal_"]
