"""The records of a fold: one per norm or point-wise layer, with its outcome and the reasons."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.find.tokens import named_tensors
from dynorm.fold.graph import Leaf, Slot, along, shape
from dynorm.fold.report import FOLDED, NOTHING, OFF, REFUSED, FoldedSite, Rewrite
from dynorm.layers import LinearControl, PointwiseNorm
from dynorm.site import NormSite


@dataclass(frozen=True)
class Read:
    """One operator that reads all channels of a value linearly."""

    node: Node
    leaf: Leaf  # its use of the weight
    weight: Slot
    axis: int  # of the weight that the value's channels go along
    out: int | None  # the weight's axis of outputs; None where they have no one axis
    groups: int = 1  # of a convolution; the channels of each group go along ``axis`` then
    bias: tuple[Leaf, Slot] | None = None  # what is added to the outputs: its use, and the parameter
    no_shift: str | None = None  # why a constant in the value cannot become a bias

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


@dataclass(frozen=True)
class Write:
    """A parameter that writes into a stream."""

    leaf: Leaf  # its use
    slot: Slot
    axis: int  # of the parameter that the stream's channels go along
    gain: tuple[Leaf, Slot] | None = None  # the parameter that scales each channel on the way (LayerScale), and its use
    is_new: bool = False  # it is a weight, whose layer is given a bias in its place


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that leave each channel alone."""

    values: dict[Node, int] = field(default_factory=dict)  # with the axis of the channels
    writes: list[Write] = field(default_factory=list)
    refused: str | None = None  # why its mean cannot be taken out


