"""What goes where: the rewrites of a fold, each decided for all sites. docs/fold.md has their algebra.

(a) ``fold_affine``: weight and bias of a norm into everything that reads it.

(b) ``fold_means``: means out of everything that writes into the residual stream.

(c) ``fold_centers``: the centre of a point-wise layer into the one operator that feeds it.

(d) ``fold_through``: linear layers, y = a x + b, whose output is the stream too. Every value v of
the stream is kept as v / d: the readers multiply by d, the writers divide by it, and the layer is
the identity where d after it is a times d before it. b - a c goes into a bias before the layer, as
b / a - c. Each d follows from the last one.

(e) ``fold_redundant``: a norm that feeds nothing but norms goes altogether. In norm_2(W norm_1(x)),
norm_1 divides a token by s, s^2 = mean(x^2) + eps_1. Without it the outputs of norm_2 are sqrt((m +
eps_2) / (m + eps_2 / s^2)) times what they were, where m is the mean square of its inputs before:
furthest from 1 for the smallest m and the ends of s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.batches import site_tokens
from dynorm.fold.check import Inputs, run
from dynorm.fold.graph import (
    Graph,
    argument,
    came_from,
    carried,
    factor_of,
    is_move,
    is_tensor,
    made_by,
    moved_like,
    packet,
    producer,
    shape,
    users,
    width,
)
from dynorm.fold.operators import CONVOLUTIONS, Read, RefusedError, Write, read, writes
from dynorm.fold.refusals import SiteFold, Stream, require_free, require_new_bias, require_readers
from dynorm.fold.report import FOLDED, REFUSED, Rewrite
from dynorm.guard import hooked
from dynorm.layers import PointwiseNorm

_NORMS = ("layernorm", "rmsnorm")
# Each token's outputs are made of its own channels, which come last.
_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")
_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_SUMS = {"aten.add", "aten.sub", "aten.rsub"}


def fold_affine(
    graph: Graph, folds: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool
) -> None:
    """Decide for each norm whether its weight and bias can go into everything that reads it, each a product."""
    for fold in folds:
        try:
            _follow(graph, fold, affine, constants)
        except RefusedError as refusal:
            fold.kept = str(refusal)
    uses = {found.leaf: (fold, found) for fold in folds for found in fold.reads}
    for fold in folds:
        try:
            if fold.is_given:
                require_readers(graph, fold, uses, add_bias)
        except RefusedError as refusal:
            fold.kept = str(refusal)
    # A weight that several norms share changes for all of them or for none.
    given = [fold for fold in folds if fold.is_given]
    shared = [
        (fold, uses[leaf][0])
        for fold in given
        for found in fold.reads
        for leaf in found.weight.leaves
    ]
    while torn := next(
        (pair for pair in shared if pair[0].is_given and not pair[1].is_given), None
    ):
        torn[0].kept = f"a reader is shared with {torn[1].path}, which cannot be folded"


def _follow(graph: Graph, fold: SiteFold, affine: bool, constants: bool) -> None:
    """Find the factor and the shift of a norm, and everything that reads its outputs."""
    if fold.refused is not None or not fold.calls:
        raise RefusedError(fold.refused or "never called while the model was traced")
    fold.with_affine = affine and fold.chosen
    if fold.with_affine:
        fold.factor, fold.shift = fold.weight, fold.bias
    if fold.scale != 1 and (constants or affine) and fold.chosen:
        # A weight without its scale would leave the multiplication where it is.
        scale = torch.full(
            fold.site.normalized_shape, fold.scale, dtype=torch.float64, device="cpu"
        )
        fold.factor = scale if fold.factor is None else scale * fold.factor
    # The value, its channel axis, and the fewest bytes of a number on the way.
    todo = [(call, fold.axis(len(shape(call))), width(call)) for call in fold.calls]
    whole = min(width(call) for call in fold.calls)
    seen, is_scaled = set(), False
    while todo:
        value, axis, narrowest = todo.pop()
        if (value, axis) in seen:
            continue
        seen.add((value, axis))
        # Other norms come last: they are the least telling reason why an affine map stays.
        for user in sorted(users(value), key=graph.norms.__contains__):
            if user.op == "output":
                raise RefusedError("the model returns it")
            to = carried(user, value, axis)
            if to is not None:
                todo.append((user, to, min(narrowest, width(user))))
                is_scaled |= factor_of(user, value, axis)
                continue
            if is_move(user, value):
                raise RefusedError(f"its channels are split or reordered by {graph.where(user)}")
            found = read(graph, user, value, axis)
            if narrowest < min(whole, found.weight.tensor.dtype.itemsize):
                raise RefusedError(
                    f"rounded to fewer digits than the weight has before {graph.where(user)} reads "
                    "it"
                )
            fold.reads += [found] * (found not in fold.reads)
    if not fold.chosen:
        raise RefusedError("not chosen")
    if not fold.reads:
        raise RefusedError("nothing reads it")
    if is_scaled and fold.shift is not None:
        raise RefusedError("scaled token by token before it is read, and its bias with it")


def fold_means(graph: Graph, folds: Sequence[SiteFold]) -> None:
    """Find the streams that each LayerNorm is called on, and whether their means can be taken out."""
    known: list[Walk] = []
    layernorms = [fold for fold in folds if fold.calls and fold.site.kind == "layernorm"]
    for fold in layernorms:
        streams = [
            Walk.of(call.all_input_nodes[0], fold, known, graph, folds) for call in fold.calls
        ]
        fold.streams += dict.fromkeys(streams)
    for fold in layernorms:
        if any(stream.refused is None for stream in fold.streams) and not fold.is_exact(
            as_rms=True
        ):
            for stream in fold.streams:
                stream.refused = stream.refused or f"{fold.path} is no LayerNorm to the last digits"


@dataclass(eq=False, kw_only=True)
class Walk(Stream):
    """A stream that is found from one of its values; a subclass says what else may write or read it."""

    graph: Graph
    folds: Sequence[SiteFold]
    todo: list[tuple[Node, int]] = field(default_factory=list)
    not_linear: ClassVar = "cannot be centred"
    returned: ClassVar = ", with its mean"

    @classmethod
    def of(
        cls, value: Node, fold: SiteFold, known: list[Self], graph: Graph, folds: Sequence[SiteFold]
    ) -> Self:
        """Return the stream that a site's value belongs to: one that is known, or it is found now."""
        if not any(value in stream.values for stream in known):
            known.append(cls(graph=graph, folds=folds))
            known[-1]._walk(value, fold.axis(len(shape(value))))
        return next(stream for stream in known if value in stream.values)

    def _walk(self, start: Node, axis: int) -> None:
        """Find all values of the stream, and whether it is refused."""
        todo = self.todo = [(start, axis)]
        try:
            while todo:
                value, axis = todo.pop()
                if value not in self.values:
                    self.values[value] = axis
                    self._source(value, axis)
                    for user in users(value):
                        self._use(user, value, axis)
                elif self.values[value] != axis:
                    raise RefusedError(f"{self.graph.where(value)} has the channels on two axes")
            self._require()
        except RefusedError as refusal:
            self.refused = str(refusal)

    def _source(self, value: Node, axis: int) -> None:
        """Follow a value to the values that it is made of."""
        graph, (op, _) = self.graph, producer(value)
        if slot := graph.slots.get(value):
            self.writes.append(Write((value, value), slot, axis))
            # Other owners of the same parameter: their uses are values of the stream too.
            self.todo += [(node, axis) for node in slot.nodes]
        elif packet(op) in _SUMS or packet(op) == "aten.cat":
            parts: Any = op.args[:2] if packet(op) in _SUMS else op.args[0]
            for part in parts:
                if not is_tensor(part):
                    raise RefusedError(
                        f"written by {graph.where(op)}, which adds a number to all channels"
                    )
                at = len(shape(part)) - len(shape(value)) + axis
                if at < 0 or shape(part)[at] != shape(value)[axis]:
                    raise RefusedError(
                        f"written by {graph.where(op)}, in parts or one number for all channels"
                    )
                self.todo.append((part, at))
        elif source := came_from(value, axis, carried):
            self.todo.append(source)
        elif written := writes(graph, op, axis):
            self.writes += written
        elif op.op == "placeholder":
            raise RefusedError(f"written by {op.name}, which the model is given")
        elif op in graph.norms:
            norm = self.folds[graph.norms[op]]
            self._norm_writes(norm, norm.axis(len(shape(value))) == axis)
        elif packet(op) not in _ZEROS:
            raise RefusedError(f"written by {graph.where(op)}, which {self.not_linear}")

    def _use(self, user: Node, value: Node, axis: int) -> None:
        """Follow a value to one of its uses."""
        if user.op == "output":
            raise RefusedError(f"the model returns it{self.returned}")
        op, _ = producer(user)
        if op in self.graph.norms:
            norm = self.folds[self.graph.norms[op]]
            self._norm_reads(norm, norm.axis(len(shape(value))) == axis)
        elif (to := carried(user, value, axis)) is not None:
            self.todo.append((user, to))
        elif packet(op) in _SUMS:
            self.todo.append((user, axis - len(shape(value)) + len(shape(user))))
        elif packet(op) == "aten.cat" and (argument(op, 1) or 0) % len(shape(user)) != axis:
            self.todo.append((user, axis))
        else:
            self._reads(user, value, axis)

    def _require(self) -> None:
        """Check that what writes and reads the stream does nothing else."""
        self.require_writers(self.graph)

    def _norm_writes(self, norm: SiteFold, along: bool) -> None:
        """Refuse a norm that writes into the stream, or take note of it; ``along`` tells whether over its channels."""
        raise RefusedError(
            f"written by the norm {norm.path}, whose weight and bias give it a mean again "
            "(post-norm)"
        )

    def _norm_reads(self, norm: SiteFold, along: bool) -> None:
        """Refuse a norm that reads the stream, or take note of it."""
        if norm.site.kind != "layernorm" or not along:
            raise RefusedError(f"{norm.path} sees its mean")

    def _reads(self, user: Node, value: Node, axis: int) -> None:
        """Refuse any other operator that reads the stream, or take note of it."""
        raise RefusedError(f"{self.graph.where(user)} sees its mean")


