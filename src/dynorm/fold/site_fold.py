"""The records of a fold: one per norm or point-wise layer, with its outcome and the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.find.probe import find_norms
from dynorm.find.recover import NotANormError
from dynorm.find.tokens import CannotProbeError, named_tensors, plain_arithmetic, plain_copy
from dynorm.fold.check import Wide, relative_error
from dynorm.fold.graph import Leaf, Slot, shape
from dynorm.fold.report import FOLDED, NOTHING, OFF, REFUSED, FoldedSite, Rewrite
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.site import NormSite, select_sites

_EXACT = 1e-11
# Small tokens show whether eps stands beside the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


@dataclass(frozen=True)
class Read:
    """One operator that reads all channels of a value linearly.

    Args:
        node: the operator.
        leaf: its use of the weight.
        weight: the weight.
        axis: of the weight that the value's channels go along.
        out: the axis of its outputs; None where they have no one axis.
        groups: of a convolution; the channels of each group go along ``axis`` then.
        bias: the use of a bias that is added to the outputs, and the bias; None where there is none.
        no_shift: why a constant in the value cannot become a bias, or None.
    """

    node: Node
    leaf: Leaf
    weight: Slot
    axis: int
    out: int | None
    groups: int = 1
    bias: tuple[Leaf, Slot] | None = None
    no_shift: str | None = None

    def scaled(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight that reads ``v`` as this one reads ``factor * v``."""
        factor = factor.to(weight.device)
        if self.groups == 1:
            return weight * along(factor, self.axis, weight.ndim)
        # Output o belongs to group o // (outputs / groups), and reads that group's channels only.
        rows = factor.view(self.groups, -1).repeat_interleave(weight.shape[0] // self.groups, 0)
        return weight * rows.view(*rows.shape, *[1] * (weight.ndim - 2))

    def constant(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the outputs of this weight for a constant ``shift`` in every token: one number per output."""
        assert self.out is not None
        product = self.scaled(weight, shift)
        return product.sum([axis for axis in range(product.ndim) if axis != self.out])


def along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector as a tensor of ``rank`` axes that lies along one of them."""
    view = [1] * rank
    view[axis] = -1
    return vector.view(view)


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream.

    Args:
        leaf: its use.
        slot: the parameter.
        axis: of the parameter that the stream's channels go along.
        gain: the use of the parameter that multiplies each channel on the way (LayerScale), and it; or None.
    """

    leaf: Leaf
    slot: Slot
    axis: int
    gain: tuple[Leaf, Slot] | None = None


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that leave each channel alone.

    Args:
        values: the nodes, with the axis of the channels.
        writes: everything that writes into it.
        refused: why its mean cannot be taken out, or None.
    """

    values: dict[Node, int] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    refused: str | None = None


@dataclass(eq=False)
class SiteFold:
    """One norm or point-wise layer, and the fold there.

    Args:
        site: its path, and all that ``find_norms`` knows of it.
        module: the norm or layer.
        chosen: whether the caller wants it folded.
        refused: why nothing of it can be folded, or None.
        weight: the factor of each channel in float64, or None.
        bias: the constant of each channel in float64, or None.
        scale: the fixed factor of a point-wise layer.
        calls: its nodes in the graph.
        factor: the part of weight and scale that goes into the readers; None for 1.
        shift: the part of the bias that does; None for 0.
        reads: everything that reads it.
        kept: why factor and shift stay, or None.
        streams: the residual streams that a LayerNorm is called on; None if they were not looked for.
        center: the learned centre of a point-wise layer in float64, if it was to be folded.
        center_into: the bias that takes the centre.
        center_kept: why the centre stays, or None.
    """

    site: NormSite
    module: nn.Module
    chosen: bool = True
    refused: str | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    calls: list[Node] = field(default_factory=list)
    factor: Tensor | None = None
    shift: Tensor | None = None
    reads: list[Read] = field(default_factory=list)
    kept: str | None = None
    streams: list[Stream] | None = None
    center: Tensor | None = None
    center_into: Slot | None = None
    center_kept: str | None = None

    @property
    def path(self) -> str:
        """Return the path in the model."""
        return self.site.path

    @property
    def is_given(self) -> bool:
        """Tell whether its factor or shift goes into the readers."""
        return self.kept is None and (self.factor is not None or self.shift is not None)

    @property
    def stream_refused(self) -> str | None:
        """Return why a LayerNorm stays one: a stream that it is called on must keep its mean."""
        return next((stream.refused for stream in self.streams or () if stream.refused is not None), None)

    @property
    def becomes_rms(self) -> bool:
        """Tell whether it is a LayerNorm that becomes an RMSNorm."""
        return bool(self.chosen and self.streams and self.stream_refused is None)

    def axis(self, rank: int) -> int:
        """Return the channel axis of an input with so many axes."""
        assert isinstance(self.site.dim, int)
        return self.site.dim % rank

    def own(self, copy: nn.Module | None = None) -> Iterator[tuple[Tensor, float]]:
        """Yield the norm's or its copy's tensors for weight and bias, each with the number that makes it neutral."""
        for name, neutral in ((self.site.weight_name, 1 - self.site.weight_offset), (self.site.bias_name, 0.0)):
            tensor = held(copy or self.module, name)
            if tensor is not None:
                yield tensor, neutral

    def row(self, affine: bool, means: bool, constants: bool) -> FoldedSite:
        """Return the row of the report, given which rewrites the caller wanted."""
        given = self._affine_row(affine)
        channels = math.prod(self.site.normalized_shape)
        elements = sum(math.prod(shape(call)) for call in self.calls)
        removed = (self.weight is not None) + (self.bias is not None) if given.state == FOLDED else 0
        center = 0 if self.center_into is None else 1
        # Taking the mean out is a sum and a difference.
        centring = 2 if self.becomes_rms else 0
        return FoldedSite(
            self.path,
            self.site.kind or self.site.class_name,
            channels,
            given,
            self._mean_row(means),
            self._constants_row(constants),
            channels * (removed + center),
            elements * (removed + center + centring),
            "RMSNorm" if self.becomes_rms else "",
        )

    def _affine_row(self, wanted: bool) -> Rewrite:
        if not wanted or not self.chosen:
            return Rewrite(OFF)
        empty = self.weight is None and self.bias is None
        if self.kept is not None:
            nothing = empty and self.refused is None and not isinstance(self.module, PointwiseNorm)
            return Rewrite(NOTHING) if nothing else Rewrite(REFUSED, reason=self.kept)
        return Rewrite(NOTHING) if empty or not self.is_given else Rewrite(FOLDED, self._readers())

    def _mean_row(self, wanted: bool) -> Rewrite:
        if not wanted or not self.chosen:
            return Rewrite(OFF)
        if self.site.kind != "layernorm":
            unknown = self.refused is not None and not self.site.kind
            return Rewrite(REFUSED, reason=self.refused) if unknown else Rewrite(NOTHING)
        if not self.becomes_rms:
            uncalled = self.refused or "never called while the model was traced"
            return Rewrite(REFUSED, reason=self.stream_refused or uncalled)
        writes = (write.slot.name for stream in self.streams or () for write in stream.writes)
        return Rewrite(FOLDED, tuple(dict.fromkeys(writes)))

    def _constants_row(self, wanted: bool) -> Rewrite:
        if not wanted or not self.chosen or not isinstance(self.module, PointwiseNorm):
            return Rewrite(OFF)
        into = self._readers() if self.scale != 1 and self.is_given else ()
        into += () if self.center_into is None else (self.center_into.name,)
        if into:
            return Rewrite(FOLDED, into)
        reason = self.center_kept or (None if self.scale == 1 else self.kept)
        return Rewrite(NOTHING) if reason is None else Rewrite(REFUSED, reason=reason)

    def _readers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(read.weight.name for read in self.reads))


def find_folds(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], only: Any, skip: Any) -> list[SiteFold]:
    """Return the records of all norms, in call order, and then of all point-wise layers.

    Raises:
        ArgumentError: a glob matches none.
        ModelError: the model has none.
    """
    sites = find_norms(model, *args, **kwargs)
    annealed = "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first"
    for path, layer in model.named_modules():
        if path and isinstance(layer, PointwiseNorm):
            site = NormSite(
                path,
                kind=type(layer).__name__.lower(),
                dim=layer.dim,
                normalized_shape=layer.normalized_shape,
                has_weight=layer.weight is not None,
                has_bias=layer.bias is not None,
                weight_name=None if layer.weight is None else "weight",
                bias_name=None if layer.bias is None else "bias",
                class_name=type(layer).__qualname__,
                refused=annealed if isinstance(layer, AnnealedNorm) else None,
                order=len(sites),
            )
            sites.append(site)
    if not sites:
        raise ModelError("the model must have norms or point-wise layers, but none was found: nothing can be folded")
    chosen = {site.path for site in select_sites(sites, only, skip)}
    folds = []
    for site in sites:
        module = model.get_submodule(site.path)
        fold = SiteFold(site, module, site.path in chosen, site.refused or _refused(site, module))
        if fold.refused is None:
            vectors = []
            for name, offset in ((site.weight_name, site.weight_offset), (site.bias_name, 0.0)):
                tensor = held(module, name)
                flat = None if tensor is None else tensor.detach().to("cpu", torch.float64).flatten() + offset
                vectors.append(flat)
            fold.weight, fold.bias = vectors
            fold.scale = module.scale if isinstance(module, PointwiseNorm) else 1.0
        folds.append(fold)
    return folds


