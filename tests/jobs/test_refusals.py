"""Folders that a job must not take as they come: weights or tokenizer missing, damaged, or its own output."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import dynorm
from dynorm.cli import main
from dynorm.cli.application import tracked
from dynorm.errors import DataError, DynormError, StorageError
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.jobs.inspect import inspect_pretrained
from dynorm.recipe import Recipe
from tests.jobs.conftest import TEXTS

QUICK = Recipe(refine=0, held_out=16, max_length=16)
NORM = "encoder.layer.1.output.LayerNorm"


@pytest.fixture
def source(encoder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny encoder, to be damaged."""
    return shutil.copytree(encoder, tmp_path / "source")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [
    lambda t: t.pop(f"{NORM}.weight"),
    lambda t: t.update(elsewhere=t.pop(f"{NORM}.weight")),
    lambda t: [t.pop(name) for name in list(t) if name.startswith("encoder.layer.1.")],
], ids=["deleted", "renamed", "a layer"])  # fmt: skip
def test_missing_weights_are_named(
    source: Path, texts: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    edit(source, change)
    for job in (
        lambda: convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts]),
        lambda: fold_pretrained(source, tmp_path / "out", {}),
        lambda: inspect_pretrained(source, texts=[texts], samples=16),
    ):
        with pytest.raises(StorageError, match=r"weights of BertModel.*encoder\.layer\.1\."):
            job()
    assert not (tmp_path / "out").exists()


def test_a_pooler_that_nothing_reads_may_be_missing(source: Path) -> None:
    edit(source, lambda t: [t.pop(name) for name in list(t) if name.startswith("pooler")])
    assert load_pretrained(source).language_model is False


@pytest.mark.parametrize("words", [
    ({"device": "nothing"}, "device must"),
    ({"dtype": "int8"}, "dtype must be auto"),
    ({"recipe": Recipe(only=("nowhere.*",))}, "glob 'nowhere.*'"),
    ({"texts": ["few.txt"]}, "texts must"),
], ids=["device", "dtype", "glob", "texts"])  # fmt: skip
def test_cheap_checks_come_before_a_model_is_loaded(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[dict[str, Any], str],
) -> None:
    (tmp_path / "few.txt").write_text("A text that is long enough to be one.\n" * 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "dynorm.jobs.checkpoint.Checkpoint.load", lambda *_: pytest.fail("a model was loaded")
    )
    options, message = words
    with pytest.raises(DynormError, match=re.escape(message)):
        convert_pretrained(encoder, tmp_path / "out", **{"texts": [texts], **options})


def test_a_folder_without_any_tokenizer_file_does_not_talk_of_libraries(
    source: Path, texts: Path
) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StorageError) as caught:
        load_pretrained(source)
    assert "sentencepiece" not in str(caught.value)
    assert "convert the model in Python" in str(caught.value)


