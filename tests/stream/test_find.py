"""find_streams: the writers and readers of the residual streams of hand-made and of real models."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynorm.stream import ResidualStream, find_streams

C = 8


class PreNorm(nn.Module):
    """A stream with a scaled entry, a subtraction with a gain, and a factor of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, C)
        self.positions = nn.Parameter(torch.randn(1, 5, C))
        self.gain = nn.Parameter(torch.randn(C))
        self.norm1 = nn.LayerNorm(C)
        self.norm2 = nn.RMSNorm(C, eps=1e-6)
        self.norm3 = nn.LayerNorm(C)
        self.one = nn.Linear(C, C)
        self.two = nn.Linear(C, C, bias=False)
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.into(x) * 2.0 + self.positions
        x = torch.add(x, self.one(self.norm1(x)), alpha=3)
        x = x - self.gain * self.two(self.norm2(x))
        x = x + self.one(self.norm2(x)) * mask / 4
        y: Tensor = self.head(self.norm3(x[:, 0]))
        return y


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 5, 4), torch.ones(2, 5, 1)


def the_stream(model: nn.Module, *args: Any, **kwargs: Any) -> ResidualStream:
    (stream,) = find_streams(model.eval(), *args, **kwargs)
    return stream


def test_all_writers_of_a_stream_are_found_with_axis_scale_bias_and_gain() -> None:
    torch.manual_seed(0)
    model = PreNorm()
    before = copy.deepcopy(model.state_dict())
    stream = the_stream(model, *example())
    names = [
        (w.weight.slot.name, w.weight.axis, w.bias is not None, w.scale) for w in stream.writers
    ]
    assert names == [
        ("positions", 2, False, 1.0),
        ("into.weight", 0, True, 2.0),
        ("one.weight", 0, True, 3.0),
        ("two.weight", 0, False, -1.0),
        ("one.weight", 0, True, None),
    ]
    gains = [w.weight.gain and w.weight.gain.name for w in stream.writers]
    assert gains == [None, None, None, "gain", None]
    assert [w.is_entry for w in stream.writers] == [True, True, False, False, False]
    assert stream.entry == "projection"
    assert stream.refused is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "forward" not in model.norm1.__dict__


def test_the_readers_of_each_norm_are_found() -> None:
    stream = the_stream(PreNorm(), *example())
    assert [site.path for site in stream.sites] == ["norm1", "norm2", "norm3"]
    reads = [sorted(read.weight.name for read in readers.reads) for readers in stream.readers]
    assert reads == [["one.weight"], ["one.weight", "two.weight"], ["head.weight"]]
    assert {read.axis for readers in stream.readers for read in readers.reads} == {1}


class Changed(PreNorm):
    """A stream that cannot be edited, in the way that a test names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x = self.into(x)
        if self.how == "a function writes":
            x = x.relu()
        if self.how == "a number is added":
            x = x + 1.0
        if self.how == "a norm writes":
            x = self.norm2(x)
        y = self.norm1(x)
        if self.how == "the norm's output is added":
            y = y + 1.0
        if self.how == "a function reads":
            return self.head(y) + x.tanh().sum()
        if self.how == "it is returned":
            return self.head(y), x
        if self.how == "a reader is used elsewhere":
            return self.head(y) + self.head(mask.expand(2, 5, C))
        return self.head(y)


REASONS = {
    "a function writes": "aten.relu",
    "a number is added": "adds a number",
    "a norm writes": "norm2.*post-norm",
    "the norm's output is added": "norm1.*aten.add",
    "a function reads": "aten.tanh",
    "it is returned": "returns it",
    "a reader is used elsewhere": "head.weight.*also used by",
}


@pytest.mark.parametrize("how", REASONS)
def test_a_stream_that_cannot_be_edited_says_why(how: str) -> None:
    streams = find_streams(Changed(how).eval(), *example())
    stream = next(s for s in streams if s.sites[0].path == "norm1")
    assert re.search(REASONS[how], stream.refused or "")


def test_without_an_obstacle_the_same_stream_can_be_edited() -> None:
    assert the_stream(Changed("not at all"), *example()).refused is None


MODELS = {
    # The norms of each stream, how it begins, and its refusal without and with untie.
    "gpt2": ([5], ["sum of embeddings"], "untie=True", None),
    "llama": ([5], ["embedding"], None, None),
    "qwen2": ([5], ["embedding"], None, None),
    "vit": ([5], ["projection"], None, None),
    "gpt_neox": ([5], ["embedding"], None, None),
    "opt": ([5], ["sum of embeddings"], "untie=True", None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_norms_of_a_pre_norm_transformer_share_one_stream(name: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks.fold_models import build, inputs

    counts, entries, tied, untied = MODELS[name]
    model = build(name)
    for untie, reason in ((False, tied), (True, untied)):
        streams = find_streams(model, untie=untie, **inputs(name, model))
        assert [len(stream.sites) for stream in streams] == counts
        assert [stream.entry for stream in streams] == entries
        refused = streams[0].refused
        assert refused is None if reason is None else reason in (refused or "")


def test_each_half_of_a_model_has_its_own_stream() -> None:
    pytest.importorskip("transformers")
    from benchmarks.fold_models import build, inputs

    model = build("whisper")
    streams = find_streams(model, untie=True, **inputs("whisper", model))
    halves = [{site.path.split(".")[1] for site in stream.sites} for stream in streams]
    assert halves == [{"encoder"}, {"decoder"}]
    assert [stream.entry for stream in streams] == ["unknown", "sum of embeddings"]
    assert "aten.gelu" in (streams[0].refused or "")
