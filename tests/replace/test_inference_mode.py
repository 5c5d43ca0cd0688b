"""Inside torch.inference_mode the verbs leave a model that can be trained afterwards."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.layers.rmsnorm import RMSNorm


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


def batches(count: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [3 * torch.randn(32, 8, generator=source) for _ in range(count)]


def converted(**options: object) -> Block:
    model = Block().eval()
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), **options)
    return model


def require_trains(model: nn.Module) -> None:
    """Take a step, after which every parameter has a gradient and has moved."""
    assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    model.train()
    model(batches()[0]).square().sum().backward()
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("to", "witnesses"),
    [
        ("dyisru", 2),
        ("dyt", 0),
        ("derf", 0),
        ("linear", 0),
        ("annealed", 2),
        ("annealed_derf", 0),
    ],
)
def test_a_model_that_was_converted_and_calibrated(to: str, witnesses: int) -> None:
    model = Block().eval()
    sites = dynorm.find_norms(model, batches()[0])
    with torch.inference_mode():
        dynorm.convert_(model, sites, to, witnesses=witnesses)
        dynorm.calibrate_(model, batches())
    if "annealed" in to:
        dynorm.set_anneal_(model, 0.5)
    require_trains(model)


def test_initialization_witnesses_and_the_end_of_an_annealing() -> None:
    model = converted(to="annealed")
    with torch.inference_mode():
        for layer in (model.norm, model.rms):
            layer.set_witnesses_([1, 2])
        dynorm.init_from_batch_(model, batches()[0])
        dynorm.set_anneal_(model, 1.0)
        dynorm.finalize_(model)
    require_trains(model)


def test_norms_that_come_back_in_another_dtype() -> None:
    model = converted().double()
    with torch.inference_mode():
        dynorm.restore_(model)
    assert model.norm.weight.dtype == torch.float64
    require_trains(model.float())


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
