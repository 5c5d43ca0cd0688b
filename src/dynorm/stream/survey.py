"""Everything around the norms of a graph: their readers, and the streams that they are on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from dynorm.stream.capture import Graph
from dynorm.stream.readers import Readers, readers_of
from dynorm.stream.stream import Stream, StreamFinder


@dataclass(frozen=True)
class Surroundings:
    """Everything around one norm."""

    calls: list[Node] = field(default_factory=list)
    readers: Readers = field(default_factory=Readers)  # the operators that read its outputs
    before: list[Stream] = field(default_factory=list)  # the stream that each call reads
    after: list[Stream] = field(default_factory=list)  # the stream that each call writes into


def survey(graph: Graph, dims: Mapping[int, int]) -> dict[int, Surroundings]:
    """Return the surroundings of all norms of a graph, by index.

    ``dims`` has the channel axis of each norm, as the norm's own ``dim``.
    """
    finder = StreamFinder(dims)
    around = {}
    for index, calls in graph.calls.items():
        dim = dims[index]
        readers = readers_of(calls, dim)
        before = [finder.stream_of(call.all_input_nodes[0], dim) for call in calls]
        after = [finder.stream_of(call, dim) for call in calls]
        around[index] = Surroundings(calls, readers, before, after)
    return around
