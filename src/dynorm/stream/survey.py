"""Everything around the norms of a model: their readers, and the streams that they are on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Node

from dynorm.batches import Inputs
from dynorm.site import NormSite
from dynorm.stream.capture import capture
from dynorm.stream.graph import Graph
from dynorm.stream.readers import Readers, readers_of
from dynorm.stream.stream import Stream, StreamFinder


@dataclass(frozen=True)
class Surroundings:
    """Everything around one norm."""

    calls: list[Node] = field(default_factory=list)
    readers: Readers = field(default_factory=Readers)  # the operators that read its outputs
    before: list[Stream] = field(default_factory=list)  # the stream that each call reads
    after: list[Stream] = field(default_factory=list)  # the stream that each call writes into


def survey(
    model: nn.Module, norms: Mapping[int, NormSite], example: Inputs, untie: bool
) -> tuple[Graph, dict[int, Surroundings]]:
    """Trace a model, and return its graph and the surroundings of all norms that are called, by index.

    The arguments are those of :func:`dynorm.stream.capture.capture`.
    """
    graph = capture(model, norms, example, untie)
    dims = {}
    for index, site in norms.items():
        assert isinstance(site.dim, int)
        dims[index] = site.dim
    finder = StreamFinder(dims)
    around = {}
    for index, calls in graph.calls.items():
        dim = dims[index]
        readers = readers_of(calls, dim)
        before = [finder.stream_of(call.all_input_nodes[0], dim) for call in calls]
        after = [finder.stream_of(call, dim) for call in calls]
        around[index] = Surroundings(calls, readers, before, after)
    return graph, around
