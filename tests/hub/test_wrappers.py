"""Models with wrapped parts: saved folders have the names of the plain model, and load into any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import dynorm
from dynorm.errors import ModelError
from dynorm.files import read_json
from dynorm.wrappers import plain_name, unwrapped
from tests.ecosystem.models import first, gpt2

C = 8
X = torch.linspace(-2, 2, 4 * C).reshape(4, C)


class Block(nn.Module):
    """A norm, and a part that is really called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.module = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.module = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.module(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def converted(model: Net | None = None) -> Net:
    model = build() if model is None else model
    dynorm.convert_(model, dynorm.find_norms(model, X), witnesses=2)
    dynorm.calibrate_(model, [X, 2 * X])
    return model


def compiled(block: nn.Module) -> Any:
    return torch.compile(block, backend="eager")


def like_fsdp(block: nn.Module) -> nn.Module:
    """Return a wrapper that has the name and the inside of FSDP's, without a process group."""
    kind = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "torch.distributed.fsdp"})
    wrapper = kind()
    wrapper._fsdp_wrapped_module = block
    return wrapper


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "compiled": compiled,
    "both": lambda block: compiled(checkpoint_wrapper(block)),
    "parallel": nn.DataParallel,
}


def wrap_blocks(model: Net, wrap: Callable[[nn.Module], nn.Module]) -> Net:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = wrap(block)
    # A layer itself, too.
    model.module = wrap(model.module)
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_saved_model_has_the_names_of_the_plain_one(tmp_path: Path, wrapper: str) -> None:
    model = converted()
    expected = model(X)
    dynorm.save(model, tmp_path / "plain")
    if wrapper != "parallel":
        wrap_blocks(model, WRAPPERS[wrapper])
    dynorm.save(model, tmp_path / "parts")
    dynorm.save(WRAPPERS[wrapper](model), tmp_path / "whole")
    for folder in ("parts", "whole"):
        for file in ("dynorm.json", "model.safetensors"):
            saved = (tmp_path / folder / file).read_bytes()
            assert saved == (tmp_path / "plain" / file).read_bytes()
        loaded = dynorm.load(tmp_path / folder, build())
        assert torch.equal(loaded(X), expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_plain_folder_loads_into_a_wrapped_model(tmp_path: Path, wrapper: str) -> None:
    model = converted()
    dynorm.save(model, tmp_path / "model")
    targets = [WRAPPERS[wrapper](build())]
    if wrapper != "parallel":
        targets.append(wrap_blocks(build(), WRAPPERS[wrapper]))
    for target in targets:
        loaded = dynorm.load(tmp_path / "model", target)
        assert loaded is target
        plain = unwrapped(loaded)
        state = {plain_name(name): value for name, value in plain.state_dict().items()}
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        if wrapper in ("checkpoint", "parallel"):
            assert torch.equal(loaded(X), model(X))


def test_a_model_that_was_wrapped_before_its_conversion(tmp_path: Path) -> None:
    # The paths that are found have the wrapper in them, and those that are saved have not.
    model = converted(wrap_blocks(build(), checkpoint_wrapper))
    dynorm.save(model, tmp_path / "model")
    paths = [layer["paths"] for layer in read_json(tmp_path / "model/dynorm.json")["layers"]]
    assert paths == [
        ["blocks.0.norm"],
        ["blocks.0.module.1"],
        ["blocks.1.norm"],
        ["blocks.1.module.1"],
        ["module"],
    ]
    assert torch.equal(dynorm.load(tmp_path / "model", build())(X), model(X))
    # The original may be the plain model.
    report = dynorm.measure(model, [X], original=build())
    assert len(report.sites) == 5


@pytest.mark.parametrize("wrapper", ["checkpoint", "compiled"])
def test_a_model_of_transformers(tmp_path: Path, wrapper: str) -> None:
    model = gpt2()
    expected = first(model)
    model.transformer.h[0] = WRAPPERS[wrapper](model.transformer.h[0])
    model.transformer.ln_f = WRAPPERS[wrapper](model.transformer.ln_f)
    dynorm.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "written")
    # The Trainer passes the tensors.
    model.save_pretrained(tmp_path / "passed", state_dict=model.state_dict())
    dynorm.save(WRAPPERS[wrapper](model), tmp_path / "whole")
    for folder in ("saved", "written", "passed", "whole"):
        loaded = dynorm.load(tmp_path / folder)
        assert torch.equal(first(loaded), expected)


def test_parts_in_fsdp_are_written_by_their_plain_paths(tmp_path: Path) -> None:
    model = gpt2()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = first(model)
    model.transformer.h[0] = like_fsdp(model.transformer.h[0])
    # As FSDP gathers it, and as an outer wrapper of it might.
    for k, names in enumerate((state, model.state_dict())):
        model.save_pretrained(tmp_path / str(k), state_dict=names)
        assert torch.equal(first(dynorm.load(tmp_path / str(k))), expected)
    with pytest.raises(ModelError, match=r"wrapped.*FSDP"):
        dynorm.save(model, tmp_path / "model")


def test_parts_whose_names_a_model_may_have_too_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'blocks\.0'.*DataParallel"):
        dynorm.save(wrap_blocks(converted(), nn.DataParallel), tmp_path / "model")


def test_a_sharded_model_is_not_saved(tmp_path: Path) -> None:
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(sharded)
    sharded._modules["_fsdp_wrapped_module"] = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="FSDP"):
        dynorm.save(sharded, tmp_path / "model")