def fold_centers(graph: Graph, folds: Sequence[SiteFold], add_bias: bool) -> None:
    """Decide for each point-wise layer with a learned centre whether the bias before it can take it."""
    for fold in folds:
        center = (
            fold.module.center if isinstance(fold.module, PointwiseNorm) and not fold.goes else None
        )
        if center is None or not fold.chosen or not fold.calls:
            continue
        fold.center = center.detach().to("cpu", torch.float64).expand(fold.site.normalized_shape)
        try:
            fold.center_into = bias_before(graph, fold, add_bias)
        except RefusedError as refusal:
            fold.center_kept = str(refusal)


def bias_before(graph: Graph, fold: SiteFold, add_bias: bool) -> Write:
    """Return the bias, or the table, that adds to all of a site's input and to nothing else; RefusedError if none."""
    if len(fold.calls) != 1:
        raise RefusedError("the layer is called several times")
    value = fold.calls[0].all_input_nodes[0]
    todo, refusals = [(value, fold.axis(len(shape(value))))], list[str]()
    while todo:
        value, axis = todo.pop()
        made = made_by(value, axis)
        if made is None:
            refusals.append(f"its input is also read by others than {fold.path}")
            continue
        op, axis = made
        if packet(op) == "aten.add" and not op.kwargs and op.args[0] is not op.args[1]:
            # One number for all channels has no room for a centre.
            places = [
                (p, axis - len(shape(op)) + len(shape(p))) for p in op.args[:2] if is_tensor(p)
            ]
            todo += [
                (part, at) for part, at in places if at >= 0 and shape(part)[at] == shape(op)[axis]
            ]
            continue
        biased = packet(op) in ("aten.linear", "aten.addmm", "aten.embedding", *CONVOLUTIONS)
        bias = (
            argument(op, 0 if packet(op) in ("aten.addmm", "aten.embedding") else 2)
            if biased
            else None
        )
        written = writes(graph, op, axis) if biased else []
        if op in graph.slots:
            bias, written = (
                op,
                [Write(leaf, graph.slots[op], axis) for leaf in graph.slots[op].leaves],
            )
        found = next(
            (write for write in written if op in graph.slots or bias in (None, write.leaf[1])), None
        )
        if found is None or (bias is None and not add_bias):
            hint = "" if found is None else ": pass add_bias=True"
            refusals.append(f"fed by {graph.where(op)}, which has no bias to take its centre{hint}")
        elif (
            found.slot.fixed is not None
            or found.slot.leaves != {found.leaf}
            or not found.slot.is_saved
        ):
            refusals.append(found.slot.fixed or f"{found.slot.name} is used elsewhere too")
        elif bias is not None:
            return found
        else:
            require_new_bias(graph, found.slot, op)
            return replace(found, is_new=True)
    raise RefusedError(refusals[0])