@dataclass(eq=False)
class SiteFold:
    """One norm or point-wise layer, and the fold there."""

    site: NormSite
    module: nn.Module
    chosen: bool = True  # the caller wants it folded
    refused: str | None = None  # why nothing of it can be folded
    calls: list[Node] = field(default_factory=list)  # its nodes in the graph
    factor: Tensor | None = None  # the part of weight and scale that goes into the readers; None for 1
    shift: Tensor | None = None  # the part of the bias that does; None for 0
    reads: list[Read] = field(default_factory=list)  # everything that reads it
    kept: str | None = None  # why factor and shift stay
    streams: list[Stream] = field(default_factory=list)  # those that a LayerNorm is called on
    center: Tensor | None = None  # the learned centre of a point-wise layer, where it is to be folded
    center_into: Write | None = None  # the bias, or the table, that takes the centre
    center_kept: str | None = None  # why the centre stays
    goes: bool = False  # a linear layer without witnesses: all of it is its weight and its bias
    through: bool = False  # it goes because the stream that it reads and writes is rescaled
    left: Tensor | None = None  # the part of such a layer's weight that must stay, and why
    left_because: str = ""
    redundant: Rewrite = field(default_factory=lambda: Rewrite(OFF))  # whether it goes because it feeds norms only
    change: float = 0.0  # the most that the outputs of these change then, relative

    def __post_init__(self) -> None:
        """Take the weight, the bias and the fixed factor from the module, in float64; None for 1, 0 and 1."""
        own = [] if self.refused else self.own()
        values = {name: t.detach().to("cpu", torch.float64).flatten() + offset for name, t, offset in own}
        self.weight, self.bias = values.get("weight"), values.get("bias")
        self.scale = self.module.scale if isinstance(self.module, PointwiseNorm) and not self.refused else 1.0
        if self.goes:
            layer, ones = self.module, torch.ones(self.site.normalized_shape, dtype=torch.float64)
            assert isinstance(layer, LinearControl)
            slope = (-0.5 * layer.log_beta.detach().to("cpu", torch.float64)).exp()
            self.weight = self.scale * slope * (ones if self.weight is None else self.weight)
            if layer.center is not None:
                moved = self.weight * layer.center.detach().to("cpu", torch.float64)
                self.bias = -moved if self.bias is None else self.bias - moved
            self.scale = 1.0

    @property
    def path(self) -> str:
        """Return the path in the model."""
        return self.site.path

    @property
    def is_given(self) -> bool:
        """Tell whether its factor or shift goes into the readers."""
        return self.kept is None and (self.factor is not None or self.shift is not None)

    @property
    def is_linear(self) -> bool:
        """Tell whether it is a product and a sum per channel, and nothing else, and may go."""
        layer = self.module
        is_linear = type(layer) is LinearControl and not layer.witness_channels and layer.output_dtype is None
        return is_linear and self.chosen and self.refused is None

    @property
    def is_gone(self) -> bool:
        """Tell whether nothing of it stays."""
        is_line = self.goes and self.left is None and (self.through or self.is_given)
        return is_line or self.redundant.state == FOLDED

    @property
    def stream_refused(self) -> str | None:
        """Return why a LayerNorm stays one: a stream that it is called on must keep its mean."""
        return next((stream.refused for stream in self.streams if stream.refused is not None), None)

    @property
    def becomes_rms(self) -> bool:
        """Tell whether it is a LayerNorm that becomes an RMSNorm."""
        return bool(self.chosen and self.streams and self.stream_refused is None)

    def axis(self, rank: int) -> int:
        """Return the channel axis of an input with so many axes."""
        assert isinstance(self.site.dim, int)
        return self.site.dim % rank

    def own(self, copy: nn.Module | None = None) -> Iterator[tuple[str, Tensor, float]]:
        """Yield "weight" and "bias", where it or its copy has one, each with the tensor and the number added to it."""
        site, tensors = self.site, named_tensors(copy or self.module)
        for name, held, added in (("weight", site.weight_name, site.weight_offset), ("bias", site.bias_name, 0.0)):
            if held in tensors:
                yield name, tensors[held], added

    def row(self, affine: bool, means: bool, constants: bool) -> FoldedSite:
        """Return the row of the report, given which rewrites the caller wanted."""
        constants = constants and isinstance(self.module, PointwiseNorm)
        rows = ((affine, self._affine_row), (means, self._mean_row), (constants, self._constants_row))
        given, mean, constant = (row() if wanted and self.chosen else Rewrite(OFF) for wanted, row in rows)
        channels = math.prod(self.site.normalized_shape)
        elements = sum(math.prod(shape(call)) for call in self.calls)
        removed = (self.weight is not None) + (self.bias is not None) if given.state == FOLDED else 0
        removed += self.center_into is not None and not self.through
        # Taking the mean out is a sum and a difference.
        # What is gone took squares, their sum, and a product.
        operations = elements * (removed + 2 * self.becomes_rms + 3 * (self.redundant.state == FOLDED))
        kind, becomes = self.site.kind or self.site.class_name, "RMSNorm" if self.becomes_rms else ""
        becomes = "Identity" if self.is_gone else becomes
        numbers = (channels * removed, operations, becomes, self.redundant, self.change)
        return FoldedSite(self.path, kind, channels, given, mean, constant, *numbers)

    def _affine_row(self) -> Rewrite:
        empty = self.weight is None and self.bias is None
        if self.through:
            left = f"a factor per channel stays: {self.left_because}"
            return Rewrite(FOLDED, ("the stream",)) if self.left is None else Rewrite(REFUSED, reason=left)
        if self.kept is not None:
            nothing = empty and self.refused is None and not isinstance(self.module, PointwiseNorm)
            return Rewrite(NOTHING) if nothing else Rewrite(REFUSED, reason=self.kept)
        return Rewrite(NOTHING) if empty or not self.is_given else Rewrite(FOLDED, self._readers())

    def _mean_row(self) -> Rewrite:
        if self.site.kind != "layernorm":
            unknown = self.refused is not None and not self.site.kind
            return Rewrite(REFUSED, reason=self.refused) if unknown else Rewrite(NOTHING)
        if not self.becomes_rms:
            uncalled = self.refused or "never called while the model was traced"
            return Rewrite(REFUSED, reason=self.stream_refused or uncalled)
        writes = (write.slot.name for stream in self.streams for write in stream.writes)
        return Rewrite(FOLDED, tuple(dict.fromkeys(writes)))

    def _constants_row(self) -> Rewrite:
        into = self._readers() if self.scale != 1 and self.is_given else ()
        into += () if self.center_into is None or self.through else (self.center_into.slot.name,)
        stays = f"its slope stays: {self.left_because}" if self.left_because and not self.through else None
        if into or self.is_gone:
            return Rewrite(FOLDED if into else NOTHING, into, stays)
        reason = self.center_kept or stays or (None if self.scale == 1 else self.kept)
        return Rewrite(NOTHING) if reason is None else Rewrite(REFUSED, reason=reason)

    def _readers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(read.weight.name for read in self.reads))
