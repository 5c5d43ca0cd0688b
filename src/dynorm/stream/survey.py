"""Everything around the norms of a graph: what reads them, and the streams that they are on."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from dynorm.stream.feeds import Feed, feeds_of
from dynorm.stream.graph import Graph, norm_index
from dynorm.stream.readers import Readers, readers_of
from dynorm.stream.stream import Stream, StreamFinder


@dataclass(frozen=True)
class Surroundings:
    """Everything around one norm."""

    calls: list[Node]
    readers: Readers  # the operators that read its outputs
    before: list[Stream]  # the stream that each call reads
    after: list[Stream]  # the stream that each call writes into
    feeds: list[Feed]  # the terms of its input, if it is called once


def survey(graph: Graph, dims: Mapping[int, int]) -> dict[int, Surroundings]:
    """Return the surroundings of all norms of a graph, by index.

    ``dims`` has the channel axis of each norm, as the norm's own ``dim``.
    """
    calls: dict[int, list[Node]] = {index: [] for index in dims}
    for call in graph.norm_calls:
        index = norm_index(call)
        assert index is not None
        calls[index].append(call)
    finder = StreamFinder(dims)
    around = {}
    for index, dim in dims.items():
        readers = readers_of(calls[index], dim)
        before = [finder.stream_of(call.all_input_nodes[0], dim) for call in calls[index]]
        after = [finder.stream_of(call, dim) for call in calls[index]]
        feeds = feeds_of(calls[index][0], dim) if len(calls[index]) == 1 else []
        around[index] = Surroundings(calls[index], readers, before, after, feeds)
    return around
