"""Static int8 scales for the linear layers that read a point-wise layer's output.

The parameters of a point-wise layer give a bound of its output (:func:`output_range`); some data
give its actual range (:func:`observed_ranges`). :func:`find_readers` finds the linear layers, and
:func:`quantize_` gives them torchao's static int8 quantization with scales from these ranges.
Only :func:`quantize_` imports torchao.
"""

from dynorm.quantize.bounds import observed_ranges, output_bounds, output_range, static_scale
from dynorm.quantize.int8 import Reader, find_readers, quantize_

__all__ = [
    "Reader",
    "find_readers",
    "observed_ranges",
    "output_bounds",
    "output_range",
    "quantize_",
    "static_scale",
]
