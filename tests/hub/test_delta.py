"""Layers without the rest of the model, and the base that they are put into."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from dynorm.errors import ArgumentError, DynormError, ModelError, StorageError
from dynorm.hub import load, save
from tests.hub.models import build, convert, gpt2, same_state, tokens, transformers


def pair() -> tuple[nn.Module, nn.Module]:
    """Return a plain model and the same one converted."""
    torch.manual_seed(0)
    base = build().eval()
    return base, convert(copy.deepcopy(base), torch.randn(64, 8), witnesses=2)


def test_the_layers_are_put_into_the_base(tmp_path: Path) -> None:
    base, model = pair()
    save(model, tmp_path / "d", base="own/model@v1")
    names = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert names == ["dynorm_delta.json", "dynorm_delta.safetensors"]
    loaded = load(tmp_path / "d", base)
    assert loaded is base
    assert same_state(loaded, model)
    x = torch.randn(3, 8)
    assert torch.equal(loaded(x), model(x))


def test_a_base_of_another_dtype_is_the_same(tmp_path: Path) -> None:
    base, model = pair()
    save(model, tmp_path / "d", base="own/model")
    loaded = load(tmp_path / "d", base.bfloat16())
    assert loaded[1].log_beta.dtype == torch.bfloat16


def test_the_base_is_loaded_by_its_name(tmp_path: Path) -> None:
    model = gpt2()
    base = transformers.GPT2LMHeadModel(model.config).eval()
    base.save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    convert(base, {"input_ids": tokens()})
    save(base, tmp_path / "d", base=str(tmp_path / "base"))
    loaded = load(tmp_path / "d")
    with torch.no_grad():
        # transformers maps the weights at other addresses, which changes how torch rounds.
        torch.testing.assert_close(loaded(tokens()).logits, base(tokens()).logits)
    # A base that is not there.
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(StorageError, match=r"load.*yourself.*dynorm\.load"):
        load(tmp_path / "d")


def test_every_value_of_the_base_is_compared(tmp_path: Path) -> None:
    """A table of more values than a sample of them would hold."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Embedding(20_000, 8), nn.LayerNorm(8)).eval()
    model = convert(copy.deepcopy(base), torch.randint(20_000, (64,)))
    save(model, tmp_path / "d", base="own/model")
    with torch.no_grad():
        base[0].weight[2::3] += 1.0
    with pytest.raises(ModelError, match=r"weights.*others"):
        load(tmp_path / "d", base)


@pytest.mark.parametrize("base", ["", 5])
def test_a_base_that_is_no_name_is_refused(tmp_path: Path, base: Any) -> None:
    with pytest.raises(ArgumentError, match="base must be"):
        save(pair()[1], tmp_path / "d", base=base)
    assert not (tmp_path / "d").exists()


def test_the_folder_of_a_base_may_have_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "a@b"
    folder.mkdir()
    save(pair()[1], tmp_path / "d", base=str(folder))
    values = json.loads((tmp_path / "d" / "dynorm_delta.json").read_text())
    assert values["base"] == str(folder)
    assert values["revision"] is None


def trained(base: nn.Sequential, model: nn.Module) -> nn.Module:
    with torch.no_grad():
        base[2].weight[0, 0] += 1.0
    return base


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (trained, r"weights.*\(1 of 4.*2\.weight"),
        (lambda base, model: model, "converted already"),
        (lambda base, model: nn.Sequential(nn.Linear(8, 8)), "it lacks"),
    ],
)
def test_another_base_is_refused_and_stays(
    other: Callable[..., nn.Module], words: str, tmp_path: Path
) -> None:
    base, model = pair()
    save(model, tmp_path / "d", base="own/model@v1")
    wrong = other(base, model)
    before = copy.deepcopy(wrong.state_dict())
    with pytest.raises(ModelError, match=words) as caught:
        load(tmp_path / "d", wrong)
    assert "own/model at revision v1" in str(caught.value)
    for name, tensor in wrong.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_plain_model_needs_its_base(tmp_path: Path) -> None:
    _, model = pair()
    save(model, tmp_path / "d", base="own/model")
    with pytest.raises(ArgumentError, match="base model, own/model"):
        load(tmp_path / "d")


def with_other_weights() -> Any:
    model = pair()[1]
    with torch.no_grad():
        model.get_submodule("2").weight.add_(1.0)
    return model


def folded() -> Any:
    model = pair()[1]
    dynorm.fold_(model, torch.randn(4, 8))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [(with_other_weights, "2.weight were changed"), (folded, "folded")],
)
def test_more_than_layers_is_refused(make: Callable[[], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        save(make(), tmp_path / "d", base="own/model")
    assert not (tmp_path / "d").exists()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    base, model = pair()
    save(model, tmp_path / "d", base="own/model")
    path = tmp_path / "d" / "dynorm_delta.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"base": "another/model"}))
    with pytest.raises(StorageError, match="was changed since"):
        load(tmp_path / "d", base)
    path.write_text(text)
    weights = tmp_path / "d" / "dynorm_delta.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(StorageError, match="must have the sha256"):
        load(tmp_path / "d", base)


def test_another_way_of_saving_leaves_no_old_files(tmp_path: Path) -> None:
    base, model = pair()
    save(model, tmp_path / "d")
    save(model, tmp_path / "d", base="own/model", overwrite=True)
    assert same_state(load(tmp_path / "d", base), model)
    save(model, tmp_path / "d", overwrite=True)
    names = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert names == ["dynorm.json", "model.safetensors"]
    with pytest.raises(ArgumentError, match="either remote_code or base"):
        save(model, tmp_path / "e", base="own/model", remote_code=True)


class Hub:
    """Stands in for huggingface_hub: one repository, in a folder."""

    calls: list[tuple[Any, ...]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = []

    def create_repo(self, repo_id: str, exist_ok: bool = False) -> None:
        self.calls.append(("create", repo_id, exist_ok))

    def upload_folder(self, *, folder_path: str, repo_id: str) -> None:
        names = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload", repo_id, names))


def test_a_folder_is_uploaded_and_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    base, model = pair()
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    save(model, tmp_path / "d", push_to_hub="own/model")
    assert hub.calls == [
        ("create", "own/model", True),
        ("upload", "own/model", ["dynorm.json", "model.safetensors"]),
    ]

    def snapshot_download(
        name: str, revision: str | None = None, ignore_patterns: list[str] | None = None
    ) -> str:
        hub.calls.append(("download", name, revision))
        return str(tmp_path / "d")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert same_state(load("own/model", base, revision="v1"), model)
    assert hub.calls[-1] == ("download", "own/model", "v1")


def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def fails(*args: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(StorageError, match="ConnectionError: no route"):
        load("own/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fails)
    with pytest.raises(StorageError, match=r"saved.*uploaded"):
        save(pair()[1], tmp_path / "d", push_to_hub="own/model")
    assert (tmp_path / "d" / "dynorm.json").is_file()
    with pytest.raises(DynormError, match=r"push_to_hub.*name"):
        save(pair()[1], tmp_path / "e", push_to_hub="model")
    assert not (tmp_path / "e").exists()
