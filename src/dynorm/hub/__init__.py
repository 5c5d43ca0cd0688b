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

__all__ = ["load", "save"]

# A program may read the quantization_config of a folder before it imports any model.
register_post_import_hook(register_quantizer, QUANTIZERS)
register_post_import_hook(register_with_transformers, MODELING)
