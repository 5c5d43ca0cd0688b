"""``SentenceTransformer`` loads what ``dynorm convert`` writes, with all that stands beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

import dynorm
from dynorm.jobs.convert import convert_pretrained
from dynorm.recipe import Recipe
from tests.ecosystem.models import bert, kinds, tokenizer
from tests.jobs.conftest import undrawn  # noqa: F401 (a fixture, which pytest finds by its name here)
from tools.demo_model import folder as demo_model

TEXTS = [
    "A norm needs the whole token.",
    "A point-wise function does not.",
    "Read a file",
    "return the sum of two",
]
QUICK = Recipe(steps=0, held_out=8, max_length=32, fold_means=False)
WORDS = Recipe(steps=0, held_out=4, max_length=8, fold_means=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text(
        "\n\n".join(f"{text} Number {i} of many." for i in range(12) for text in TEXTS), "utf-8"
    )
    return file


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the words that the hand-made tokenizer knows."""
    file = tmp_path_factory.mktemp("words") / "texts.txt"
    rows = (" ".join(f"w{4 + (i * j) % 36}" for j in range(1, 9)) for i in range(36))
    file.write_text("\n\n".join(rows), "utf-8")
    return file


@pytest.fixture(scope="module")
def written(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``dynorm convert`` writes for the real encoder, all-MiniLM-L6-v2."""
    out = tmp_path_factory.mktemp("converted")
    convert_pretrained(demo_model(), out, QUICK, texts=[corpus])
    return out / "model"


def opened(folder: Path) -> Any:
    # Its import takes seconds, in each process that collects the tests.
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def mean_pooled(folder: Path, texts: list[str], norm: bool = True) -> Tensor:
    """The embeddings by hand, as the model's card describes them."""
    model, encode = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = encode(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return normalize(mean) if norm else mean


@pytest.mark.slow
def test_the_demos_model_gives_mean_pooled_embeddings(written: Path, tmp_path: Path) -> None:
    model = opened(written)
    assert kinds(model) == ["DyISRU"] * 13
    assert [type(part).__name__ for part in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.max_seq_length == 256
    embeddings = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embeddings, mean_pooled(written, TEXTS))
    original = opened(demo_model()).encode(TEXTS, convert_to_tensor=True)
    assert 0.3 < torch.cosine_similarity(embeddings, original).mean() < 0.9999
    model.save(str(tmp_path))
    again = opened(tmp_path)
    assert kinds(again) == ["DyISRU"] * 13
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), embeddings)


def test_a_sentence_transformer_is_converted_as_it_stands(tmp_path: Path) -> None:
    model = opened(demo_model())
    inner, batch = model.transformers_model, model.preprocess(TEXTS)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    before = model.encode(TEXTS, convert_to_tensor=True)
    dynorm.convert_(inner, dynorm.find_norms(inner, **inputs))
    dynorm.calibrate_(inner, [inputs])
    embeddings = model.encode(TEXTS, convert_to_tensor=True)
    assert not torch.allclose(embeddings, before)
    model.save(str(tmp_path))
    again = opened(tmp_path)
    assert kinds(again) == ["DyISRU"] * 13
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), embeddings)


@pytest.fixture
def with_dense(tmp_path: Path) -> Path:
    """A sentence-transformers model whose last module has weights, in a folder with things that are not the model's."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    folder = tmp_path / "source"
    plain = dynorm.restore_(bert())
    plain.save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    inner = modules.Transformer(str(tmp_path / "plain"))
    parts = [inner, modules.Pooling(16, "mean"), modules.Dense(16, 8), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    for name in (
        "onnx/model.onnx",
        ".git/config",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_modules_with_weights_come_along_and_clutter_does_not(
    with_dense: Path, words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert_pretrained(with_dense, out, WORDS, texts=[words])
    model = opened(out / "model")
    assert kinds(model) == ["DyISRU"] * 5
    texts = ["w5 w6 w7", "w9 w9"]
    dense = opened(with_dense)[2].linear
    pooled = mean_pooled(out / "model", texts, norm=False)
    expected = normalize(torch.tanh(torch.nn.functional.linear(pooled, dense.weight, dense.bias)))
    torch.testing.assert_close(model.encode(texts, convert_to_tensor=True), expected.detach())
    written = {str(path.relative_to(out / "model")) for path in (out / "model").rglob("*")}
    assert "2_Dense/model.safetensors" in written
    assert not written & {
        "onnx/model.onnx",
        ".git/config",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    }


def test_an_overwritten_model_has_the_new_ones_tokenizer(
    with_dense: Path, words: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert_pretrained(with_dense, out, WORDS, texts=[words])
    (out / "model" / "tokenizer.json").write_text("{}")
    convert_pretrained(with_dense, out, WORDS, texts=[words], overwrite=True)
    assert (out / "model" / "tokenizer.json").read_text() == (
        with_dense / "tokenizer.json"
    ).read_text()


def test_a_damaged_list_of_modules_is_refused_before_the_work(
    with_dense: Path, words: Path, tmp_path: Path
) -> None:
    (with_dense / "modules.json").write_text(json.dumps([{"idx": 0}]))
    with pytest.raises(dynorm.errors.StorageError, match=r"modules\.json.*list"):
        convert_pretrained(with_dense, tmp_path / "out", WORDS, texts=[words])
    assert not (tmp_path / "out").exists()
