"""Static int8 scales: the bound of a point-wise layer is known from its parameters, its actual range from some data.

:func:`find_readers` says which linear layers read a point-wise layer's output; :func:`quantize_` gives them torchao's
static int8 quantization with scales from :func:`output_range` or :func:`observed_ranges`.
:class:`Int8Table` is a point-wise layer as 256 numbers. Only :func:`quantize_` imports torchao.
"""

from dynorm.quantize.bounds import observed_ranges, output_bounds, output_range, static_scale
from dynorm.quantize.int8 import Reader, find_readers, quantize_
from dynorm.quantize.tables import Int8Table

__all__ = [
    "Int8Table",
    "Reader",
    "find_readers",
    "observed_ranges",
    "output_bounds",
    "output_range",
    "quantize_",
    "static_scale",
]
