"""Checkpoints that have less or more than the model, and tokenizers that fit neither the texts nor the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from dynorm.cli import main
from dynorm.errors import ArgumentError, DataError, DynormError, ModelError, StorageError
from dynorm.jobs.checkpoint import encode, load_pretrained, make_batches
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.recipe import Recipe
from tests.jobs.conftest import save, tiny_bert

QUICK = Recipe(refine=0, held_out=16, max_length=16)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(
        BertForSequenceClassification(tiny_bert()),
        tmp_path_factory.mktemp("classifier") / "tiny-classifier",
    )


def without(source: Path, folder: Path, part: str) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = {
        name: t for name, t in load_file(source / "model.safetensors").items() if part not in name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words(folder: Path, vocabulary: dict[str, int], **special: str) -> None:
    """Put a tokenizer of whole words into a folder."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def test_a_classifier_without_its_pooler_is_not_folded(classifier: Path, tmp_path: Path) -> None:
    source = without(classifier, tmp_path / "source", "pooler")
    with pytest.raises(
        StorageError, match=r"weights of BertForSequenceClassification.*pooler\.dense"
    ):
        fold_pretrained(source, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_pooler_that_is_random_is_named(encoder: Path, texts: Path, tmp_path: Path) -> None:
    source = without(encoder, tmp_path / "source", "pooler")
    said: list[str] = []
    report = convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts], say=said.append)
    fold_pretrained(source, tmp_path / "folded", {}, say=said.append)
    remark = "Not in the checkpoint, and random here: pooler.dense.bias, pooler.dense.weight. Do not use the pooler."
    assert said.count(remark) == 2
    assert report.meta["remarks"] == [remark]
    for out in ("out", "folded"):
        assert remark in (tmp_path / out / "model" / "README.md").read_text()


def test_a_head_that_is_left_out_is_named(classifier: Path, texts: Path, tmp_path: Path) -> None:
    report = convert_pretrained(classifier, tmp_path / "out", QUICK, texts=[texts])
    (remark,) = report.meta["remarks"]
    assert (
        remark
        == "Left out of the checkpoint: classifier.bias, classifier.weight. BertModel has no such "
        "part."
    )


@pytest.mark.parametrize(("kind", "key"), [
    ("encoder", "num_hidden_layers"), ("classifier", "num_hidden_layers"), ("language_model", "n_layer"),
])  # fmt: skip
def test_layers_that_the_config_does_not_have_are_refused(
    request: pytest.FixtureRequest, kind: str, key: str, texts: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(request.getfixturevalue(kind), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: 1}))
    with pytest.raises(StorageError, match=r"layers.*checkpoint.*leaves.*\.1\."):
        convert_pretrained(source, tmp_path / "out", QUICK, texts=[texts])
    with pytest.raises(StorageError, match=r"layers.*checkpoint"):
        fold_pretrained(source, tmp_path / "out", {})


def test_the_card_of_a_language_model_loads_one(
    language_model: Path, texts: Path, tmp_path: Path
) -> None:
    convert_pretrained(language_model, tmp_path / "out", QUICK, texts=[texts])
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert (
        'from transformers import GPT2LMHeadModel\n\nmodel = GPT2LMHeadModel.from_pretrained("path'
        in card
    )


def test_blocks_are_no_longer_than_the_positions(tmp_path: Path, texts: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=16,
        eos_token_id=2,
        bos_token_id=2,
    )
    source = save(GPT2LMHeadModel(config), tmp_path / "short")
    report = convert_pretrained(
        source, tmp_path / "out", Recipe(refine=0, held_out=16), texts=[texts]
    )
    assert report.meta["recipe"]["max_length"] == 16
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["continuations"]


