"""The layers of a converted model, and the norms that they replaced."""

import warnings
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import nn

from dynorm.arguments import check_module
from dynorm.errors import CalibrationWarning, ModelError
from dynorm.family import NAMES
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.layers.module import NoEps
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.site import NormSite
from dynorm.wrappers import plain_modules, plain_name

# A fold leaves modules that are not point-wise layers, but the model's class does not make them.
LAYER_NAMES: Mapping[type[nn.Module], str] = {**NAMES, RMSNorm: "rmsnorm", nn.Identity: "identity"}


class Replaced(NamedTuple):
    """The norm that a layer replaced, unchanged, with its site; `restore_` puts it back."""

    module: nn.Module
    site: NormSite
    witnesses: int = 0  # how many calibrate_ may give the layer


def replaced_by(layer: nn.Module) -> Replaced | None:
    """Return the norm that ``convert_`` replaced by ``layer``, or None for any other layer."""
    return cast("Replaced | None", layer.__dict__.get("replaced"))


def identity() -> nn.Identity:
    """Return the module that takes the place of a norm when it is folded away."""
    module = nn.Identity()
    # nn.TransformerEncoderLayer compares the eps of its norms.
    module.eps = NoEps()  # type: ignore[assignment]
    return module


def is_ours(module: nn.Module) -> bool:
    """Return whether a module is a point-wise layer or was left by a fold."""
    if type(module) is nn.Identity:
        return "eps" in module.__dict__
    return type(module) in LAYER_NAMES


def dynorm_layers(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the point-wise layers of a model by their first path, each once, in module order."""
    check_module(model)
    return {
        path: module for path, module in model.named_modules() if isinstance(module, PointwiseNorm)
    }


def require_layers(
    model: nn.Module,
    *,
    with_norms: bool = False,
) -> dict[str, PointwiseNorm]:
    """Return :func:`dynorm_layers`, at least one; ``with_norms``: the norm of each must be known."""
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, "
            "sites) first, or build it with dynorm.DyISRU (fold_ leaves none of its lines)"
        )
    for path, layer in layers.items():
        if with_norms and replaced_by(layer) is None:
            raise ModelError(
                f"the layer {path!r} must have replaced a norm to be compared with it, but it was "
                "loaded or built so: pass the original where a function takes one (original= of "
                "measure, teacher= of distill_), or convert all norms of the original at once, and "
                "calibrate and refine before saving"
            )
    return layers


def norms_of(
    teacher: nn.Module, layers: Mapping[str, PointwiseNorm]
) -> dict[PointwiseNorm, nn.Module]:
    """Return the module of the teacher at the path of each layer; ModelError if it is not a norm."""
    modules = plain_modules(teacher, remove_duplicate=False)
    layers = {plain_name(path): layer for path, layer in layers.items()}
    must = "teacher must be the model before convert_, but"
    norms: dict[PointwiseNorm, nn.Module] = {}
    for path, layer in layers.items():
        if path not in modules:
            raise ModelError(f"{must} has no {path!r}: pass a model of the same class")
        if isinstance(modules[path], (PointwiseNorm, nn.Identity)):
            raise ModelError(f"{must} its {path!r} is converted already, or folded away")
        if layer.weight is None and any(True for _ in modules[path].parameters()):
            raise ModelError(
                f"the layer {path!r} must have its norm's weight to be compared with it: fold "
                "afterwards"
            )
        norms[layer] = modules[path]
    return norms


def warn_of_defaults(model: nn.Module) -> list[str]:
    """Warn once of all layers with default constants, and return their paths.

    Annealed layers get theirs later.
    """
    default = []
    for path, layer in dynorm_layers(model).items():
        if replaced_by(layer) is None or isinstance(layer, AnnealedNorm):
            continue
        constant = layer.first_constant
        # A layer built from the same arguments has the default.
        new = type(layer)(**layer.config(), device=constant.device, dtype=constant.dtype)
        if torch.equal(constant, new.first_constant):
            default.append(path)
    if default:
        warnings.warn(
            f"{len(default)} point-wise layers have default constants, far from their norms (the "
            f"first is {default[0]}): call dynorm.calibrate_(model, batches) first",
            CalibrationWarning,
            stacklevel=3,
        )
    return default
