"""Every verb inside torch.inference_mode: the model that it leaves can be trained afterwards."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.layers.rmsnorm import RMSNorm

TARGETS = ("dyisru", "dyt", "derf", "linear", "annealed", "annealed_derf")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.rms = nn.RMSNorm(24)
        self.head = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + torch.tanh(self.rms(h))
        return self.head(self.norm(h))


def build() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def batches(count: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [3 * torch.randn(32, 8, generator=source) for _ in range(count)]


def converted(model: Block | None = None, **options: object) -> Block:
    model = build() if model is None else model
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), **options)
    return model


def require_trains(model: nn.Module, *, frozen: int = 0) -> None:
    """Take a step, after which every parameter has a gradient and has moved."""
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_inference() for tensor in tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    model.train()
    model(batches()[0]).square().sum().backward()
    optimizer.step()
    still = [
        p for p, value in zip(model.parameters(), before, strict=True) if torch.equal(p, value)
    ]
    assert len(still) <= frozen


@pytest.mark.parametrize("witnesses", [0, 2, (0, 3)])
@pytest.mark.parametrize("to", TARGETS)
def test_a_model_that_was_converted_and_calibrated(to: str, witnesses: object) -> None:
    model = build()
    with torch.inference_mode():
        converted(model, to=to, witnesses=witnesses, per_channel=witnesses == 0)
        dynorm.calibrate_(model, batches())
    if "annealed" in to:
        dynorm.set_anneal_(model, 0.5)
    require_trains(model)


def test_a_model_of_two_dtypes_as_the_norms_were() -> None:
    with torch.inference_mode():
        model = build().bfloat16()
        model.norm.float()
        sites = dynorm.find_norms(model, batches()[0].bfloat16())
        dynorm.convert_(model, sites, only=["rms"])
    assert not any(p.is_inference() for p in model.rms.parameters())


@pytest.mark.parametrize("witnesses", [0, 2])
def test_the_layers_that_auto_chose(witnesses: int) -> None:
    model = build()
    with torch.inference_mode():
        converted(model, to="auto", witnesses=witnesses)
        dynorm.calibrate_(model, batches())
    require_trains(model)


def test_initialization_witnesses_and_the_end_of_an_annealing() -> None:
    model = build()
    with torch.inference_mode():
        converted(model, to="annealed")
        for layer in (model.norm, model.rms):
            layer.set_witnesses_([1, 2])
        dynorm.init_from_batch_(model, batches()[0])
        dynorm.set_anneal_(model, 1.0)
        dynorm.finalize_(model)
    require_trains(model)


def test_norms_that_come_back_in_another_dtype() -> None:
    model = converted()
    dynorm.calibrate_(model, batches())
    with torch.inference_mode():
        # The norms follow the model to float64 when they are run, or when they come back.
        dynorm.measure(model.double(), [batch.double() for batch in batches()])
        dynorm.restore_(model)
    assert model.norm.weight.dtype == torch.float64
    model.float()
    require_trains(model)


def test_refinement_and_distillation_in_inference_mode() -> None:
    model = converted()
    dynorm.calibrate_(model, batches())
    expected = copy.deepcopy(model)
    dynorm.refine_(expected, batches(), steps=4)
    teacher = dynorm.restore_(copy.deepcopy(model))
    dynorm.distill_(expected, batches(), teacher=teacher, steps=4)
    with torch.inference_mode():
        dynorm.refine_(model, batches(), steps=4)
        dynorm.distill_(model, batches(), teacher=teacher, steps=4)
    for parameter, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, value)
    require_trains(model)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model(tmp_path: Path, dtype: torch.dtype, inside: bool) -> None:
    model = converted(witnesses=2)
    dynorm.calibrate_(model, batches())
    dynorm.save(model.to(dtype), tmp_path / "model")
    with torch.inference_mode():
        # Its own tensors can never be trained: those of the loaded model are others.
        empty = build()
        loaded = dynorm.load(tmp_path / "model", empty) if inside else empty
    if not inside:
        loaded = dynorm.load(tmp_path / "model", empty)
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items()
    )
    require_trains(loaded.float())


def test_a_loaded_model_of_transformers(tmp_path: Path) -> None:
    from tests.hub.models import bert

    dynorm.save(bert(), tmp_path / "model")
    with torch.inference_mode():
        loaded = dynorm.load(tmp_path / "model")
    assert not any(tensor.is_inference() for tensor in loaded.parameters())


def test_a_fold() -> None:
    model = build()
    with torch.no_grad():
        model.norm.bias.fill_(0.5)
    with torch.inference_mode():
        report = dynorm.fold_(model, batches()[0], add_bias=True)
    assert report.added_biases == ["head"]
    assert isinstance(model.norm, RMSNorm) or not model.norm.weight.is_inference()
    require_trains(model, frozen=0)


def test_layers_that_were_made_in_inference_mode_or_copied_there() -> None:
    with torch.inference_mode():
        model = nn.Sequential(
            dynorm.DyISRU(8, witnesses=[1]), RMSNorm(8), dynorm.layers.AnnealedDyT(8)
        )
        model[2].set_t_(0.5)
        copied = copy.deepcopy(converted())
    require_trains(model)
    for verb in (
        lambda: dynorm.calibrate_(copied, batches()),
        lambda: dynorm.refine_(copied, batches(), steps=2),
        lambda: dynorm.init_from_batch_(copied, batches()[0]),
    ):
        with pytest.raises(dynorm.errors.ModelError, match=r"made.*torch\.inference_mode"):
            verb()