def test_a_tokenizer_without_any_token_to_pad_with_will_do(encoder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    words(source, {"[UNK]": 0, "a": 1, "b": 2})
    pretrained = load_pretrained(source)
    (batch,) = make_batches(pretrained, encode(pretrained, ["a", "a b a"]))
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_unknown_words_are_seen_where_only_tokenizer_json_names_them(
    encoder: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    words(source, {"[UNK]": 0, "[PAD]": 1, "a": 2}, pad_token="[PAD]")
    pretrained = load_pretrained(source)
    assert encode(pretrained, ["a a", "a"]) == [[2, 2], [2]]
    with pytest.raises(DataError, match=r"texts.*2 of 2"):
        encode(pretrained, ["b b", "c"])


def test_ids_beyond_the_vocabulary_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for kind in ("encoder", "language_model"):
        source = shutil.copytree(request.getfixturevalue(kind), tmp_path / kind)
        words(
            source, {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 256}, pad_token="[PAD]", unk_token="[UNK]"
        )
        pretrained = load_pretrained(source)
        with pytest.raises(DataError, match=r"ids.*vocab_size of 256.*256"):
            encode(pretrained, ["a b a a"], 2)


def test_a_tokenizer_that_is_broken_is_named(encoder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(StorageError, match=r"read.*tokenizer"):
        load_pretrained(source)


def test_checkpoints_have_a_place_of_their_own(encoder: Path, texts: Path, tmp_path: Path) -> None:
    source, file = shutil.copytree(encoder, tmp_path / "source"), tmp_path / "file"
    file.write_text("")
    for place in (
        source,
        source / "steps",
        tmp_path / "out" / "model",
        tmp_path / "out" / "model" / "steps",
        file,
    ):
        recipe = Recipe(steps=20, max_length=16, held_out=16, checkpoints=str(place))
        with pytest.raises(
            DynormError,
            match=r"separate|into.*folder",
        ):
            convert_pretrained(source, tmp_path / "out", recipe, texts=["nowhere.txt"])
    assert not (tmp_path / "out").exists()


def test_reports_that_are_there_are_kept(encoder: Path, texts: Path, tmp_path: Path) -> None:
    for name in ("report.json", "report.html"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(StorageError, match=f"{name} exists already"):
            convert_pretrained(encoder, out, QUICK, texts=["nowhere.txt"])
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
        (out / name).mkdir()
        with pytest.raises(StorageError, match=f"{name}.*file.*folder"):
            convert_pretrained(encoder, out, QUICK, texts=["nowhere.txt"], overwrite=True)


@pytest.mark.parametrize("bad", [
    {"minutes": "1"}, {"minutes": True}, {"refine": 1.5}, {"steps": 2.5}, {"steps": True}, {"seed": 2**70},
    {"seed": -1}, {"batch": "4"},
])  # fmt: skip
def test_recipes_of_wrong_types_are_refused(
    encoder: Path, tmp_path: Path, bad: dict[str, object]
) -> None:
    (name,) = bad
    with pytest.raises(ArgumentError, match=f"^{name} must be"):
        convert_pretrained(encoder, tmp_path / "out", Recipe(**bad), texts=["nowhere.txt"])  # type: ignore[arg-type]


def test_dtypes_of_weights_are_floating_point(encoder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"dtype.*auto"):
        load_pretrained(encoder, dtype="int8")


def test_a_converted_model_says_to_convert_the_original(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    convert_pretrained(encoder, tmp_path / "out", QUICK, texts=[texts])
    with pytest.raises(ModelError, match="convert the original"):
        convert_pretrained(tmp_path / "out" / "model", tmp_path / "again", QUICK, texts=[texts])


def test_few_steps_are_said_to_hardly_help(encoder: Path, texts: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(QUICK), "steps": 1, "lr": 1e-5})
    with pytest.warns(UserWarning, match="steps below 20.*got 1"):
        report = convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts], quiet=True)
    course = report.meta["stages"]["distill"]
    # At a rate of 0 it would not move.
    assert course["loss_after"] != course["loss_before"]


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_the_card_says_distilled_only_where_the_weights_are_kept(
    encoder: Path, texts: Path, tmp_path: Path
) -> None:
    recipe = Recipe(**{**vars(QUICK), "steps": 3, "lr": 10.0})
    report = convert_pretrained(encoder, tmp_path / "out", recipe, texts=[texts], quiet=True)
    assert report.meta["stages"]["distill"]["kept"] is False
    assert "The constants were fitted on" in (tmp_path / "out" / "model" / "README.md").read_text()


def test_code_in_an_error_stays_code(
    encoder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ModelError("device must have numbers: call model.to_empty(device=...) first")

    monkeypatch.setattr("dynorm.cli.pretrained.convert_pretrained", fail)
    monkeypatch.setattr("sys.argv", ["dynorm", "convert", str(encoder), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    assert (
        "--device must have numbers: call model.to_empty(device=...) first"
        in capsys.readouterr().err
    )
