"""Point-wise layers on sharded tensors: DTensor's rules for them, a style for plans, and no communication."""

from dynorm.parallel import ops as ops
from dynorm.parallel.agreement import require_equal_ranks
from dynorm.parallel.gradients import reduce_gradients_
from dynorm.parallel.shards import on_shards
from dynorm.parallel.style import PointwiseParallel

__all__ = ["PointwiseParallel", "on_shards", "reduce_gradients_", "require_equal_ranks"]
