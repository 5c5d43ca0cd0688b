"""Put new values and layers into a model in one go, and take them out again exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.fold.graph import Owner
from dynorm.fold.marks import ADDED_BIAS, UNTIED
from dynorm.fold.places import Place, tensor_of
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.specs import tensor_like
from dynorm.watch import HOOK_TABLES


class Swap:
    """A change of a model that can be undone to the bit: the same parameters, modules and attributes as before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._undo:
            self._undo.pop()()

    @torch.no_grad()
    def fill(self, tensor: Tensor, value: Tensor) -> None:
        """Give a parameter new values; it stays the object it is, of its dtype, on its device."""
        before = tensor.detach().clone()
        self._undo.append(lambda: _copy(tensor, before))
        tensor.copy_(value)

    def untie(self, owner: Owner, value: Tensor) -> None:
        """Give one owner of a tied parameter a parameter of its own."""
        held = owner.module._parameters.get(owner.name)
        assert held is not None
        self._put(owner.module._parameters, owner.name, _parameter(value, held))
        marks = owner.module.__dict__.get(UNTIED, ())
        self.set(owner.module, UNTIED, (*marks, owner.name))

    def untie_config(self, model: nn.Module) -> None:
        """Let a transformers model say that its weights are no longer tied, where saying so changes nothing else."""
        config = getattr(model, "config", None)
        if not hasattr(config, "tie_word_embeddings") or not hasattr(config, "to_dict"):
            return
        assert config is not None
        if config.__dict__.get("tie_word_embeddings") is not True:
            return
        told = config.to_dict() | {"tie_word_embeddings": False}
        # Some classes read more from it when they are loaded: T5 how it scales its output.
        if type(config).from_dict(dict(told)).to_dict() == told:
            self.set(config, "tie_word_embeddings", False)

    def add_bias(self, module: nn.Module, value: Tensor) -> None:
        """Give a linear layer a bias."""
        assert isinstance(module.weight, Tensor)
        self._put(module._parameters, "bias", _parameter(value, module.weight))
        self.set(module, ADDED_BIAS, True)

    def replace(self, model: nn.Module, old: nn.Module, new: nn.Module) -> None:
        """Put a module in another one's place, wherever that stands."""
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is old:
                    self._put(parent._modules, name, new)

    def neutral_layer(self, layer: PointwiseNorm, affine: bool) -> None:
        """Take scale, and weight and bias where they were folded too, off a point-wise layer."""
        self.set(layer, "scale", 1.0)
        if affine and layer.elementwise_affine:
            self._put(layer._parameters, "weight", None)
            self._put(layer._parameters, "bias", None)
            self.set(layer, "elementwise_affine", False)
        self.drop(layer, "replaced")

    def remove_center(self, layer: PointwiseNorm) -> None:
        """Take the centre off a point-wise layer."""
        self._put(layer._parameters, "center", None)
        self.drop(layer, "replaced")

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set a plain attribute."""
        self._put(holder.__dict__, name, value)

    def drop(self, holder: Any, name: str) -> None:
        """Delete a plain attribute, where there is one."""
        state = holder.__dict__
        if name in state:
            before = state.pop(name)
            self._undo.append(lambda: state.__setitem__(name, before))

    def _put(self, table: dict[str, Any], name: str, value: Any) -> None:
        had, before = name in table, table.get(name)

        def undo() -> None:
            if had:
                table[name] = before
            else:
                table.pop(name, None)

        self._undo.append(undo)
        table[name] = value


def rms_for(model: nn.Module, place: Place, affine_folded: bool) -> RMSNorm:
    """Return the RMSNorm that takes a LayerNorm's place: its own weight and bias, unless they were folded."""
    module, site = place.module, place.site
    keep_weight, keep_bias = (not affine_folded and name is not None for name in (site.weight_name, site.bias_name))
    like = tensor_like(module, model)
    assert isinstance(site.dim, int)
    layer = RMSNorm(
        site.normalized_shape, site.eps, keep_weight, keep_bias, dim=site.dim, device=like.device, dtype=like.dtype
    )
    for keep, name, held, offset in (
        (keep_weight, "weight", site.weight_name, site.weight_offset),
        (keep_bias, "bias", site.bias_name, 0.0),
    ):
        if keep and held is not None:
            tensor = tensor_of(module, held)
            assert tensor is not None
            # A buffer becomes a parameter without a gradient: the values are the same, and saved.
            kept = tensor if isinstance(tensor, nn.Parameter) and not offset else None
            layer._parameters[name] = (
                kept if kept is not None else _parameter(tensor.detach().double() + offset, tensor)
            )
    for name in (*HOOK_TABLES, "_is_full_backward_hook"):
        # The same dict, not a copy: a handle that the user holds removes its hook here too.
        setattr(layer, name, getattr(module, name))
    return layer.train(module.training)


@torch.no_grad()
def _copy(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(like.device, like.dtype), requires_grad=like.requires_grad)
