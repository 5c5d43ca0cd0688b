"""``find_streams``: the residual streams of a model, with their norms, writers and readers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from dynorm.batches import example_arguments
from dynorm.find.probe import norms_in
from dynorm.guard import require_plain_model, undisturbed
from dynorm.site import NormSite
from dynorm.stream.channels import carried
from dynorm.stream.graph import (
    PERMUTATIONS,
    VIEWS,
    Slot,
    is_tensor,
    norm_index,
    packet,
    producer,
    users,
)
from dynorm.stream.operators import Read, Write
from dynorm.stream.readers import Readers, shared_readers
from dynorm.stream.stream import SUMS, Stream
from dynorm.stream.survey import Surroundings, survey
from dynorm.stream.tensors import copied


@dataclass(frozen=True)
class Writer:
    """One operator that adds to a stream.

    Args:
        place: its name and module, for a message.
        weight: the weight or table, or the parameter that is itself added; with the axis that the
            stream's channels lie along. Its slot names the owners: several if it is tied.
        bias: the bias, if there is one.
        scale: the number that its output is multiplied with before it joins the stream, -1 for a
            subtraction; None if that differs between tokens.
        is_entry: it does not depend on a norm of the stream: the stream begins with it.
    """

    place: str
    weight: Write
    bias: Write | None
    scale: float | None
    is_entry: bool


@dataclass(frozen=True)
class ResidualStream:
    """A residual stream, and the norms that read it.

    Args:
        sites: the norms, in call order.
        readers: everything that reads the outputs of each of them.
        written: the writers that are in the input of each of them, as positions in ``writers``.
        direct_reads: the linear operators that read the stream without a norm.
        writers: everything linear that adds to it, in the order of the calls.
        slots: all parameters of the model, those of other streams too.
        entry: how it begins: "embedding", "sum of embeddings", "projection" (of patches or frames),
            or "unknown" if something that is not linear writes into it.
        copied: the path of a norm that reads a copy of the stream, which goes on without what is
            written into the copy; or None.
        refused: why its channels cannot be mixed by a linear map, or None.
    """

    sites: list[NormSite]
    readers: list[Readers]
    written: list[list[int]]
    direct_reads: list[Read]
    writers: list[Writer]
    slots: Sequence[Slot]
    entry: str
    copied: str | None
    refused: str | None


def find_streams(
    model: nn.Module, *args: object, untie: bool = False, **kwargs: object
) -> list[ResidualStream]:
    """Find the residual streams of a model that its norms read.

    The model is run once and traced once; it stays as it is. Norms that cannot be recovered are
    left out, and count as operators that read the stream.

    Args:
        model: in eval mode; not compiled, wrapped, quantized or sharded.
        *args: the example, the arguments of one call; or one batch, a tuple or dict of them.
        untie: each owner of a tied parameter may get a tensor that it does not share.
        **kwargs: the example's keyword arguments.

    Returns:
        The streams, in the order of their first norms.

    Raises:
        ModelError: the model cannot be traced.
        DataError: the model cannot be run on the example.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
        >>> (stream,) = find_streams(model, torch.arange(3))
        >>> stream.entry, stream.writers[0].weight.slot.name, stream.readers[0].reads[0].weight.name
        ('embedding', '0.weight', '2.weight')
    """
    require_plain_model(model)
    args, kwargs = example_arguments(model, args, kwargs)
    example = copied((args, kwargs))
    norms = {}
    with undisturbed(model, attributes=True) as put_back:
        sites = norms_in(model, *copied(example))
        for index, site in enumerate(sites):
            if site.refused is None and site.path and isinstance(site.dim, int):
                norms[index] = site
        # The trace must not start from tensors that the run kept on a module.
        put_back()
        graph, around = survey(model, norms, example, untie)
    by_stream: dict[Stream, dict[int, Surroundings]] = {}
    for index in sorted(around):
        for stream in around[index].before:
            by_stream.setdefault(stream, {})[index] = around[index]
    position = {node: number for number, node in enumerate(graph.nodes)}
    described = []
    for stream, members in by_stream.items():
        described.append(_described(stream, sites, members, position, graph.slots))
    return described


def _described(
    stream: Stream,
    sites: Sequence[NormSite],
    members: Mapping[int, Surroundings],
    position: Mapping[Node, int],
    slots: Sequence[Slot],
) -> ResidualStream:
    after_norms: set[Node] = set()
    for around in members.values():
        _add_downstream(around.calls, after_norms)
    by_operator: dict[Node, list[Write]] = {}
    for write in stream.writes:
        by_operator.setdefault(write.leaf.node, []).append(write)
    operators = sorted(by_operator, key=position.__getitem__)
    written = []
    for around in members.values():
        made_of = _parts_of(around.calls, stream)
        written.append([place for place, node in enumerate(operators) if node in made_of])
    writers = []
    for node in operators:
        weight, *others = dict.fromkeys(by_operator[node])
        bias = others[0] if others else None
        scale = _scale(weight, stream)
        is_entry = node not in after_norms
        writers.append(Writer(weight.leaf.place, weight, bias, scale, is_entry))
    return ResidualStream(
        [sites[index] for index in members],
        [around.readers for around in members.values()],
        written,
        stream.reads,
        writers,
        slots,
        "unknown" if stream.writers_unknown else _entry(writers),
        _copied(sites, members),
        _refusal(stream, sites, members),
    )


def _entry(writers: Sequence[Writer]) -> str:
    """Return how a stream begins, all of whose writers are known."""
    first = [writer.weight for writer in writers if writer.is_entry]
    for write in first:
        if not write.is_value and packet(write.leaf.node) != "aten.embedding":
            return "projection"
    if not first:
        return "unknown"
    return "embedding" if len(first) == 1 else "sum of embeddings"


def _add_downstream(nodes: Sequence[Node], known: set[Node]) -> None:
    """Add everything that depends on some nodes."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in known:
            known.add(node)
            todo += node.users