def test_few_texts_hold_out_a_quarter(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n".join(TEXTS[:24]))
    report = convert_pretrained(
        encoder, tmp_path / "out", Recipe(refine=0, max_length=16), texts=[tmp_path / "few.txt"]
    )
    assert (report.meta["texts_held_out"], report.meta["texts_to_fit"]) == (6, 18)


def command_line(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["dynorm", *map(str, words)])
        main()


@pytest.mark.parametrize(("words", "said"), [
    (["--held-out", 1], "--held-out must be an integer, at least 2"),
    (["--minutes", "nan"], "--minutes must be finite and not negative, got nan"),
    (["--witnesses", -1], "--witnesses must be an integer, at least 0"),
    (["--device", "nothing"], "--device must be one that torch can use"),
    (["--lr", 0], "--lr must be a positive finite number"),
    (["--lr", 1e-3, "--accumulate", 2], "--lr and --accumulate must come with steps or minutes"),
    (["--checkpoints", "kept", "--steps", 0], "--checkpoints must come with steps or minutes"),
])  # fmt: skip
def test_errors_of_the_command_line_name_its_options(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[object],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line("convert", encoder, tmp_path / "out", "--texts", texts, *words)
    assert stop.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_function_is_chosen_from_a_list(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line("convert", encoder, tmp_path / "out", "--to", "softmax")
    assert stop.value.code == 2
    found = capsys.readouterr().err
    assert all(name in found for name in ("--to", "softmax", "dyisru", "dyt", "derf", "linear"))


def test_a_stop_says_that_nothing_was_half_written(
    encoder: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfile", stopped)
    with pytest.raises(SystemExit) as stop:
        command_line(
            "convert", encoder, tmp_path / "out", "--texts", texts, "--held-out", 16, "--refine", 0
        )
    assert stop.value.code == 130
    assert "dynorm: stopped; nothing was half-written" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_bars_end_full_where_the_last_batch_ends_the_work() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    batches = tracked([1, 2, 3, 4], "working", console)
    assert [next(batches) for _ in range(4)] == [1, 2, 3, 4]
    batches.close()
    assert "100%" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_missing_tokenizer_is_refused(source: Path, texts: Path, tmp_path: Path) -> None:
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StorageError, match=r"tokenizer.*none.*files"):
        convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts])
    with pytest.raises(StorageError, match="model's tokenizer"):
        inspect_pretrained(source, texts=[texts], samples=16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["encoder", "language_model"])
@pytest.mark.parametrize("word", ["ж", " "])
def test_texts_that_the_tokenizer_does_not_know_are_refused(
    request: pytest.FixtureRequest, kind: str, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(f"{word.join('жзий' * 5)} {i}" for i in range(100)), "utf-8")
    with pytest.raises(DataError, match=r"texts.*unknown tokens"):
        convert_pretrained(request.getfixturevalue(kind), tmp_path / "out", QUICK, texts=[file])


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02garbage")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, r"source/model\.safetensors.*whole"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), r"source/model\.safetensors.*whole"),
    "pickle": (pickled, r"able.*read.*source/pytorch_model\.bin"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "able.*read.*/source"),
    "shape": (
        lambda d: edit(d, lambda t: t.update({f"{NORM}.weight": torch.ones(7)})),
        r"able.*read.*model\.safetensors",
    ),
    "size": (
        lambda d: set_config(d, hidden_size=48),
        r"able.*read.*model\.safetensors",
    ),
    "heads": (
        lambda d: set_config(d, num_attention_heads=0),
        "able.*read",
    ),
    "config": (lambda d: (d / "config.json").write_text("[1]"), "able.*read.*/source"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text('{"version": 3}'), "able.*read.*/source"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_named_without_a_traceback(
    source: Path, texts: Path, tmp_path: Path, damage: str
) -> None:
    act, message = DAMAGES[damage]
    act(source)
    with pytest.raises(StorageError, match=message):
        convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts])
    if damage != "tokenizer":
        with pytest.raises(StorageError, match=message):
            fold_pretrained(source, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_model_is_not_replaced_by_what_is_made_from_it(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(encoder, tmp_path / "model")
    before = {file: file.read_bytes() for file in source.iterdir()}
    with pytest.raises(dynorm.errors.ArgumentError, match=r"replace.*source"):
        convert_pretrained(source, tmp_path, QUICK, texts=[texts], overwrite=True)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"replace.*source"):
        fold_pretrained(source, tmp_path, {}, overwrite=True)
    assert {file: file.read_bytes() for file in source.iterdir()} == before


@pytest.mark.parametrize("full", ["shutil.copyfile", "dynorm.jobs.write.write_card"])
def test_a_disk_that_is_full_leaves_nothing(
    encoder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(full, fail)
    with pytest.raises(StorageError, match="No space left"):
        convert_pretrained(encoder, tmp_path / "out", QUICK, texts=[texts])
    assert [path.name for path in (tmp_path / "out").iterdir()] == []


@pytest.mark.parametrize("name", [None, "org/tiny"])
def test_the_card_is_our_own_and_keeps_the_license(
    source: Path, texts: Path, tmp_path: Path, name: str | None
) -> None:
    source = source.rename(source.with_name("tiny-v1.5"))
    card = "---\nlicense: mit\nlanguage:\n- en\ntags:\n- old\n---\n# Tiny\n\nLoad it with AutoModel alone.\n"
    (source / "README.md").write_text(card)
    convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts], name=name)
    own, name = (tmp_path / "out" / "model" / "README.md").read_text(), name or "tiny-v1.5"
    assert own.startswith(
        f"---\nlicense: mit\nlanguage:\n- en\nbase_model: {name}\ntags:\n- dynorm\n---\n"
    )
    for fact in (
        f"5 norms of {name} were replaced by DyISRU",
        "144 texts",
        str(texts),
        "cosine to the original output",
        "import dynorm",
    ):
        assert fact in own
    assert (tmp_path / "out" / "model" / "README.original.md").read_text() == card
    # From the converted model's own folder, whose card is ours already.
    fold_pretrained(source, tmp_path / "folded", {})
    folded = (tmp_path / "folded" / "model" / "README.md").read_text()
    assert "license: mit" in folded
    assert "by exact algebra" in folded
    assert json.loads((tmp_path / "out" / "report.json").read_text())["meta"]["model"] == name
