"""The layers of a converted model: their paths and norms, their serial form, and the swap."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dynorm.arguments import check_module
from dynorm.errors import ArgumentError, CalibrationWarning, ModelError
from dynorm.family import NAMES, layer_class
from dynorm.find.tokens import named_tensors
from dynorm.guard import HOOK_TABLES, writes_of
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.site import NormSite
from dynorm.table import Plain
from dynorm.wrappers import plain_modules, without_wrappers

_NESTED = "_dynorm_use_nested_tensor"
# A fold leaves modules that are not point-wise layers, but the model's class does not make them.
_NAMES: Mapping[type[nn.Module], str] = {**NAMES, RMSNorm: "rmsnorm", nn.Identity: "identity"}


class Replaced(NamedTuple):
    """The norm that a layer replaced, unchanged, with its site; `restore_` puts it back."""

    module: nn.Module
    site: NormSite
    witnesses: int = 0  # how many calibrate_ may give the layer
    auto: bool = False  # whether calibrate_ chooses the layer too
    why: str = ""  # the reason for that choice


@dataclass(frozen=True)
class LayerSpec(Plain):
    """One point-wise layer of a model, or a module that a fold left, as plain values."""

    layer: str  # a name of dynorm.family.LAYERS, "rmsnorm" or "identity"
    config: Mapping[str, Any]  # the constructor's arguments
    paths: tuple[str, ...] = ()  # every path of the layer, the main one first

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "LayerSpec":
        """Return the spec that :meth:`to_dict` wrote; ArgumentError if it is not valid."""
        try:
            # Earlier versions saved the names of wrappers too.
            paths = tuple(map(without_wrappers, values["paths"]))
            spec = LayerSpec(values["layer"], dict(values["config"]), paths)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"a layer needs the keys layer, paths and config, got {values!r}"
            ) from error
        spec.layer_class()
        return spec

    def layer_class(self) -> type[nn.Module]:
        """Return the class of the layer."""
        for kind in (RMSNorm, nn.Identity):
            if self.layer == _NAMES[kind]:
                return kind
        return layer_class(self.layer)

    def build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
        """Build the layer with default constants."""
        if self.layer == _NAMES[nn.Identity]:
            return identity()
        try:
            return self.layer_class()(**self.config, device=device, dtype=dtype)
        except TypeError as error:
            raise ArgumentError(
                f"{self.layer} cannot be built from {dict(self.config)!r}: {error}"
            ) from error


def identity() -> nn.Identity:
    """Return the module that takes the place of a norm when it is folded away."""
    module = nn.Identity()
    # nn.TransformerEncoderLayer compares the eps of its norms; NaN is not equal to any.
    module.eps = float("nan")  # type: ignore[assignment]
    return module


def is_ours(module: nn.Module) -> bool:
    """Return whether a module is a point-wise layer or was left by a fold."""
    if type(module) is nn.Identity:
        return "eps" in module.__dict__
    return type(module) in _NAMES


def dynorm_layers(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the point-wise layers of a model by their first path, each once, in module order."""
    check_module(model)
    return {
        path: module for path, module in model.named_modules() if isinstance(module, PointwiseNorm)
    }


def require_layers(model: nn.Module, *, with_norms: bool = False) -> dict[str, PointwiseNorm]:
    """Return :func:`dynorm_layers`, at least one; ``with_norms``: those whose norm is known."""
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, "
            "sites) first, or build it with dynorm.DyISRU"
        )
    if not with_norms:
        return layers
    known = {path: layer for path, layer in layers.items() if replaced_by(layer) is not None}
    if not known:
        raise ModelError(
            f"the layer {next(iter(layers))!r} must have replaced a norm to be compared with it, "
            "but it was loaded or built so, like all others: "
            "convert the original again, and calibrate, refine and measure before saving; "
            "distill_ takes a teacher"
        )
    return known


def layers_without_norms(model: nn.Module) -> list[str]:
    """Return the paths of the layers whose norm is not known: they were loaded or built."""
    return [path for path, layer in dynorm_layers(model).items() if replaced_by(layer) is None]


def norms_of(
    original: nn.Module, layers: Mapping[str, PointwiseNorm], name: str
) -> dict[PointwiseNorm, nn.Module]:
    """Return the module of the original at the path of each layer; ModelError if it is not a norm.

    A layer whose norm is not known, and which the original has too, is left out.
    """
    check_module(original, name)
    modules = plain_modules(original, remove_duplicate=False)
    layers = {without_wrappers(path): layer for path, layer in layers.items()}
    must = f"{name} must be the model before convert_, but"
    norms: dict[PointwiseNorm, nn.Module] = {}
    in_both = []
    for path, layer in layers.items():
        if replaced_by(layer) is None and isinstance(modules.get(path), PointwiseNorm):
            in_both.append(path)
    for path, layer in layers.items():
        if path in in_both and len(in_both) < len(layers):
            continue
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


