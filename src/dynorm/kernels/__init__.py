"""Fused kernels for eager mode: C++ on a CPU, Triton on a GPU; the ops of torch.library are in ``_ops``."""

from dynorm.kernels import _ops as _ops
from dynorm.kernels._dispatch import DERF, DYISRU, DYT, LINEAR, backend, pointwise

__all__ = ["DERF", "DYISRU", "DYT", "LINEAR", "backend", "pointwise"]
