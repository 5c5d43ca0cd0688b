"""Save and load, whatever library the model comes from."""

import importlib
import os
import sys
import warnings
from types import ModuleType

import torch
from torch import nn

from dynorm.arguments import check_path
from dynorm.errors import ArgumentError, StorageError
from dynorm.files import replaced_directory
from dynorm.guard import require_plain_model
from dynorm.hub.contents import contents_of
from dynorm.hub.plain import CONFIG, read_plain, write_plain
from dynorm.replace.converted import warn_of_defaults
from dynorm.wrappers import unwrapped

_TRANSFORMERS_CONFIG = "config.json"
_COMPILED = ("OptimizedModule",)
_REPLICATED = ("DistributedDataParallel", "DataParallel")
MODELING = "transformers.modeling_utils"


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Save a converted model: its weights, and its point-wise layers with their paths; no pickle.

    A transformers model is written as ``save_pretrained`` writes it, with its layers named in
    config.json. Once dynorm is imported, any ``from_pretrained`` loads it, with another head too.
    A program that cannot import dynorm first passes ``trust_remote_code=True`` to the
    ``from_pretrained`` of an Auto class: a file in the directory imports dynorm then, which must be
    installed.
    Any other model is written as ``model.safetensors`` and ``dynorm.json``. The directory appears
    complete or not at all: if the process is killed or the disk is full, the old one stays as it
    was.
    Wrappers of the model or its parts, such as ``checkpoint_wrapper`` and ``torch.compile``, are
    left out: the directory loads into the model without them, or with others.
    Shared tensors stay shared. Buffers that are not persistent are not saved, nor are the original
    norms: a loaded model cannot be restored.

    Args:
        model: a model with point-wise layers; it is not changed.
        directory: where to; its parent must exist.
        overwrite: replace a saved model that is there. Other files in the directory, such as a
            tokenizer's, are kept.

    Raises:
        ArgumentError: ``model`` is not a module, or ``directory`` not a path.
        ModelError: it has no point-wise layer, is wrapped in FSDP, sharded or on the meta device,
            is quantized too, or holds state that is not a tensor.
        StorageError: the directory exists, or cannot be written.

    Warns:
        CalibrationWarning: layers have default constants.

    Example:
        >>> import tempfile, torch, dynorm
        >>> from pathlib import Path
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> _ = dynorm.calibrate_(model, [torch.randn(64, 8)])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     save(model, Path(parent) / "model")
        ...     sorted(path.name for path in (Path(parent) / "model").iterdir())
        ['dynorm.json', 'model.safetensors']
    """
    directory = check_path("directory", directory)
    require_plain_model(model, allowed=(*_COMPILED, *_REPLICATED))
    model = unwrapped(model)
    # A part's wrapper would change the names of its tensors.
    require_plain_model(model, allowed=_COMPILED)
    contents = contents_of(model)
    warn_of_defaults(model)
    pretrained = getattr(sys.modules.get(MODELING), "PreTrainedModel", None)
    with replaced_directory(directory, overwrite=overwrite) as folder:
        if pretrained is not None and isinstance(model, pretrained):
            _with_transformers()
            model.save_pretrained(folder)
        else:
            write_plain(model, contents, folder)


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def load(directory: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load a directory of :func:`save`, in eval mode, with bit-equal tensors.

    A transformers model gets one dtype for all tensors, that of its config.json, as ``from_pretrained``
    gives it. The outputs are bit-equal too if the tensors of both models are aligned as torch aligns them.
    Those of a model from transformers' ``from_pretrained`` are not, and torch may round its
    products with a single vector differently.

    A transformers model is loaded on the CPU, in the class that config.json names, from the
    directory only. For any other model, build it as it was before its conversion and pass it: its
    norms are replaced, and its tensors filled, in the saved dtypes and on their device. Point-wise
    layers that it has already, from its class or a conversion, are replaced by the saved ones. Files
    cannot make dynorm import code.

    Args:
        directory: a local directory. (``hf download user/model --local-dir DIR`` fetches one from
            the hub.)
        model: for a plain torch model, an instance of its class, changed in place; meta
            tensors become tensors on the CPU. Its parameters keep their ``requires_grad``, a
            point-wise layer that of its norm.

    Returns:
        The model; for a plain torch model, the one that was passed.

    Raises:
        ArgumentError: a model is needed, or one is passed although config.json names the class.
        ModelError: the model has no module at the path of a layer.
        StorageError: a file is missing, truncated or malformed, or the tensors are not those of the
            model: the message names the missing, unexpected or misshapen ones. A model that was
            passed is as it was.

    Example:
        >>> import tempfile, torch, dynorm
        >>> def build():
        ...     return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> model, x = build().eval(), torch.randn(4, 8)
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, x))
        >>> _ = dynorm.calibrate_(model, [x])
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     save(model, f"{parent}/model")
        ...     loaded = load(f"{parent}/model", build())
        >>> torch.equal(loaded(x), model(x))
        True
    """
    folder = check_path("directory", directory)
    if not folder.is_dir():
        raise StorageError(
            f"{folder} must be a directory that dynorm.save wrote, but no such directory exists: "
            "download a model of the hub with `hf download` first"
        )
    if (folder / CONFIG).exists():
        return read_plain(folder, model)
    if not (folder / _TRANSFORMERS_CONFIG).exists():
        raise StorageError(
            f"{folder} must be a saved model, but has neither {CONFIG} nor {_TRANSFORMERS_CONFIG}"
        )
    if model is not None:
        raise ArgumentError(
            f"do not pass a model for {folder}: its {_TRANSFORMERS_CONFIG} already names the class"
        )
    loaded: nn.Module = _with_transformers().read_transformers(folder)
    return loaded


def register_quantizer(auto: ModuleType) -> None:
    """Register dynorm's quantization method; called when transformers' list of them is imported."""
    # `register_with_transformers` refuses other versions.
    if int(sys.modules["transformers"].__version__.split(".")[0]) >= 5:
        quantizer = importlib.import_module("dynorm.hub.quantizer")
        # If its own import brought this one, it is not ready yet, and registers itself at its end.
        if hasattr(quantizer, "register"):
            quantizer.register(auto)


def register_with_transformers(modeling: ModuleType) -> None:
    """Make ``from_pretrained`` and ``save_pretrained`` know converted models.

    It is called when transformers is imported.
    """
    try:
        # The module registers itself on import, which may be the first import of transformers.
        _with_transformers()
    # Any error of another version of transformers must not end its import.
    except Exception as error:
        warnings.warn(
            "dynorm is unknown to this transformers, so from_pretrained will not load converted "
            f"models: {error}",
            stacklevel=2,
        )


def _with_transformers() -> ModuleType:
    try:
        return importlib.import_module("dynorm.hub.transformers")
    except ImportError as error:
        raise StorageError(
            f"transformers 5 must be installed, but {error}: pip install 'transformers>=5'"
        ) from error
