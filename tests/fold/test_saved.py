"""Folded models saved and loaded in a fresh process: by their own classes where these allow it, else through dynorm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import dynorm
from benchmarks.fold_models import build, inputs
from dynorm.cli import app
from dynorm.errors import ModelError, StorageError
from dynorm.fold import fold_
from dynorm.jobs.fold import fold_pretrained
from dynorm.layers.rmsnorm import RMSNorm
from tests.fresh import run

transformers = pytest.importorskip("transformers")

# Loads each folder by its class and compares its outputs; it imports dynorm only where it is told
# to.
SCRIPT = """
import sys, json, torch, transformers
transformers.logging.set_verbosity_error()
for line in sys.argv[1:]:
    folder, cls, ours = json.loads(line)
    if ours:
        import dynorm
    assert ours or "dynorm" not in sys.modules
    given, expected = torch.load(folder + "/expected.pt")
    model = getattr(transformers, cls).from_pretrained(folder)
    with torch.no_grad():
        found = model(**given)[0]
    print(folder, torch.equal(found, expected))
    assert torch.equal(found, expected), (folder, (found - expected).abs().max())
"""
FREELY = {"untie": True, "add_bias": True}
# Whose own class loads it, and whose needs dynorm: LayerNorms became RMSNorms, or a bias was added.
STOCK = [("llama", {}), ("t5", FREELY), ("gpt2", {"center": False})]
OURS = [("gpt2", FREELY), ("vit", {}), ("falcon", FREELY)]


def saved(name: str, options: dict[str, object], folder: Path) -> tuple[str, str]:
    model = build(name)
    given = inputs(name, model)
    report = fold_(model, **options, **given)  # type: ignore[arg-type]
    model.save_pretrained(folder)  # type: ignore[operator]
    # As a loaded model does: its products with single vectors round by where its tensors lie.
    with torch.no_grad():
        torch.save((given, model(**given)[0]), folder / "expected.pt")
    return type(model).__name__, report.loads_with


@pytest.mark.slow
def test_folded_transformers_models_load_in_a_fresh_process(tmp_path: Path) -> None:
    lines = []
    for kind, cases in (("stock", STOCK), ("dynorm", OURS)):
        for i, (name, options) in enumerate(cases):
            folder = tmp_path / f"{kind}{i}"
            cls, loads_with = saved(name, options, folder)
            assert loads_with == kind
            lines.append(json.dumps([str(folder), cls, kind == "dynorm"]))
    said = run(SCRIPT, *lines, imported="transformers")
    assert said.count("True") == len(STOCK) + len(OURS)


def test_a_folded_encoder_gets_another_head(tmp_path: Path) -> None:
    model = build("vit")
    fold_(model, **inputs("vit", model))
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    base = transformers.ViTModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    assert sum(type(module) is RMSNorm for module in base.modules()) == 5
    assert type(model.vit.layernorm) is RMSNorm
    given = inputs("vit", model, seed=3)
    with torch.no_grad():
        assert torch.equal(base(**given)[0], model.vit(**given)[0])


class Plain(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(11, 8),
            norm(8),
            nn.Linear(8, 11, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.embed(ids)))
        return y


@pytest.mark.parametrize(("norm", "added"), [(nn.LayerNorm, ["head"]), (nn.RMSNorm, [])])
def test_a_plain_model_comes_back_with_its_biases_and_untied(
    tmp_path: Path, norm: type[nn.Module], added: list[str]
) -> None:
    model, ids = Plain(norm).eval(), torch.randint(0, 11, (2, 5))
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter)
    report = fold_(model, ids, untie=True, add_bias=True)
    assert (report.loads_with, report.added_biases, len(report.untied)) == ("dynorm", added, 1)
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model", Plain(norm))
    assert torch.equal(loaded(ids), model(ids))
    assert type(loaded.norm) is type(model.norm)
    assert loaded.head.weight is not loaded.embed.weight
    dynorm.save(loaded, tmp_path / "again")
    assert torch.equal(dynorm.load(tmp_path / "again", Plain(norm))(ids), model(ids))


def test_a_load_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, ids = Plain().eval(), torch.randint(0, 11, (2, 5))
    nn.init.normal_(model.norm.bias)
    fold_(model, ids, untie=True, add_bias=True)
    dynorm.save(model, tmp_path / "model")
    other = Plain()
    other.norm.extra = nn.Linear(2, 2)
    other.more = nn.Linear(2, 2)
    text, weight = repr(other), other.head.weight
    with pytest.raises(StorageError, match=r"more\.bias"):
        dynorm.load(tmp_path / "model", other)
    assert repr(other) == text
    assert other.head.weight is weight is other.embed.weight
    assert other.head.bias is None


def test_a_fold_of_values_alone_is_saved_as_its_class_is() -> None:
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)).eval()
    nn.init.normal_(model[0].weight)
    assert fold_(model, torch.randn(2, 8)).loads_with == "stock"
    with pytest.raises(ModelError, match="changed only values"):
        dynorm.save(model, "/nowhere")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    model = build("gpt2", bos_token_id=1, eos_token_id=2)
    model.save_pretrained(tmp_path / "gpt2")  # type: ignore[operator]
    (tmp_path / "gpt2" / "README.md").write_text("a card")
    return tmp_path / "gpt2"


def test_the_command_folds_checks_and_saves(gpt2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["fold", str(gpt2), str(out), "--untie", "--add-bias", "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [site["center"]["state"] for site in report["sites"]] == ["folded"] * 5
    assert report["error"] <= report["tolerance"] == 1e-5
    assert json.loads((out / "report.json").read_text()) == report
    # Its own card, which says what the model was; a folder of this machine is no base model to others.
    card = (out / "model" / "README.md").read_text()
    assert card.startswith("---\ntags:\n- dynorm\n---\n\n# gpt2, with norms changed by dynorm")
    one, other = (
        transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in (gpt2, out / "model")
    )
    ids = torch.randint(3, 90, (1, 9))
    with torch.no_grad():
        assert torch.allclose(one(ids).logits, other(ids).logits, 1e-3, 1e-3)
    again = CliRunner().invoke(app, ["fold", str(gpt2), str(out)])
    assert isinstance(again.exception, StorageError)


def test_the_command_leaves_nothing_when_it_fails(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing was written"):
        fold_pretrained(gpt2, tmp_path / "out", {"paths": ()})
    assert not (tmp_path / "out").exists()
