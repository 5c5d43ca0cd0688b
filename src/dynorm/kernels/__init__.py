"""Fused kernels for eager mode, which the layers call: C++ on a CPU, Triton on a GPU."""

from dynorm.kernels._dispatch import backend, pointwise, traced
from dynorm.kernels._form import Form, FunctionCode, Parameters

__all__ = [
    "Form",
    "FunctionCode",
    "Parameters",
    "backend",
    "pointwise",
    "traced",
]
