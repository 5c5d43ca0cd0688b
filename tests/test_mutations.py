"""Random damages of a saved folder: an error of ours or the same answer twice, and nothing lost."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dynorm
from dynorm.errors import DynormError

X = torch.linspace(-2, 2, 40).reshape(5, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)).eval()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each holder with a key in it, of a JSON value."""
    keys: Any = value if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from places(value[key])


def change_json(file: Path, draw: random.Random) -> None:
    document = json.loads(file.read_text())
    holder, key = draw.choice(list(places(document)))
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice([None, "x", [], {}, -1, 3, True, 0.5])
    file.write_text(json.dumps(document))


def change_bytes(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data))
    if draw.random() < 0.3:
        del data[at:]
    else:
        # The header of safetensors, which says where the tensors lie, is the first.
        data[at % 400 % len(data)] = draw.randrange(256)
    file.write_bytes(data)


def damage(folder: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    change = change_json if file.suffix == ".json" and draw.random() < 0.7 else change_bytes
    change(file, draw)


@pytest.mark.filterwarnings("ignore")
def test_damaged_folders(tmp_path: Path) -> None:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, X))
    dynorm.calibrate_(model, [X])
    dynorm.save(model, tmp_path / "saved")
    work = tmp_path / "work"
    refused = 0
    for seed in range(100):
        shutil.copytree(tmp_path / "saved", work)
        damage(work, random.Random(seed))
        before = {file.name: file.read_bytes() for file in work.iterdir()}
        given = build()
        try:
            found = dynorm.load(work, given)
        except DynormError:
            refused += 1
            # A load that is refused changes nothing.
            state = build().state_dict()
            assert all(
                torch.equal(value, state[name]) for name, value in given.state_dict().items()
            )
        else:
            # A damaged weight may be NaN, and then its answer is.
            again = dynorm.load(work, build())
            # An axis that x has not is refused by the layer.
            with suppress(DynormError):
                assert_close(found(X), again(X), rtol=0, atol=0, equal_nan=True)
        assert {file.name: file.read_bytes() for file in work.iterdir()} == before
        shutil.rmtree(work)
    assert 40 < refused < 100