def _parts_of(calls: Sequence[Node], stream: Stream) -> set[Node]:
    """Return the values of a stream that the inputs of some norm calls are sums of, and their operators."""
    parts: set[Node] = set()
    todo = [call.all_input_nodes[0] for call in calls]
    while todo:
        value = todo.pop()
        if value in parts:
            continue
        operator, _ = producer(value)
        parts |= {value, operator}
        for source in operator.all_input_nodes:
            if source in stream.values:
                todo.append(source)
    return parts


def _copied(sites: Sequence[NormSite], members: Mapping[int, Surroundings]) -> str | None:
    """Return the path of the first norm whose input nothing but norms read, or None.

    The last norm is left out, because the stream ends there.
    """
    for index, around in list(members.items())[:-1]:
        for call in around.calls:
            value = call.all_input_nodes[0]
            readers = list(users(value))
            while len(readers) == 1 and packet(value) in VIEWS | PERMUTATIONS:
                value = value.all_input_nodes[0]
                readers = list(users(value))
            if all(norm_index(reader) is not None for reader in readers):
                return sites[index].path
    return None


def _scale(write: Write, stream: Stream) -> float | None:
    """Return the number that a write is multiplied with before it is added to other values."""
    value = (write.gain_leaf or write.leaf).node
    scale = 1.0
    while True:
        followers = list(users(value))
        if len(followers) != 1 or followers[0].op == "output":
            return scale
        node = followers[0]
        if packet(node) in SUMS:
            return scale * _sign(node, value)
        if node not in stream.values or carried(node, value, stream.values[value]) is None:
            return scale
        if packet(node) in ("aten.mul", "aten.div"):
            number = node.args[1] if node.args[0] is value else node.args[0]
            if is_tensor(number):
                return None
            assert isinstance(number, (int, float))
            scale = scale / number if packet(node) == "aten.div" else scale * number
        value = node


def _sign(node: Node, term: Node) -> float:
    """Return the number that a sum multiplies one of its terms with."""
    alpha = node.kwargs.get("alpha", 1)
    assert isinstance(alpha, (int, float))
    is_first = node.args[0] is term
    if packet(node) == "aten.rsub":
        return -alpha if is_first else 1.0
    if is_first:
        return 1.0
    return -alpha if packet(node) == "aten.sub" else alpha


def _refusal(
    stream: Stream, sites: Sequence[NormSite], members: Mapping[int, Surroundings]
) -> str | None:
    """Return why a linear map of the channels would change the outputs, or None.

    The map goes into all writers, and its inverse into all readers, of the norms too.
    """
    if stream.writers_unknown is not None:
        return stream.writers_unknown
    for use in stream.norms_before:
        return f"written by the norm {sites[use.index].path} (post-norm)"
    if stream.readers_unknown is not None:
        return stream.readers_unknown
    if stream.is_returned:
        return "the model returns it"
    for use in stream.norms_after:
        if not use.over_channels:
            return f"{sites[use.index].path} normalizes over another axis"
    uses = {reader.leaf: reader for reader in stream.reads}
    for index, around in members.items():
        path = sites[index].path
        if around.readers.refused is not None:
            return f"the output of {path}: {around.readers.refused}"
        if any(other is not stream for other in around.before):
            return f"{path} is called on another stream too"
        uses.update({reader.leaf: reader for reader in around.readers.reads})
    return stream.writers_shared or shared_readers(uses.values(), uses)
