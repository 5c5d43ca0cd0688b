"""Point-wise layers on sharded tensors: a style for the plans of ``parallelize_module``."""

from dynorm.parallel.shards import on_shards
from dynorm.parallel.style import PointwiseParallel, reduce_gradients_, require_equal_ranks

__all__ = ["PointwiseParallel", "on_shards", "reduce_gradients_", "require_equal_ranks"]