@dataclass(eq=False, kw_only=True)
class Part(Walk):
    """A stream between two linear layers: its values are ``factor`` times those of the folded model."""

    reads: list[Read] = field(default_factory=list)
    norms: list[SiteFold] = field(
        default_factory=list
    )  # those that write into it with a weight and a bias
    takers: list[SiteFold] = field(
        default_factory=list
    )  # linear layers that give all they are to their readers
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64, device="cpu"))
    group: list["Part"] = field(
        default_factory=list
    )  # the parts that change with it: one side of every layer between
    not_linear: ClassVar = "is not linear"
    returned: ClassVar = ""

    def __post_init__(self) -> None:
        self.group.append(self)

    def _norm_writes(self, norm: SiteFold, along: bool) -> None:
        is_plain = isinstance(norm.module, PointwiseNorm) or norm.is_exact()
        if not along or norm.weight is None or norm.is_given or not norm.chosen or not is_plain:
            raise RefusedError(
                f"written by the norm {norm.path}, which has no weight of its own to take a factor"
            )
        if not norm.through:
            norm.require_own(self.graph)
            self.norms += [norm] * (norm not in self.norms)

    def _norm_reads(self, norm: SiteFold, along: bool) -> None:
        if not along or not norm.goes:
            raise RefusedError(f"read by {norm.path}, which stays")
        self.takers += [norm] * (not norm.through and norm not in self.takers)

    def _reads(self, user: Node, value: Node, axis: int) -> None:
        found = read(self.graph, user, value, axis)
        self.reads += [found] * (found not in self.reads)

    def _require(self) -> None:
        super()._require()
        require_free(self.graph, self.reads, {found.leaf: found for found in self.reads})
        for norm in (*self.norms, *self.takers):
            if any(
                (call if norm in self.norms else call.args[0]) not in self.values
                for call in norm.calls
            ):
                raise RefusedError(f"{norm.path} is called on other values too")
            if any(
                found.weight.leaves - {other.leaf for other in norm.reads} for found in norm.reads
            ):
                raise RefusedError(f"a reader of {norm.path} reads another norm too")


