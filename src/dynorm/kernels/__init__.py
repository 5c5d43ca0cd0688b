"""Fused kernels for eager mode, which the layers call: C++ on a CPU, Triton on a GPU."""

from dynorm.kernels._dispatch import backend, pointwise, traced
from dynorm.kernels._form import DERF, DYISRU, DYT, LINEAR, Form, Parameters

__all__ = [
    "DERF",
    "DYISRU",
    "DYT",
    "LINEAR",
    "Form",
    "Parameters",
    "backend",
    "pointwise",
    "traced",
]