def warn_of_defaults(model: nn.Module) -> None:
    """Warn once of all layers with default constants; annealed layers get theirs later."""
    default = []
    for path, layer in dynorm_layers(model).items():
        if replaced_by(layer) is None or isinstance(layer, AnnealedNorm):
            continue
        name = layer.constants[0]
        constant = getattr(layer, name)
        # A layer built from the same arguments has the default.
        new = type(layer)(**layer.config(), device=constant.device, dtype=constant.dtype)
        if torch.equal(constant, getattr(new, name)):
            default.append(path)
    if default:
        warnings.warn(
            f"{len(default)} point-wise layers have default constants, far from their norms (the "
            f"first is {default[0]}): call dynorm.calibrate_(model, batches) first",
            CalibrationWarning,
            stacklevel=3,
        )


def replaced_by(layer: nn.Module) -> Replaced | None:
    """Return the norm that ``convert_`` replaced by ``layer``, or None for any other layer."""
    return cast("Replaced | None", layer.__dict__.get("replaced"))


def original_(layer: PointwiseNorm) -> nn.Module:
    """Return the norm that ``layer`` replaced, on the layer's device and in its dtypes."""
    replaced = replaced_by(layer)
    assert replaced is not None
    norm = replaced.module
    # The constants may be kept in another dtype than the weight, whose dtype is the norm's.
    like = next(layer.parameters()) if layer.weight is None else layer.weight
    norm_tensor = tensor_like(norm, layer)
    if (norm_tensor.device, norm_tensor.dtype) != (like.device, like.dtype):
        norm.to(device=like.device, dtype=like.dtype)
    bias = named_tensors(norm).get(replaced.site.bias_name or "")
    if bias is not None and layer.bias is not None and bias.dtype != layer.bias.dtype:
        bias.data = bias.data.to(layer.bias.dtype)
    return norm


def original_forward(layer: PointwiseNorm, *args: Any) -> Tensor:
    """Return the output of the norm that ``layer`` replaced."""
    writes = [writes_of(arg) for arg in args]
    # forward, not a call: layer and norm share their hooks, those of dynorm among them.
    output: Tensor = original_(layer).forward(*args)
    # Such a norm may have been found in bfloat16, and cast to float32 since.
    if [writes_of(arg) for arg in args] != writes:
        raise ModelError(
            f"a norm must not modify its input, but the {type(original_(layer)).__name__} that a "
            f"layer replaced does in {args[0].dtype}, to which the model was cast: convert the "
            "original model in that dtype, in which find_norms refuses this norm"
        )
    return output


def take_over_(layer: nn.Module, before: nn.Module, replaced: Replaced | None) -> None:
    """Give ``layer`` the hooks and mode of the module ``before``, and the norm to restore."""
    for name in (*HOOK_TABLES, "_is_full_backward_hook"):
        # The same dict, not a copy, so that the user's handle removes its hook here too.
        setattr(layer, name, getattr(before, name))
    layer.train(before.training)
    if replaced is not None:
        # Not in the state dict, but copied and pickled with the layer.
        layer.__dict__["replaced"] = replaced


def swap_(model: nn.Module, new: Mapping[Any, Any]) -> None:
    """Replace each module, then each parameter, that is a key of ``new``, at every path."""
    for kind in ("_modules", "_parameters"):
        for parent in list(model.modules()):
            table = vars(parent)[kind]
            for name, child in table.items():
                if child is not None and child in new:
                    table[name] = new[child]
    # nn.TransformerEncoder packs padded batches into nested tensors, which only the fused layers
    # know.
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if not any(is_ours(part) or isinstance(part, PointwiseNorm) for part in encoder.modules()):
            encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)
        elif not hasattr(encoder, _NESTED):
            setattr(encoder, _NESTED, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False


def specs_of(model: nn.Module) -> list[LayerSpec]:
    """Return the specs of a model's point-wise layers, and of modules that a fold left.

    A shared one is listed once, with all its paths.
    """
    paths: dict[Any, list[str]] = {}
    for path, module in plain_modules(model, remove_duplicate=False).items():
        if is_ours(module):
            paths.setdefault(module, []).append(path)
    specs = []
    for layer, layer_paths in paths.items():
        config = {} if isinstance(layer, nn.Identity) else layer.config()
        specs.append(LayerSpec(_NAMES[type(layer)], config, tuple(layer_paths)))
    return specs


def apply_specs_(model: nn.Module, specs: list[LayerSpec]) -> None:
    """Put default layers at the paths of the specs, into a model of their class; all or none."""
    new: dict[nn.Module, nn.Module] = {}
    modules = plain_modules(model, remove_duplicate=False)
    for spec in specs:
        for path in spec.paths:
            if path not in modules:
                raise ModelError(
                    f"the model must have a norm at {path!r}, where the saved model has a "
                    f"{spec.layer} layer, but {type(model).__name__} has no such module: load it "
                    "into the class of model that was saved"
                )
        first = modules[spec.paths[0]]
        like = tensor_like(first, model)
        layer = spec.build(like.device, like.dtype).train(first.training)
        for path in spec.paths:
            new[modules[path]] = layer
    swap_(model, new)


def tensor_like(module: nn.Module, model: nn.Module) -> Tensor:
    """Return a tensor with the device and dtype for a layer in place of ``module``.

    It is the first suitable tensor of the module, or else of the model.
    """
    for owner in (module, model):
        for tensor in (*owner.parameters(), *owner.buffers()):
            # One byte is a weight quantized to float8, which is not a dtype to compute in.
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return tensor
    return torch.empty(0, dtype=torch.float32, device="cpu")
