"""Tiny pretrained models in folders, with real tokenizers, made on the spot."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dynorm.cli import main
from dynorm.jobs.texts import read_texts

# Files of the standard library: all of it takes seconds to read, in each process that collects the
# tests.
FILES = (
    "__future__", "_aix_support", "_bootsubprocess", "_collections_abc", "_compression", "_markupbase", "_osx_support",
    "_py_abc", "_pydecimal",
)  # fmt: skip
PATHS = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in FILES]
# Python 3.12 has no _bootsubprocess.
TEXTS = read_texts(path for path in PATHS if path.exists())[:160]
# The words and marks of the texts that are most common: a text of unknown words is refused.
WORDS = [word for word, _ in Counter(re.findall(r"\w+|[^\w\s]+", " ".join(TEXTS))).most_common(250)]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}


def save(model: Any, folder: Path) -> Path:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embeddings" in name or "wte" in name:
                parameter.mul_(20)
    model.save_pretrained(folder)
    return folder


def tiny_bert() -> BertConfig:
    return BertConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def undrawn() -> Iterator[None]:
    """Drawing takes as long as the rest of a job on a tiny model, and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynorm.report.rendering.svg_picture", lambda *_: "<svg></svg>")
        yield


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(BertModel(tiny_bert()), tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GPT2Config(
        vocab_size=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=32,
        eos_token_id=2,
        bos_token_id=2,
    )
    return save(GPT2LMHeadModel(config), tmp_path_factory.mktemp("models") / "tiny-gpt2")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n\n".join(TEXTS), "utf-8")
    return file


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """Runs the command line with some words, and returns its result."""

    def ran(*words: object) -> int | str | None:
        monkeypatch.setattr("sys.argv", ["dynorm", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return ran
