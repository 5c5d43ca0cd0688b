"""One norm or point-wise layer of a fold, and where a fold is refused: of a model, a site, its readers, a stream."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.find.recover import core
from dynorm.find.tokens import (
    CannotProbeError,
    TokenFunction,
    named_tensors,
    plain_arithmetic,
    plain_copy,
)
from dynorm.fold.check import Wide, relative_error
from dynorm.fold.graph import Graph, Leaf, Slot, paths_of, shape, width
from dynorm.fold.operators import Read, RefusedError, Write
from dynorm.fold.report import FOLDED, NOTHING, OFF, REFUSED, FoldedSite, Rewrite
from dynorm.guard import require_plain_model
from dynorm.layers import AnnealedNorm, LinearControl, PointwiseNorm
from dynorm.site import NormSite

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
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
            type(layer) is LinearControl and not layer.witness_channels and self._keeps_dtype()
        )
        return is_linear and self.chosen and self.refused is None

    def _keeps_dtype(self) -> bool:
        """Return whether each call returns the dtype that it was given."""
        layer = self.module
        assert isinstance(layer, PointwiseNorm)
        if layer.output_dtype is None:
            return True
        for call in self.calls:
            given = call.all_input_nodes[0].meta["val"].dtype
            if layer.returned_dtype(given) != given:
                return False
        return layer.output_dtype.follows_model

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


Uses = dict[Leaf, tuple[SiteFold, Read]]
"""The reads of all sites by their use of a weight."""


def require_model(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used."""
    require_plain_model(model)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        place = f"{training!r} is" if training else "it is"
        raise ModelError(
            f"the model must be in eval mode, but {place} in training mode: call model.eval()"
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            "the model's weights must be plain numbers, but it is quantized: fold it first, then "
            "quantize"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN and not tensor.is_quantized
        if not whole or (tensor.is_floating_point() and tensor.element_size() < 2):
            inner = type(tensor.data).__name__
            kind = f"of {tensor.dtype}" if inner in ("Tensor", "Parameter") else f"a {inner}"
            raise ModelError(
                f"the model's weights must be plain numbers, but {name!r} is {kind}: fold the "
                "model before it "
                "is quantized or sharded"
            )
    for path, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise ModelError(
                f"the model's weights must be plain numbers, but {path!r} is quantized: fold it "
                "before"
            )


def refused(site: NormSite, module: nn.Module) -> str | None:
    """Return why nothing of a norm can be folded, whatever stands beside it, or None."""
    reasons = (
        (
            isinstance(module, AnnealedNorm),
            "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first",
        ),
        (not site.path, "the model is the norm itself: nothing reads it"),
        (not isinstance(site.dim, int), f"it normalizes several axes together, {site.dim}"),
        (math.prod(site.normalized_shape) < 2, "it has a single channel"),
        (site.has_weight and site.weight_name is None, "no tensor of it holds its weight"),
        (site.has_bias and site.bias_name is None, "no tensor of it holds its bias"),
        ("forward" in module.__dict__, "an instance attribute stands for its forward"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def require_readers(graph: Graph, fold: SiteFold, uses: Uses, add_bias: bool) -> None:
    """Check that the readers' weights and biases, and the norm's own, are used for nothing else."""
    require_free(graph, fold.reads, {leaf: found for leaf, (_, found) in uses.items()})
    for found in fold.reads:
        for other, _ in (uses[leaf] for leaf in found.weight.leaves):
            pairs = ((fold.factor, other.factor), (fold.shift, other.shift))
            if not all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs):
                what = f"also reads {other.path}, whose weight or bias differs"
                raise RefusedError(f"{found.weight.name}, which reads it, {what}")
    if not isinstance(fold.module, PointwiseNorm):
        fold.require_own(graph)
    for found in fold.reads if fold.shift is not None else ():
        _require_bias(graph, fold, found, uses, add_bias)
    if not isinstance(fold.module, PointwiseNorm) and not fold.is_exact():
        raise RefusedError("it is no norm times its weight plus its bias to the last digits")


def require_free(graph: Graph, reads: Sequence[Read], uses: Mapping[Leaf, Read]) -> None:
    """Check that the weights of some reads are saved, and used for nothing but ``uses``, in the same way."""
    for found in reads:
        slot = found.weight
        if slot.fixed is not None or not slot.is_saved:
            raise RefusedError(
                slot.fixed or f"{slot.name}, which reads it, is no parameter of floating point"
            )
        for leaf in slot.leaves:
            if leaf not in uses or (uses[leaf].axis, uses[leaf].groups) != (
                found.axis,
                found.groups,
            ):
                raise RefusedError(
                    f"{slot.name}, which reads it, is also used by "
                    f"{graph.where(leaf[0])}{slot.hint}"
                )


def _require_bias(graph: Graph, fold: SiteFold, found: Read, uses: Uses, add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = found.weight
    # A bias added to the layer would reach the use that has one of its own too.
    if any((uses[leaf][1].bias is None) != (found.bias is None) for leaf in slot.leaves):
        raise RefusedError(
            f"{slot.name}, which reads it, has a bias in one use and none in another"
        )
    if found.no_shift is not None:
        raise RefusedError(f"its bias cannot be folded: {found.no_shift}")
    if found.bias is None:
        if not add_bias:
            raise RefusedError(f"{slot.name} has no bias to take its bias: pass add_bias=True")
        require_new_bias(graph, slot, found.node)
        return
    bias = found.bias[1]
    if bias.fixed is not None or bias.tensor is slot.tensor:
        raise RefusedError(bias.fixed or f"{bias.name} is a weight too")
    mine = {
        other.bias[0] for other in fold.reads if other.bias is not None and other.weight is slot
    }
    for leaf in bias.leaves - mine:
        raise RefusedError(f"{bias.name} is also used by {graph.where(leaf[0])}")


def require_new_bias(graph: Graph, slot: Slot, node: Node) -> None:
    """Check that a weight is that of one linear layer, which can be given a bias."""
    owner = slot.owners[0].module
    # Code that takes the weight without calling the layer would not add its bias.
    called = len(slot.owners) == 1 and owner in map(graph.modules.get, paths_of(node))
    if not called or not _takes_bias(owner):
        raise RefusedError(
            f"no bias can be added to {slot.name}: it is not the weight of one linear layer"
        )


def _takes_bias(module: nn.Module) -> bool:
    """Tell whether a module lacks a bias, and would add one: a convolution of torch's own, or a linear layer."""
    if module._parameters.get("bias", 0) is not None or "forward" in module.__dict__:
        return False
    if type(module).forward in (
        nn.Linear.forward,
        nn.Conv1d.forward,
        nn.Conv2d.forward,
        nn.Conv3d.forward,
    ):
        return True
    if not isinstance(module, nn.Linear):
        return False
    # A forward of its own is tried on a copy whose weight is zero.
    weight = torch.zeros_like(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = {**module._parameters, "weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            result = tried.forward(weight.new_ones(2, weight.shape[1]))
    # Whatever it raises, it does not add the bias to the product with the weight, and nothing else.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))