def held(module: nn.Module, name: str | None) -> Tensor | None:
    """Return the parameter or buffer of a dotted name, or None."""
    return named_tensors(module).get(name or "")


def _refused(site: NormSite, module: nn.Module) -> str | None:
    if not site.path:
        return "the model is the norm itself: nothing reads it"
    if not isinstance(site.dim, int):
        return f"it normalizes several axes together, {site.dim}"
    if math.prod(site.normalized_shape) < 2:
        return "it has a single channel"
    for has, name, what in ((site.has_weight, site.weight_name, "weight"), (site.has_bias, site.bias_name, "bias")):
        if has and name is None:
            return f"no tensor of it holds its {what}"
    if "forward" in module.__dict__:
        return "an instance attribute stands for its forward"
    return None


def is_exact(fold: SiteFold, as_rms: bool = False) -> bool:
    """Tell whether a norm is, to the last digits, its neutral form times its weight plus its bias.

    With ``as_rms``, whether a LayerNorm is that with an RMSNorm of the same eps, on tokens without their mean.
    """
    try:
        module, neutral = plain_copy(fold.module, torch.float64), plain_copy(fold.module, torch.float64)
    except (CannotProbeError, NotANormError, RuntimeError, TypeError):
        return False
    with torch.no_grad():
        for tensor, value in fold.own(neutral):
            tensor.fill_(value)
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))

    def run(copy: nn.Module, x: Tensor) -> Tensor:
        with plain_arithmetic(copy), Wide():
            y: Tensor = copy(x.to(device)).to(x.device, x.dtype)
        return y

    sizes = [2] * len(fold.site.input_shape)
    axis, generator = fold.axis(len(sizes)), torch.Generator().manual_seed(0)
    sizes[axis] = fold.site.normalized_shape[0]
    for scale in _SCALES:
        x = scale * (torch.randn(sizes, generator=generator, dtype=torch.float64) + 0.5)
        if as_rms:
            centred = x - x.mean(axis, keepdim=True)
            expected = centred * torch.rsqrt(centred.square().mean(axis, keepdim=True) + fold.site.eps)
        else:
            expected = run(neutral, x)
        expected = expected if fold.weight is None else expected * along(fold.weight, axis, x.ndim)
        expected = expected if fold.bias is None else expected + along(fold.bias, axis, x.ndim)
        if not relative_error([run(module, x)], [expected]) <= _EXACT:
            return False
    return True
