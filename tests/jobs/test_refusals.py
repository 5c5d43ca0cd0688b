"""Folders that a job must not take as they come: missing or damaged parts, a full disk, a stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerModel

from dynorm.errors import ArgumentError, DataError, DynormError, StorageError
from dynorm.jobs.checkpoint import example_of, load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe
from tests.jobs.conftest import TEXTS

QUICK = Recipe(steps=0, held_out=16, max_length=16, fold_means=False)
NORM = "encoder.layer.1.output.LayerNorm.weight"
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def source(encoder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny encoder, to be damaged."""
    return shutil.copytree(encoder, tmp_path / "source")


def weights(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def config(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(old | values))

    return edit


def without(start: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(start)]


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02garbage")


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (weights(lambda t: t.pop(NORM)), r"weights of BertModel.*encoder\.layer\.1\."),
    "a name": (weights(lambda t: t.update(elsewhere=t.pop(NORM))), r"weights of BertModel.*layer\.1"),
    "a layer": (weights(without("encoder.layer.1.")), r"weights of BertModel.*encoder\.layer\.1\."),
    "more layers": (config(num_hidden_layers=1), r"config\.json must have all layers"),
    "cut": (cut, r"able.*read.*/source.*not fully covered.*cut"),
    "pickle": (pickled, r"(?s)able.*read.*/source.*Unpickling"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "able.*read.*/source"),
    "shape": (weights(lambda t: t.update({NORM: torch.ones(7)})), "able.*read.*/source"),
    "heads": (config(num_attention_heads=0), "able.*read"),
    "config": (lambda d: (d / "config.json").write_text("[1]"), "able.*read.*/source"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "able.*read.*/source"),
    "no tokenizer": (no_tokenizer, "model's tokenizer.*none.*files.*convert the model in Python"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_named(source: Path, texts: Path, tmp_path: Path, damage: str) -> None:
    act, message = DAMAGES[damage]
    act(source)
    jobs: list[Callable[[], object]] = [
        lambda: convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts]),
        lambda: inspect_pretrained(source, QUICK, texts=[texts]),
    ]
    # A fold needs no texts.
    if "tokenizer" not in damage:
        jobs.append(lambda: fold_pretrained(source, tmp_path / "out", {}))
    for job in jobs:
        with pytest.raises(StorageError, match=message):
            job()
    assert not (tmp_path / "out").exists()


def test_a_pooler_that_nothing_reads_may_be_missing(source: Path) -> None:
    weights(without("pooler"))(source)
    assert "Do not use the pooler" in load_pretrained(source).remarks[0]


@pytest.mark.parametrize(("options", "message"), [
    ({"device": "nothing"}, "device must"),
    ({"dtype": "int8"}, "dtype must be auto"),
    ({"texts": ["few.txt"]}, "texts must"),
    ({"texts": ["nowhere"]}, "texts.*exist"),
    ({"images": ["."]}, "texts must be given for BertModel.*, got images"),
])  # fmt: skip
def test_cheap_checks_come_before_a_model_is_loaded(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "few.txt").write_text("A text that is long enough to be one.\n" * 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "dynorm.jobs.checkpoint.Checkpoint.load", lambda *_: pytest.fail("a model was loaded")
    )
    with pytest.raises(DynormError, match=message):
        convert_pretrained(encoder, tmp_path / "out", QUICK, **{"texts": [texts], **options})


def test_a_model_of_another_input_is_refused(tmp_path: Path) -> None:
    names = ["TimeSeriesTransformerModel"]
    series = TimeSeriesTransformerConfig(prediction_length=2, architectures=names)
    series.save_pretrained(tmp_path / "series")
    with pytest.raises(DynormError, match="TimeSeriesTransformerModel takes past_values"):
        convert_pretrained(tmp_path / "series", tmp_path / "out", QUICK)
    with pytest.raises(ArgumentError, match=r"TimeSeriesTransformerModel takes past_values.*fold_"):
        example_of(TimeSeriesTransformerModel(series), None)


@pytest.mark.parametrize("kind", ["encoder", "language_model"])
def test_texts_that_the_tokenizer_does_not_know_are_refused(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(f"{'жзий ' * 5} {i}" for i in range(100)), "utf-8")
    with pytest.raises(DataError, match=r"texts.*unknown tokens"):
        convert_pretrained(request.getfixturevalue(kind), tmp_path / "out", QUICK, texts=[file])


def test_few_texts_hold_out_a_quarter(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n".join(TEXTS[:24]))
    report = convert_pretrained(encoder, tmp_path / "out", QUICK, texts=[tmp_path / "few.txt"])
    assert (report.meta["texts_held_out"], report.meta["texts_to_fit"]) == (6, 18)


@pytest.mark.parametrize("place", ["shutil.copyfile", "dynorm.jobs.write.write_card"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_a_stop_leaves_nothing(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    expected = StorageError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        convert_pretrained(encoder, tmp_path / "out" / "here", QUICK, texts=[texts])
    assert list((tmp_path / "out").iterdir()) == []