def fold_through(graph: Graph, folds: Sequence[SiteFold], add_bias: bool) -> list[Part]:
    """Let the linear layers go that cannot give all they are to their readers, and return the parts to rescale."""
    for fold in folds:
        if fold.goes and not fold.is_given and fold.calls:
            assert fold.weight is not None
            try:
                if zeros := (fold.weight == 0).nonzero().flatten().tolist():
                    raise RefusedError(
                        f"its weight is 0 in channel {zeros[0]}, which no factor before it undoes"
                    )
                if len(fold.calls) != 1:
                    raise RefusedError("the layer is called several times")
                # With the sign of a centre.
                fold.center = None if fold.bias is None else -fold.bias / fold.weight
                fold.center_into = (
                    None if fold.center is None else bias_before(graph, fold, add_bias)
                )
                fold.through = True
            except RefusedError as refusal:
                fold.kept = f"{fold.kept}; {refusal}"
    parts: list[Part] = []
    for fold in (fold for fold in folds if fold.through):
        assert fold.weight is not None
        ends = (fold.calls[0].all_input_nodes[0], fold.calls[0])
        before, after = (Part.of(value, fold, parts, graph, folds) for value in ends)
        ratio = fold.weight * before.factor / after.factor
        pins = [
            next((part.refused for part in end.group if part.refused), None)
            for end in (before, after)
        ]
        if before.group is after.group or None not in pins:
            fold.left, fold.left_because = (
                ratio,
                "; ".join(dict.fromkeys(filter(None, pins))) or "it comes round",
            )
            continue
        for part in after.group if pins[1] is None else before.group:
            part.factor = part.factor * ratio if pins[1] is None else part.factor / ratio
        before.group += after.group
        for part in after.group:
            part.group = before.group
    for part in parts:
        for taker in part.takers:
            assert taker.factor is not None
            taker.factor = part.factor * taker.factor
    return [part for part in parts if not bool((part.factor == 1).all())]


