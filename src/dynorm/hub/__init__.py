"""Save and load models: directories that plain torch, or transformers, reads again."""

from wrapt import register_post_import_hook

from dynorm.hub.api import (
    MODELING,
    QUANTIZERS,
    load,
    register_quantizer,
    register_with_transformers,
    save,
)
from dynorm.hub.decay import NORM_CLASSES, PARAMETER_NAMES, leave_out_of_decay, name_as_norms
from dynorm.fold.stock import as_stock

__all__ = ["as_stock", "load", "save"]

# `import dynorm` must not import transformers, but its from_pretrained must know converted models
# in either order of the two imports. transformers looks for no plugins, so wrapt calls these
# functions when a module is imported, or at once if it has been.
# A program may read the quantization_config of a folder before it imports any model.
register_post_import_hook(register_quantizer, QUANTIZERS)
register_post_import_hook(register_with_transformers, MODELING)
register_post_import_hook(leave_out_of_decay, PARAMETER_NAMES)
register_post_import_hook(name_as_norms, NORM_CLASSES)
