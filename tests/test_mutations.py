"""Five hundred random damages, of saved folders and checkpoints: an error of ours or the right answer, nothing lost."""

from __future__ import annotations

import copy
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import dynorm
from dynorm.errors import DynormError
from dynorm.jobs.checkpoint import load_pretrained

transformers = pytest.importorskip("transformers")
IDS = torch.arange(12).reshape(2, 6)
X = torch.linspace(-2, 2, 40).reshape(5, 8)


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)).eval()


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.BertConfig(vocab_size=16, max_position_embeddings=8, **sizes)
    return transformers.BertModel(config).eval()


def converted(model: nn.Module, batch: Any) -> nn.Module:
    dynorm.convert_(model, dynorm.find_norms(model, batch))
    dynorm.calibrate_(model, [batch])
    return model


@torch.no_grad()
def first(model: Any) -> Tensor:
    found: Tensor = model(X) if isinstance(model, nn.Sequential) else model(IDS)[0]
    return found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each holder with a key in it, of a JSON value."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from places(value[key])


def change_json(file: Path, draw: random.Random) -> None:
    document = json.loads(file.read_text())
    holder, key = draw.choice(list(places(document)))
    old, action = holder[key], draw.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.append(copy.deepcopy(old))
    elif action == 2 and isinstance(old, (int, float)):
        holder[key] = draw.choice([not old, -old, old + 1, 2 * old, 0, old / 2])
    else:
        holder[key] = draw.choice([None, "x", [], {}, -1, 3, True, 0.5])
    file.write_text(json.dumps(document))


def change_bytes(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at, action = draw.randrange(len(data)), draw.randrange(4)
    if action == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif action == 1:
        del data[at:]
    elif action == 2:
        data[at:at] = bytes(draw.randrange(256) for _ in range(8))
    else:
        # The header of safetensors, which says where the tensors lie, is the first.
        data[at % 400 % len(data)] = draw.randrange(256)
    file.write_bytes(data)


def damage(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if draw.random() < 0.05:
        file.unlink()
    elif file.suffix == ".json" and draw.random() < 0.7:
        change_json(file, draw)
    else:
        change_bytes(file, draw)


def check(
    source: Path, work: Path, seed: int, load: Callable[[Path], Tensor], wanted: Tensor | None
) -> bool:
    """Return whether a damaged copy was refused; otherwise it must give the wanted values, or the same twice."""
    shutil.copytree(source, work)
    damage(work, random.Random(seed))
    before = {file.name: file.read_bytes() for file in work.iterdir()}
    try:
        found = load(work)
        # Weights that a load makes up are others each time.
        torch.manual_seed(seed)
        expected = load(work) if wanted is None else wanted
        # A damaged weight may be NaN, and then its answer is.
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=f"another, seed {seed}")
        return False
    except DynormError:
        return True
    finally:
        assert {file.name: file.read_bytes() for file in work.iterdir()} == before
        shutil.rmtree(work)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity_warning()


def test_damaged_folders_of_plain_torch(tmp_path: Path) -> None:
    model = converted(sequential(), X)
    dynorm.save(model, tmp_path / "saved")
    given = sequential()
    untouched = copy.deepcopy(given.state_dict())

    def load(folder: Path) -> Tensor:
        return first(dynorm.load(folder, copy.deepcopy(given)))

    refused = sum(
        check(tmp_path / "saved", tmp_path / "work", seed, load, first(model))
        for seed in range(300)
    )
    assert 250 < refused < 300
    assert all(torch.equal(value, untouched[name]) for name, value in given.state_dict().items())


def test_damaged_folders_of_transformers(tmp_path: Path) -> None:
    model = converted(bert(), IDS)
    dynorm.save(model, tmp_path / "saved")

    def load(folder: Path) -> Tensor:
        return first(dynorm.load(folder))

    refused = sum(
        check(tmp_path / "saved", tmp_path / "work", seed, load, first(model))
        for seed in range(100)
    )
    assert 80 < refused <= 100


def test_damaged_checkpoints(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bert().save_pretrained(tmp_path / "source")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="b"
    ).save_pretrained(tmp_path / "source")

    def load(folder: Path) -> Tensor:
        try:
            return first(load_pretrained(folder).model)
        # A smaller vocabulary, which the ids do not fit, is loaded as it is.
        except IndexError:
            return torch.zeros(())

    refused = sum(
        check(tmp_path / "source", tmp_path / "work", seed, load, None) for seed in range(100)
    )
    assert 20 < refused < 100
