"""Names on the hub in the place of a folder, and models that are written with their code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel

from dynorm.errors import ModelError, StorageError
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe

QUICK = Recipe(held_out=16, max_length=16, batch=8, refine=2, calibration=24)
pytestmark = pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")


@pytest.fixture
def hub(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a model on a stand-in for the hub; return the list of the downloads."""
    import huggingface_hub

    folder = tmp_path / "cache" / "models--own--tiny" / "snapshots" / "0123abcd"
    shutil.copytree(encoder, folder)
    downloads: list[Any] = []

    def snapshot_download(
        name: str, *, revision: str | None = None, ignore_patterns: list[str]
    ) -> str:
        downloads.append((name, revision))
        assert "*.onnx" in ignore_patterns
        if name != "own/tiny":
            raise ConnectionError("no route\nto host")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    # A folder of this name would come first.
    monkeypatch.chdir(tmp_path)
    return downloads


def test_every_job_takes_a_name_on_the_hub(hub: list[Any], texts: Path, tmp_path: Path) -> None:
    report = convert_pretrained("own/tiny", tmp_path / "out", QUICK, texts=[texts])
    assert hub == [("own/tiny", None)]
    assert report.name == "own/tiny"
    assert "base_model: own/tiny" in (tmp_path / "out" / "model" / "README.md").read_text("utf-8")
    folded = fold_pretrained("own/tiny@v1", tmp_path / "folded", {})
    assert hub[1:] == [("own/tiny", "v1")]
    assert folded.sites
    assert inspect_pretrained("own/tiny", QUICK, samples=16, texts=[texts]).name == "own/tiny"
    assert load_pretrained("own/tiny").source.name == "0123abcd"
    assert len(hub) == 5


def test_a_folder_of_the_name_comes_first(hub: list[Any], encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "own" / "tiny")
    assert load_pretrained("own/tiny").source == Path("own/tiny")
    assert not hub


@pytest.mark.parametrize("name", ["their/model", "their/model@v2"])
def test_without_a_network_the_error_says_how_to_download(
    name: str, hub: list[Any], texts: Path, tmp_path: Path
) -> None:
    option = " --revision v2" if "@" in name else ""
    command = f"run `hf download their/model{option} --local-dir model`"
    jobs: list[Callable[[], object]] = [
        lambda: load_pretrained(name),
        lambda: convert_pretrained(name, tmp_path / "out", QUICK, texts=[texts]),
        lambda: fold_pretrained(name, tmp_path / "out", {}),
    ]
    for job in jobs:
        with pytest.raises(StorageError) as raised:
            job()
        message = str(raised.value)
        assert f"{name} is not here" in message
        assert command in message
        assert "HF_HUB_OFFLINE=0" in message
        assert "no route to host" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["./their/model", "/their/model", "model", "a/b/c"])
def test_a_path_is_not_asked_for_on_the_hub(path: str, hub: list[Any]) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        load_pretrained(path)
    assert not hub


def test_the_command_keeps_the_dot_of_a_path(
    hub: list[Any],
    status: Callable[..., int | str | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("convert", "./own/tiny", tmp_path / "out") == 1
    assert "does not exist: give a folder" in capsys.readouterr().err
    assert not hub


def test_a_model_is_written_with_its_code(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies the code of a model there.
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = tmp_path / "out"
    convert_pretrained(encoder, out, QUICK, texts=[texts], remote_code=True)
    plain = tmp_path / "plain"
    convert_pretrained(encoder, plain, QUICK, texts=[texts])
    config = json.loads((out / "model" / "config.json").read_text("utf-8"))
    assert config["auto_map"]["AutoModel"] == "modeling_dynorm.DynormBertModel"
    card = (out / "model" / "README.md").read_text("utf-8")
    assert 'AutoModel.from_pretrained("path/to/this/folder", trust_remote_code=True)' in card
    assert "import dynorm" not in card
    # The tokenizer is there too.
    transformers.AutoTokenizer.from_pretrained(out / "model")
    loaded = transformers.AutoModel.from_pretrained(out / "model", trust_remote_code=True)
    expected = transformers.AutoModel.from_pretrained(plain / "model")
    assert type(loaded).__name__ == "DynormBertModel"
    ids = torch.arange(8)[None]
    with torch.no_grad():
        difference = loaded(ids)[0] - expected(ids)[0]
    assert float(difference.abs().max()) < 1e-5 * float(expected(ids)[0].detach().abs().max())


def test_the_card_of_a_language_model_names_the_plain_class(
    language_model: Path, texts: Path, tmp_path: Path, status: Callable[..., int | str | None]
) -> None:
    words = ("--refine", 1, "--held-out", 8, "--max-length", 16, "--texts", texts)
    assert status("convert", language_model, tmp_path / "out", "--remote-code", *words) == 0
    card = (tmp_path / "out" / "model" / "README.md").read_text("utf-8")
    assert (
        'AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=Tr' in card
    )


class OwnBertModel(BertModel):
    """A class that is not in transformers."""


def test_a_model_without_code_is_refused_before_the_work(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(*args: object, **options: Any) -> Any:
        model = OwnBertModel(BertConfig.from_pretrained(encoder))
        return model, {"missing_keys": set(), "unexpected_keys": set()}

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", own)
    recipe = replace(QUICK, steps=10**6)
    with pytest.raises(ModelError, match="OwnBertModel is not"):
        convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts], remote_code=True)
    assert not (tmp_path / "out").exists()
