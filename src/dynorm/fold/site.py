"""One norm or point-wise layer of a fold, the stream that it is called on, and its row of the report."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.find.recover import core
from dynorm.find.tokens import (
    CannotProbeError,
    TokenFunction,
    named_tensors,
    plain_arithmetic,
    plain_copy,
)
from dynorm.fold.check import Wide, relative_error
from dynorm.fold.report import FOLDED, NOTHING, OFF, REFUSED, FoldedSite, Rewrite
from dynorm.layers import LinearControl, PointwiseNorm
from dynorm.site import NormSite
from dynorm.stream.graph import Graph, shape, width
from dynorm.stream.operators import Read, RefusedError, Write

_EXACT = 1e-11
# Small tokens show whether eps stands beside the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


@dataclass(eq=False)
class Stream:
    """All values that are sums of one another, up to operators that leave each channel alone."""

    values: dict[Node, int] = field(default_factory=dict)  # with the axis of the channels
    writes: list[Write] = field(default_factory=list)
    refused: str | None = None  # why its mean cannot be taken out

    def require_writers(self, graph: Graph) -> None:
        """Check that the parameters that write into it do nothing else."""
        of_leaf = {write.leaf: write for write in self.writes}
        gains = {write.gain[0] for write in self.writes if write.gain is not None}
        narrowest = min(width(value) for value in self.values)
        for write in self.writes:
            slot = write.slot
            if narrowest < slot.tensor.dtype.itemsize:
                raise RefusedError(
                    f"{slot.name} writes into it, and it is rounded to fewer digits than that has"
                )
            if slot.fixed is not None:
                raise RefusedError(f"{slot.name} writes into it: {slot.fixed}")
            if not slot.is_saved:
                raise RefusedError(f"{slot.name} writes into it, and is not saved with the model")
            # A parameter that is itself a value of the stream, as learned positions are: its uses
            # were followed.
            for leaf in () if write.leaf[0] is write.leaf[1] else slot.leaves:
                other = of_leaf.get(leaf)
                if other is None or other.axis != write.axis:
                    use = graph.where(leaf[0])
                    raise RefusedError(
                        f"{slot.name} writes into it, and is also used by {use}{slot.hint}"
                    )
                if (other.gain and other.gain[1]) is not (write.gain and write.gain[1]):
                    how = f"several times, not always scaled by the same gain{slot.hint}"
                    raise RefusedError(f"{slot.name} writes into it {how}")
            if write.gain is not None:
                gain = write.gain[1]
                if gain.fixed is not None or len(gain.leaves) != 1 or not gain.leaves <= gains:
                    raise RefusedError(
                        f"{gain.name} scales what is written into it, and is used elsewhere too"
                    )
                if not gain.is_saved:
                    raise RefusedError(
                        f"{gain.name} scales what is written into it, and is not saved with the "
                        "model"
                    )


@dataclass(eq=False)
class SiteFold:
    """One norm or point-wise layer, and the fold there."""

    site: NormSite
    module: nn.Module
    chosen: bool = True  # the caller wants it folded
    refused: str | None = None  # why nothing of it can be folded
    calls: list[Node] = field(default_factory=list)  # its nodes in the graph
    with_affine: bool = False  # its weight and bias are to go too, and not its scale alone
    factor: Tensor | None = (
        None  # the part of weight and scale that goes into the readers; None for 1
    )
    shift: Tensor | None = None  # the part of the bias that does; None for 0
    reads: list[Read] = field(default_factory=list)  # everything that reads it
    kept: str | None = None  # why factor and shift stay
    streams: list[Stream] = field(default_factory=list)  # those that a LayerNorm is called on
    center: Tensor | None = (
        None  # the learned centre of a point-wise layer, where it is to be folded
    )
    center_into: Write | None = None  # the bias, or the table, that takes the centre
    center_kept: str | None = None  # why the centre stays
    goes: bool = False  # a linear layer without witnesses: all of it is its weight and its bias
    through: bool = False  # it goes because the stream that it reads and writes is rescaled
    left: Tensor | None = None  # the part of such a layer's weight that must stay, and why
    left_because: str = ""
    redundant: Rewrite = field(
        default_factory=lambda: Rewrite(OFF)
    )  # whether it goes because it feeds norms only
    change: float = 0.0  # the most that the outputs of these change then, relative

    def __post_init__(self) -> None:
        """Take the weight, the bias and the fixed factor from the module, in float64; None for 1, 0 and 1."""
        own = [] if self.refused else self.own()
        values = {
            name: t.detach().to("cpu", torch.float64).flatten() + offset for name, t, offset in own
        }
        self.weight, self.bias = values.get("weight"), values.get("bias")
        self.scale = (
            self.module.scale
            if isinstance(self.module, PointwiseNorm) and not self.refused
            else 1.0
        )
        if self.goes:
            assert isinstance(self.module, LinearControl)
            slope = (
                self.scale * (-0.5 * self.module.log_beta.detach().to("cpu", torch.float64)).exp()
            )
            self.weight = slope.expand(self.site.normalized_shape) * (
                1 if self.weight is None else self.weight
            )
            if self.module.center is not None:
                moved = self.weight * self.module.center.detach().to("cpu", torch.float64)
                self.bias = (0 if self.bias is None else self.bias) - moved
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
        is_linear = (
            type(layer) is LinearControl
            and not layer.witness_channels
            and layer.output_dtype is None
        )
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
        for name, held, added in (
            ("weight", site.weight_name, site.weight_offset),
            ("bias", site.bias_name, 0.0),
        ):
            if held in tensors:
                yield name, tensors[held], added

    def require_own(self, graph: Graph) -> None:
        """Check that its weight and bias are saved, and its own alone."""
        for _, tensor, _ in self.own():
            slots = [slot for slot in graph.all_slots if slot.tensor is tensor]
            if not slots[0].is_saved:
                raise RefusedError(
                    f"{slots[0].name} is not saved with the model: it would come back when it is "
                    "loaded"
                )
            if len(slots) > 1 or len(slots[0].owners) > 1 or slots[0].leaves or slots[0].is_shared:
                raise RefusedError(f"{slots[0].name} is used elsewhere too")

    def is_exact(self, as_rms: bool = False) -> bool:
        """Tell whether it is its neutral form, or an RMSNorm ``as_rms``, times weight plus bias, to the last digits."""
        rank = len(self.site.input_shape)
        axis = self.axis(rank)
        sizes = tuple(
            self.site.normalized_shape[0] if place == axis else 2 for place in range(rank)
        )
        device = next(
            (t.device for t in (*self.module.parameters(), *self.module.buffers())),
            torch.device("cpu"),
        )
        try:
            with plain_arithmetic(self.module), Wide():
                copies = (plain_copy(self.module, torch.float64) for _ in range(2))
                norm, neutral = (
                    TokenFunction(copied, sizes, (axis,), torch.float64, device)
                    for copied in copies
                )
                for name, tensor, offset in self.own(neutral.module):
                    tensor.fill_((name == "weight") - offset)
                for scale in _SCALES:
                    tokens = norm.sample(scale, seed=0)
                    expected = (
                        core(tokens, "layernorm", self.site.eps) if as_rms else neutral(tokens)
                    )
                    expected = expected if self.weight is None else expected * self.weight
                    expected = expected if self.bias is None else expected + self.bias
                    if not relative_error([norm(tokens)], [expected]) <= _EXACT:
                        return False
        # It has no copy in float64, or that raises.
        except (CannotProbeError, RuntimeError, TypeError):
            return False
        return True

    def row(self, affine: bool, means: bool, constants: bool) -> FoldedSite:
        """Return the row of the report, given which rewrites the caller wanted."""
        constants = constants and isinstance(self.module, PointwiseNorm)
        rows = (
            (affine, self._affine_row),
            (means, self._mean_row),
            (constants, self._constants_row),
        )
        given, mean, constant = (
            row() if wanted and self.chosen else Rewrite(OFF) for wanted, row in rows
        )
        channels = math.prod(self.site.normalized_shape)
        elements = sum(math.prod(shape(call)) for call in self.calls)
        removed = (
            (self.weight is not None) + (self.bias is not None) if given.state == FOLDED else 0
        )
        removed += self.center_into is not None and not self.through
        # Taking the mean out is a sum and a difference.
        # What is gone took squares, their sum, and a product.
        operations = elements * (
            removed + 2 * self.becomes_rms + 3 * (self.redundant.state == FOLDED)
        )
        kind, becomes = (
            self.site.kind or self.site.class_name,
            "RMSNorm" if self.becomes_rms else "",
        )
        becomes = "Identity" if self.is_gone else becomes
        numbers = (channels * removed, operations, becomes, self.redundant, self.change)
        return FoldedSite(self.path, kind, channels, given, mean, constant, *numbers)

    def _affine_row(self) -> Rewrite:
        empty = self.weight is None and self.bias is None
        if self.through:
            left = f"a factor per channel stays: {self.left_because}"
            return (
                Rewrite(FOLDED, ("the stream",))
                if self.left is None
                else Rewrite(REFUSED, reason=left)
            )
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
        stays = (
            f"its slope stays: {self.left_because}"
            if self.left_because and not self.through
            else None
        )
        if into or self.is_gone:
            return Rewrite(FOLDED if into else NOTHING, into, stays)
        reason = self.center_kept or stays or (None if self.scale == 1 else self.kept)
        return Rewrite(NOTHING) if reason is None else Rewrite(REFUSED, reason=reason)

    def _readers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(read.weight.name for read in self.reads))
