"""Fused kernels, which the layers call: C++ on a CPU, Triton on a GPU."""

from dynorm.kernels._form import Form, FunctionCode, Parameters
from dynorm.kernels._op import backend, pointwise, traced
from dynorm.kernels._traced import definition

__all__ = [
    "Form",
    "FunctionCode",
    "Parameters",
    "backend",
    "definition",
    "pointwise",
    "traced",
]
