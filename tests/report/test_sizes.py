"""The sizes of tokens: which are the largest, where, and what few channels and a layer's witnesses tell of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.report.sizes import token_places
from dynorm.site import NormSite
from tests.pages import Page

WIDTH, BOS, THE = 24, 1, 7
WITNESS, GAIN = 5, 1.0


class Massive(nn.Module):
    """An embedding in which two tokens are large, in one channel, before a norm."""

    def __init__(self, kind: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH).double()
        with torch.no_grad():
            self.embedding.weight[BOS, WITNESS] = 300.0
            self.embedding.weight[THE, WITNESS] = -120.0
        self.norm = kind(WIDTH).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.norm(self.embedding(input_ids)) * attention_mask[..., None]


def batches(count: int = 4, left: bool = False) -> list[dict[str, Tensor]]:
    """Texts that begin with the first large token, and hold the other one at place 3; padded on either side."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(10, 50, (6, 9), generator=generator)
        lengths = torch.randint(5, 10, (6, 1), generator=generator)
        ids[:, 0], ids[:, 3] = BOS, THE
        mask = (torch.arange(9) < lengths).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        if left:
            batch = {
                name: torch.stack(
                    [row.roll(9 - n) for row, n in zip(value, lengths[:, 0].tolist(), strict=True)]
                )
                for name, value in batch.items()
            }
        found.append(batch)
    return found


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_silence_may_come_first_or_alone() -> None:
    net = nn.Sequential(nn.LayerNorm(8, bias=False), nn.Linear(8, 3))
    loud = [torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    for batch in loud:
        batch[:, 2] *= 20
    silent = torch.zeros(4, 8)
    dynorm.convert_(net, dynorm.find_norms(net, loud[0]))
    dynorm.calibrate_(net, [silent, *loud])
    for data in ([silent, *loud], [*loud, silent]):
        assert dynorm.measure(net, data).sites[0].sizes.explained[4] > 0.9
    assert dynorm.measure(net, [silent]).sites[0].sizes.explained[4] == 0.0
    assert dynorm.refine_(net, [silent, *loud], steps=3).steps == 3


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("left", [False, True])
def test_the_largest_tokens_have_their_places_and_channels(kind: Any, left: bool) -> None:
    report = dynorm.inspect_norms(
        Massive(kind), batches(left=left), decode={BOS: "<s>", THE: "the"}.get
    )
    sizes = report.sites[0].sizes
    first, second, *rest = sizes.tokens
    assert (first.token, first.position, first.channel) == ("<s>", 0, WITNESS)
    assert (second.token, second.position, second.channel) == ("the", 3, WITNESS)
    assert len({token.size for token in sizes.tokens}) == len(sizes.tokens) == 5
    assert all(token.size < 3 for token in rest)
    model, data = Massive(kind), batches(left=left)
    x = torch.cat(
        [
            model.embedding.weight.detach()[batch["input_ids"]][batch["attention_mask"].bool()]
            for batch in data
        ]
    )
    deviation = x - x.mean(1, keepdim=True) if kind is nn.LayerNorm else x
    sigma = deviation.square().mean(1).sqrt()
    assert first.size == pytest.approx(
        float(sigma.max() / sigma.quantile(0.5, interpolation="lower")), rel=0.02
    )
    largest = deviation[sigma.argmax()].square()
    assert first.share == pytest.approx(float(largest.max() / largest.sum()), rel=1e-5)
    assert sizes.channels[0] == WITNESS
    assert sizes.explained[0] == 0 < 0.9 < sizes.explained[1] <= sizes.explained[4] <= 1
    assert sizes.massive
    assert report.summary()["massive"] == ["norm"]


def test_words_say_whether_where_and_on_which_tokens() -> None:
    report = dynorm.inspect_norms(Massive(), batches(), decode={BOS: "<s>", THE: "the"}.get)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "Massive activations at 1 of 1 norms, in channel 5." in words
    assert "'<s>' at 0, 'the' at 3" in words
    values = json.loads(json.dumps(report.to_dict()))["sites"][0]["sizes"]
    assert values["tokens"][0]["token"] == "<s>"
    assert set(values["explained"]) == {"0", "1", "2", "4"}
    plain = dynorm.inspect_norms(nn.Sequential(nn.LayerNorm(WIDTH)), [torch.randn(64, WIDTH)])
    assert "No massive activations" in str(plain)
    assert [token.position for token in plain.sites[0].sizes.tokens] == [None] * 5


def test_places_are_only_shown_if_they_are_known() -> None:
    site, (batch, *_) = NormSite("norm", kind="layernorm", normalized_shape=(WIDTH,)), batches()
    x = torch.randn(6, 9, WIDTH)
    expected = batch["attention_mask"].bool()
    places = token_places(site, x, batch)
    assert places is not None
    assert torch.equal(places[:, 1], batch["input_ids"][expected])
    assert torch.equal(token_places(site, x.flatten(0, 1), batch), places)
    only_mask = token_places(site, x, {"attention_mask": batch["attention_mask"]})
    assert only_mask is not None
    assert torch.equal(only_mask[:, 0], places[:, 0])
    assert set(only_mask[:, 1].tolist()) == {-1}
    assert token_places(site, x, x) is None
    assert token_places(site, x[:, :5], batch) is None
    assert token_places(site, x, batch | {"decoder_input_ids": batch["input_ids"]}) is not None


@pytest.mark.parametrize("to", ["dyisru", "linear"])
def test_a_layers_witnesses_their_gains_and_the_share_they_explain(to: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    original, data = Massive(), batches()
    reports = []
    for witnesses in (0, 2):
        model = copy.deepcopy(original)
        dynorm.convert_(model, dynorm.find_norms(model, **data[0]), to, witnesses=witnesses)
        dynorm.calibrate_(model, data)
        reports.append(dynorm.measure(model, data, original=original))
    without, witnessed = (report.sites[0] for report in reports)
    assert (without.witnesses, without.gains, without.explained) == ((), (), 0.0)
    assert witnessed.witnesses == model.norm.witness_channels
    assert witnessed.gains == pytest.approx(model.norm.log_gain.detach().exp().tolist())
    assert witnessed.explained > 0.9
    assert witnessed.sizes.explained[1] > 0.9
    estimated, sums = witnessed.sums
    x = torch.cat(
        [
            original.embedding.weight.detach()[batch["input_ids"]][batch["attention_mask"].bool()]
            for batch in data
        ]
    )
    own = WIDTH * (x.var(1, correction=0) + 1e-5)
    assert sorted(sums) == pytest.approx(sorted(own.tolist()))
    gains, channels = torch.tensor(witnessed.gains, dtype=x.dtype), list(witnessed.witnesses)
    center = (
        0.0
        if model.norm.center is None
        else model.norm.center.detach().flatten().expand(WIDTH)[channels]
    )
    expected = model.norm.beta().detach().median() + (x[:, channels] - center).square() @ gains
    assert sorted(estimated) == pytest.approx(sorted(expected.tolist()))
    assert " explained" not in str(reports[0])
    assert " explained" in str(reports[1])
    assert max(map(len, str(reports[1]).splitlines())) <= 80
    values = json.loads(json.dumps(reports[1].to_dict()))["sites"][0]
    assert values["witnesses"] == list(witnessed.witnesses)
    assert "sums" not in values
    reports[1].to_html(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert page.tags["svg"] == 1
    assert any("estimated by the layer" in piece for piece in page.texts)
    assert any(f"{WITNESS} (" in piece for piece in page.texts)
