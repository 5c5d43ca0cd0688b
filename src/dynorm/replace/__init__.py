"""Replace the norms of a model by point-wise layers, and put them back."""

from dynorm.replace.convert import ConversionReport, convert_
from dynorm.replace.restore import restore_

__all__ = ["ConversionReport", "convert_", "restore_"]
