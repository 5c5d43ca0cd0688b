"""The layers of a converted model: where they stand, the norms they replaced, their serial form, and the swap."""

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
# What a fold leaves is no point-wise layer, and yet one that a model's own class does not know.
_NAMES: Mapping[type[nn.Module], str] = {**NAMES, RMSNorm: "rmsnorm", nn.Identity: "identity"}


class Replaced(NamedTuple):
    """The norm that a layer stands for, untouched, with its site: kept on the layer so that it can come back."""

    module: nn.Module
    site: NormSite
    witnesses: int = 0  # how many calibrate_ may give the layer
    auto: bool = False  # it chooses the layer too
    why: str = ""  # the reason of that choice


@dataclass(frozen=True)
class LayerSpec(Plain):
    """One point-wise layer of a model, or what a fold left, as plain values: where it stands, how to build it empty."""

    layer: str  # a name of dynorm.family.LAYERS, "rmsnorm" or "identity"
    config: Mapping[str, Any]  # the constructor's arguments
    paths: tuple[str, ...] = ()  # every path of the layer, the first one leading

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "LayerSpec":
        """Return the spec that :meth:`to_dict` wrote; ArgumentError where a key is missing or the layer is unknown."""
        try:
            # Earlier versions saved the names of wrappers too.
            paths = tuple(without_wrappers(path) for path in values["paths"])
            spec = LayerSpec(values["layer"], dict(values["config"]), paths)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"a layer needs the keys layer, paths and config, got {values!r}"
            ) from error
        spec.layer_class()
        return spec

    def layer_class(self) -> type[nn.Module]:
        """Return the class of the layer."""
        left: dict[str, type[nn.Module]] = {_NAMES[kind]: kind for kind in (RMSNorm, nn.Identity)}
        return left.get(self.layer) or layer_class(self.layer)

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
    """Return what stands where a norm was folded away."""
    module = nn.Identity()
    # nn.TransformerEncoderLayer compares the eps of its norms; NaN is equal to none.
    module.eps = float("nan")  # type: ignore[assignment]
    return module


def is_ours(module: nn.Module) -> bool:
    """Tell whether a model's own class would not build a module: a point-wise layer, or what a fold left."""
    return "eps" in module.__dict__ if type(module) is nn.Identity else type(module) in _NAMES


