"""Linear layers folded away, and the model saved in its own class."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from benchmarks.fold_models import build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import fold_
from dynorm.outputs import relative_error
from dynorm.replace.converted import is_ours

transformers = pytest.importorskip("transformers")

C = 8


class Net(nn.Module):
    """A linear layer in the place of a norm, between a writer and a reader."""

    def __init__(self, dropout: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.e, self.n, self.d, self.h = nn.Linear(4, C), norm, dropout, nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.e(x)
        z: Tensor = self.h(self.d(self.n(y))) + y[..., :3]
        return z


def net(dropout: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(dropout or nn.Identity(), dynorm.LinearControl(C, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape) + 0.3)
    return model.double().eval()


def example() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


def test_a_line_goes_with_its_slope_even_where_its_weight_is_zero() -> None:
    model = net()
    with torch.no_grad():
        model.n.weight[3] = 0
    x, other = example(), example()
    exact = model(other).detach()
    line = model.n
    fold_(model, x)
    assert type(model.n) is nn.Identity
    assert relative_error([model(other).detach()], [exact]) <= 1e-12
    # A model may also call it from a list of its own.
    assert torch.equal(line(torch.ones(C).double()), torch.ones(C).double())
    with pytest.raises(ModelError):
        dynorm.restore_(model)


def test_a_line_stays_where_it_is_not_wanted_or_has_another_dtype() -> None:
    report = fold_(net(), example(), paths=())
    assert report.sites[0].becomes == ""
    model = net(promote=True)
    model.e.float()
    model.h.float()
    model.n.float().weight.data = model.n.weight.data.double()
    model.forward = lambda x: model.h(model.n(model.e(x)).float())
    report = fold_(model, example().float(), tolerance=1.0)
    assert "another dtype" in (report.sites[0].affine.reason or "")


@pytest.mark.parametrize("inplace", [False, True])
def test_a_dropout_in_place_would_write_into_the_stream_in_training(inplace: bool) -> None:
    model = net(nn.Dropout(0.5, inplace=inplace), bias=False)

    def trained(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return model.train()(x).detach()  # type: ignore[no-any-return]

    x = example()
    exact = trained(x)
    report = fold_(model.eval(), x)
    assert relative_error([trained(x)], [exact]) <= 1e-12
    assert ("in place" in (report.sites[0].affine.reason or "")) is inplace


def test_a_model_that_would_write_into_its_input_stays_as_it_was() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.h = dynorm.LinearControl(C, bias=False), nn.Linear(C, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.n(x)
            z: Tensor = self.h(y)
            y.mul_(2.0)
            return z

    x = torch.randn(5, C, dtype=torch.float64)
    before = x.clone()
    model = Writing().double().eval()
    with pytest.raises(ModelError, match="in place"):
        fold_(model, x)
    model(x)
    assert torch.equal(x, before)


def linear(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(name).to(dtype)
    return linear_(model, **inputs(name, model))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folded_model_is_saved_in_its_own_class_whose_norm_computes_the_identity(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(name)
    # As transformers loads it: buffers keep float32.
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    given = inputs(name, model)
    sites = dynorm.find_norms(model, **given)
    if name == "gemma2":
        # The norms before a sum have no linear reader.
        sites = [site for site in sites if "post_" not in site.path]
    dynorm.convert_(model, sites, to="linear")
    with pytest.raises(ModelError, match=r"0 are.*layers are still there"):
        dynorm.hub.as_stock(model, **given)
    coarse = 0.1 if dtype is torch.bfloat16 else None
    fold_(model, untie=True, tolerance=coarse, **given)
    if name == "gemma2":
        with pytest.raises(ModelError, match="all norms of Gemma2ForCausalLM must be gone"):
            dynorm.hub.as_stock(model, **given)
        return
    model.generation_config.eos_token_id = [2, 5]
    random_state = torch.get_rng_state()
    stock: Any = dynorm.hub.as_stock(model, **given)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(stock(**given).logits, model(**given).logits)
    assert stock.generation_config.eos_token_id == [2, 5]
    assert not any(map(is_ours, stock.modules()))
    stock.save_pretrained(tmp_path / "stock")
    loaded = type(stock).from_pretrained(tmp_path / "stock")
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    with pytest.raises(ModelError, match="float16"):
        dynorm.hub.as_stock(model.half(), **given)


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_a_class_of_layernorms_cannot_hold_a_model_without_them(name: str) -> None:
    """It is refused in any state, because no further fold would help."""
    model = linear(name)
    with pytest.raises(ModelError, match=r"LayerNorm.*mean.*remote_code"):
        dynorm.hub.as_stock(model, **inputs(name, model))
    # torch's own import of its compiler warns.
    with warnings.catch_warnings(action="ignore"):
        compiled: Any = torch.compile(model)
    with pytest.raises(ModelError, match="_orig_mod"):
        dynorm.hub.as_stock(compiled, **inputs(name, model))


def test_a_saved_model_loads_with_its_identities(tmp_path: Path) -> None:
    model = linear("gpt2")
    given = inputs("gpt2", model)
    report = fold_(model, untie=True, add_bias=True, **given)
    assert report.loads_with == "dynorm"
    model.save_pretrained(tmp_path / "gpt2")
    loaded = type(model).from_pretrained(tmp_path / "gpt2")
    assert sum(map(is_ours, loaded.modules())) == 5
    with torch.no_grad():
        assert torch.equal(loaded(**given).logits, copy.deepcopy(model)(**given).logits)
