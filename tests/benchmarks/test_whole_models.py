"""Whole models: their variants, that they are checked, and the norms' share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import dynorm
from benchmarks.speed import run as running
from benchmarks.speed.check import WrongResultError
from benchmarks.speed.figures import ModelGroup
from benchmarks.speed.models import VARIANTS, WholeModel, calls, check_model, gpt2_block, pretrained
from benchmarks.speed.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=16)  # fmt: skip
    BertModel(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(path)
    return path


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def check_variants(model: WholeModel, norms: int) -> None:
    assert tuple(model.variants) == VARIANTS
    assert [count(variant, nn.LayerNorm) for variant in model.variants.values()] == [norms, 0, 0]
    assert count(model.variants["DyISRU"], dynorm.DyISRU) == model.norms == norms
    assert all(not variant.training for variant in model.variants.values())
    assert check_model(model, calls(model, compiled=False)) == 3


def test_a_model_from_a_folder(folder: Path) -> None:
    short, long = pretrained(folder, ((1, 8), (3, 128)), name="Tiny")
    assert (short.name, short.batch) == ("Tiny", "1 x 8 tokens")
    # It has no more positions.
    assert long.batch == "3 x 16 tokens"
    assert long.variants is short.variants
    check_variants(short, 5)
    check_variants(long, 5)


def test_a_block_of_gpt2() -> None:
    state = torch.random.get_rng_state()
    [block] = gpt2_block(((1, 4),))
    assert torch.equal(state, torch.random.get_rng_state())
    check_variants(block, 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_model_is_found(folder: Path, variant: str) -> None:
    [model] = pretrained(folder, ((1, 8),))
    timed = calls(model, compiled=False)
    right = timed[variant]
    timed[variant] = lambda: right().last_hidden_state * 1.01
    with pytest.raises(WrongResultError, match=f"tiny.*{variant}, 1 x 8"):
        check_model(model, timed)


def test_the_share_is_taken_round_by_round() -> None:
    times = {"norms": [1.1, 2.2, 11.0], "DyISRU": [1.0, 2.2, 10.0], "identities": [1.0, 2.0, 10.0]}
    found = ModelGroup("m", "1 x 32 tokens", 13, 2, False, times, dict.fromkeys(times, 4)).to_dict()
    assert found["variants"]["norms"]["share_over_identities"] == [0.1, 0.1, 0.1]
    assert found["variants"]["DyISRU"]["share_over_identities"] == [0.0, 0.0, 0.05]
    assert found["variants"]["norms"]["milliseconds"][0] == 2200.0


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.slow
def test_a_run_times_models_too_also_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MODEL_BATCHES", ((1, 8),))
    settings = Settings(
        sizes=((4, 8),), dtypes=("float32",), only=("linear",), rounds=1, seconds=0.01
    )
    document = running.run(settings, model=folder, block=False)
    assert [(row["model"], row["batch"], row["compiled"]) for row in document["models"]] == [
        ("tiny", "1 x 8 tokens", compiled) for compiled in (False, True)
    ]
    assert all(set(row["variants"]) == set(VARIANTS) for row in document["models"])
