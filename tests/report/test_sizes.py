"""The sizes of tokens: which are the largest, where, and what few channels tell of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.report.sizes import token_places
from dynorm.site import NormSite

WIDTH, BOS, THE, CHANNEL = 24, 1, 7, 5


class Massive(nn.Module):
    """An embedding in which two tokens are large, in one channel, before a norm."""

    def __init__(self, kind: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH).double()
        with torch.no_grad():
            self.embedding.weight[BOS, CHANNEL] = 300.0
            self.embedding.weight[THE, CHANNEL] = -120.0
        self.norm = kind(WIDTH).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.norm(self.embedding(input_ids)) * attention_mask[..., None]


def batches(left: bool = False) -> list[dict[str, Tensor]]:
    """Texts that begin with the first large token, and hold the other one at place 3."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(4):
        ids = torch.randint(10, 50, (6, 9), generator=generator)
        lengths = torch.randint(5, 10, (6,), generator=generator).tolist()
        ids[:, 0], ids[:, 3] = BOS, THE
        mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        if left:
            for name, value in batch.items():
                rows = [row.roll(9 - length) for row, length in zip(value, lengths, strict=True)]
                batch[name] = torch.stack(rows)
        found.append(batch)
    return found


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("left", [False, True])
def test_the_largest_tokens_have_their_places_and_channels(kind: Any, left: bool) -> None:
    model, data = Massive(kind), batches(left)
    report = dynorm.inspect_norms(model, data, decode={BOS: "<s>", THE: "the"}.get)
    sizes = report.sites[0].sizes
    first, second, *_ = sizes.tokens
    assert (first.token, first.position, first.channel) == ("<s>", 0, CHANNEL)
    assert (second.token, second.position, second.channel) == ("the", 3, CHANNEL)
    assert len({token.size for token in sizes.tokens}) == len(sizes.tokens) == 5
    tokens = []
    for batch in data:
        tokens.append(model.embedding(batch["input_ids"])[batch["attention_mask"].bool()])
    x = torch.cat(tokens).detach()
    deviation = x - x.mean(1, keepdim=True) if kind is nn.LayerNorm else x
    sigma = deviation.square().mean(1).sqrt()
    assert first.size == pytest.approx(float(sigma.max() / sigma.log().mean().exp()), rel=1e-4)
    largest = deviation[sigma.argmax()].square()
    assert first.share == pytest.approx(float(largest.max() / largest.sum()), rel=1e-5)
    assert sizes.channels[0] == CHANNEL
    assert sizes.explained[0] == 0 < 0.9 < sizes.explained[1] <= sizes.explained[4] <= 1
    words = " ".join(str(report).split())
    assert "Massive activations at 1 of 1 norms, in channel 5." in words
    assert "'<s>' at 0, 'the' at 3" in words
    assert "witnesses=4 would help" in words
    values = json.loads(json.dumps(report.to_dict()))["sites"][0]["sizes"]
    assert set(values["explained"]) == {"0", "1", "2", "4"}


def test_without_large_tokens() -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    report = dynorm.inspect_norms(nn.Sequential(nn.LayerNorm(WIDTH)), [x])
    assert "No massive activations" in str(report)
    assert [token.position for token in report.sites[0].sizes.tokens] == [None] * 5


def test_places_are_only_shown_if_they_are_known() -> None:
    site, batch = NormSite("norm", kind="layernorm", normalized_shape=(WIDTH,)), batches()[0]
    x = torch.randn(6, 9, WIDTH)
    places = token_places(site, x, batch)
    assert places is not None
    assert torch.equal(places[:, 1], batch["input_ids"][batch["attention_mask"].bool()])
    assert torch.equal(token_places(site, x.flatten(0, 1), batch), places)
    only_mask = token_places(site, x, {"attention_mask": batch["attention_mask"]})
    assert only_mask is not None
    assert torch.equal(only_mask[:, 0], places[:, 0])
    assert set(only_mask[:, 1].tolist()) == {-1}
    assert token_places(site, x, x) is None
    assert token_places(site, x[:, :5], batch) is None