def fold_redundant(
    model: nn.Module, graph: Graph, folds: Sequence[SiteFold], example: Inputs, accepted: float
) -> None:
    """Decide for each norm whether it feeds norms only, whose outputs change by no more than is accepted."""
    squares = _mean_squares(model, folds, example)
    # In the order of their calls: of norms in a row the first goes, and the next one has to stay.
    needed = set[SiteFold]()
    for fold in (fold for fold in folds if fold.chosen and fold.site.kind in _NORMS):
        try:
            fed = _fed(graph, folds, fold)
            if (
                not fed
                or fold in needed
                or any(norm.redundant.state == FOLDED or norm is fold for norm in fed)
            ):
                raise RefusedError("it, or a norm beside it in a row, goes")
            ends = [square(squares[fold.module]) + fold.site.eps for square in (min, max)]
            pairs = [
                (min(squares[norm.module]), norm.site.eps, end) for norm in fed for end in ends
            ]
            change = max(abs(math.sqrt((m + eps) / (m + eps / s)) - 1) for m, eps, s in pairs)
            if change > accepted:
                raise RefusedError(f"an eps after it would change outputs by up to {change:.1e}")
            fold.redundant, fold.change = Rewrite(FOLDED, tuple(norm.path for norm in fed)), change
            needed |= set(fed)
        except RefusedError as refusal:
            fold.redundant = Rewrite(REFUSED, reason=str(refusal))


def _fed(graph: Graph, folds: Sequence[SiteFold], fold: SiteFold) -> list[SiteFold]:
    """Return the norms that a norm feeds through products; RefusedError where anything else sees a token's scale."""
    if fold.kept is not None:
        raise RefusedError(fold.kept)
    if fold.bias is not None and bool(fold.bias.any()):
        raise RefusedError("its bias is not 0")
    if fold.site.output_dtype is not None:
        raise RefusedError(f"it makes {fold.site.output_dtype} of what it takes")
    if fold.site.kind == "layernorm" and not fold.becomes_rms:
        raise RefusedError(f"it takes the mean out: {fold.stream_refused or 'center is off'}")
    # Each value with the number of each element's token, and whether a product has read the norm.
    numbers = [
        torch.arange(math.prod(shape(call)), device="cpu").view(shape(call)) for call in fold.calls
    ]
    tokens = [n.amin(fold.axis(n.ndim), keepdim=True).expand(n.shape) for n in numbers]
    todo, found = (
        list(zip(fold.calls, tokens, [False] * len(tokens), strict=True)),
        list[SiteFold](),
    )
    while todo:
        value, token, is_read = todo.pop(0)
        for user in users(value):
            op, _ = producer(user)
            norm = folds[graph.norms[op]] if op in graph.norms and is_read else None
            reader = next((read for read in fold.reads if read.node is op and not is_read), None)
            # A move by an index, another tensor, may bring other tokens.
            if is_move(user, value) and op.all_input_nodes == [value] and -1 not in shape(user):
                todo.append((user, moved_like(user, value, token), is_read))
            elif (
                norm
                and norm.site.kind in _NORMS
                and torch.equal(token, token.roll(1, norm.axis(token.ndim)))
            ):
                found += [norm] * (norm not in found)
            elif (
                reader
                and packet(op) in _PRODUCTS
                and not reader.bias
                and shape(user)[:-1] == shape(value)[:-1]
            ):
                todo.append((user, token[..., :1].expand(shape(user)), True))
            else:
                with_bias = " with its bias" if reader and reader.bias else ""
                raise RefusedError(f"{graph.where(user)}{with_bias} sees the scale of its tokens")
    return found


def _mean_squares(
    model: nn.Module, folds: Sequence[SiteFold], example: Inputs
) -> dict[nn.Module, list[float]]:
    """Return the mean squares of the tokens that norms take, a LayerNorm's about their means; none of a token of 0."""
    sites = {
        fold.module: fold.site
        for fold in folds
        if fold.refused is None and fold.site.kind in _NORMS
    }
    found: dict[nn.Module, list[float]] = {module: [] for module in sites}

    def take(module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        tokens = site_tokens(sites[module], args[0].detach().double(), [])
        squares = (
            tokens.var(-1, correction=0)
            if sites[module].kind == "layernorm"
            else tokens.square().mean(-1)
        )
        found[module] += squares[squares > 0].tolist()

    with hooked(sites, take):
        run(model, example)
    return {module: squares or [1.0] for module, squares in found.items()}