def dynorm_layers(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the point-wise layers of a model by their first path, each once, in module order."""
    check_module(model)
    return {
        path: module for path, module in model.named_modules() if isinstance(module, PointwiseNorm)
    }


def require_layers(model: nn.Module, *, with_norms: bool = False) -> dict[str, PointwiseNorm]:
    """Return the same as :func:`dynorm_layers`, at least one layer; ``with_norms``: those whose norm is known."""
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, "
            "sites) first, or build "
            "it with dynorm.DyISRU"
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
    """Return the paths of the layers whose norm is not known, because they were loaded, folded or built so."""
    return [path for path, layer in dynorm_layers(model).items() if replaced_by(layer) is None]


def norms_of(
    original: nn.Module, layers: Mapping[str, PointwiseNorm], name: str
) -> dict[PointwiseNorm, nn.Module]:
    """Return what stands in the original where each layer does now; ModelError where it is no norm any more.

    A layer whose norm is not known, and which the original has too, is left out.
    """
    check_module(original, name)
    modules = plain_modules(original, remove_duplicate=False)
    layers = {without_wrappers(path): layer for path, layer in layers.items()}
    must = f"{name} must be the model before convert_, but"
    norms: dict[PointwiseNorm, nn.Module] = {}
    loaded = [
        path
        for path, layer in layers.items()
        if replaced_by(layer) is None and isinstance(modules.get(path), PointwiseNorm)
    ]
    for path, layer in layers.items():
        if path in loaded and len(loaded) < len(layers):
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
    """Warn once of all layers with the constants that they were made with; annealed ones get theirs later."""
    left = []
    for path, layer in dynorm_layers(model).items():
        if replaced_by(layer) is not None and not isinstance(layer, AnnealedNorm):
            own = getattr(layer, layer.constants[0])
            fresh = getattr(
                type(layer)(**layer.config(), device=own.device, dtype=own.dtype),
                layer.constants[0],
            )
            left += [path] if torch.equal(own, fresh) else []
    if left:
        warnings.warn(
            f"{len(left)} point-wise layers have default constants, far from their norms (the "
            f"first is {left[0]}): "
            "call dynorm.calibrate_(model, batches) first",
            CalibrationWarning,
            stacklevel=3,
        )


def replaced_by(layer: nn.Module) -> Replaced | None:
    """Return the norm that ``convert_`` replaced by ``layer``, or None for a layer made otherwise."""
    return cast("Replaced | None", layer.__dict__.get("replaced"))


def original_(layer: PointwiseNorm) -> nn.Module:
    """Return the norm that ``layer`` replaced, moved to the device and dtypes that the layer has by now."""
    replaced = replaced_by(layer)
    assert replaced is not None
    norm, site = replaced.module, replaced.site
    first = next(layer.parameters())
    # The constants may be kept in another dtype than the weight, whose dtype is the norm's own.
    like = first if layer.weight is None else layer.weight
    own = tensor_like(norm, layer)
    if (own.device, own.dtype) != (like.device, like.dtype):
        norm.to(device=like.device, dtype=like.dtype)
    bias = None if site.bias_name is None else named_tensors(norm).get(site.bias_name)
    if bias is not None and layer.bias is not None and bias.dtype != layer.bias.dtype:
        bias.data = bias.data.to(layer.bias.dtype)
    return norm


def original_forward(layer: PointwiseNorm, *args: Any) -> Tensor:
    """Return the output of the norm that ``layer`` replaced."""
    writes = [writes_of(arg) for arg in args]
    # forward, not a call: layer and norm share their hooks, ours among them.
    output: Tensor = original_(layer).forward(*args)
    # Found in bfloat16, and cast to float32 since.
    if [writes_of(arg) for arg in args] != writes:
        raise ModelError(
            f"a norm must not modify its input, but the {type(original_(layer)).__name__} that a "
            f"layer replaced does in {args[0].dtype}, to which the model was cast: convert the "
            "original model in that dtype, where find_norms says so"
        )
    return output


def take_over_(layer: nn.Module, before: nn.Module, replaced: Replaced | None) -> None:
    """Let ``layer`` stand for the module ``before``: its hooks, its mode, and the norm to put back one day."""
    for name in (*HOOK_TABLES, "_is_full_backward_hook"):
        # The same dict, not a copy: a handle that the user holds removes its hook here too.
        setattr(layer, name, getattr(before, name))
    layer.train(before.training)
    if replaced is not None:
        # Out of the state dict, but copied and pickled with the layer.
        layer.__dict__["replaced"] = replaced


def swap_(model: nn.Module, new: Mapping[Any, Any]) -> None:
    """Put each module, and then each parameter, where its key stands, at every path, keeping their order."""
    for kind in ("_modules", "_parameters"):
        for parent in list(model.modules()):
            for name, child in vars(parent)[kind].items():
                if child is not None and child in new:
                    vars(parent)[kind][name] = new[child]
    # nn.TransformerEncoder packs padded batches into nested tensors, which only the fused layers
    # know.
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
        if not any(is_ours(m) or isinstance(m, PointwiseNorm) for m in encoder.modules()):
            encoder.use_nested_tensor = encoder.__dict__.pop(_NESTED, encoder.use_nested_tensor)
        elif not hasattr(encoder, _NESTED):
            setattr(encoder, _NESTED, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False


def specs_of(model: nn.Module) -> list[LayerSpec]:
    """Return the spec of every point-wise layer of a model, and what a fold left; shared ones once with all paths."""
    paths: dict[Any, list[str]] = {}
    for path, module in plain_modules(model, remove_duplicate=False).items():
        if is_ours(module):
            paths.setdefault(module, []).append(path)
    configs = {layer: {} if isinstance(layer, nn.Identity) else layer.config() for layer in paths}
    return [
        LayerSpec(_NAMES[type(layer)], configs[layer], tuple(found))
        for layer, found in paths.items()
    ]


def apply_specs_(model: nn.Module, specs: list[LayerSpec]) -> None:
    """Put empty layers where the specs say into a model of the class that they were made from, all of them or none."""
    new: dict[nn.Module, nn.Module] = {}
    modules = plain_modules(model, remove_duplicate=False)
    for spec in specs:
        if lost := [path for path in spec.paths if path not in modules]:
            raise ModelError(
                f"the model must have a norm at {lost[0]!r}, where the saved model has a "
                f"{spec.layer} layer, but "
                f"{type(model).__name__} has no such module: load it into the class of model that "
                "was saved"
            )
        first = modules[spec.paths[0]]
        like = tensor_like(first, model)
        layer = spec.build(like.device, like.dtype).train(first.training)
        new |= {modules[path]: layer for path in spec.paths}
    swap_(model, new)


def tensor_like(module: nn.Module, model: nn.Module) -> Tensor:
    """Return a tensor whose device and dtype suit a layer in place of ``module``: its own, or the model's first."""
    tensors = (t for m in (module, model) for t in (*m.parameters(), *m.buffers()))
    # One byte is a weight quantized to float8: no dtype to compute in.
    return next(
        (t for t in tensors if t.is_floating_point() and t.element_size() > 1),
        torch.empty(0, dtype=torch.float32, device="cpu"),
    )
