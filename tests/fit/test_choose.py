"""``to="auto"``: the simplest layer that holds, measured on tokens that it was not fitted to."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import dynorm
from dynorm.errors import ArgumentError, DataError
from dynorm.fit.calibrate import CalibrationReport

C = 16


def tokens(kind: str, count: int = 400) -> Tensor:
    """Tokens whose RMSNorm is exactly a layer of a kind: one size or two, and a bound that counts or does not."""
    size = (
        1 + 3 * (torch.arange(count) % 2)[:, None] if "witnesses" in kind else torch.ones(count, 1)
    )
    x = torch.zeros(count, C)
    if "linear" in kind:
        x[:, 1:] = torch.randn(count, C - 1)
        x[:, 1:] *= 4 / x[:, 1:].norm(dim=1, keepdim=True)
    else:
        x[torch.arange(count), torch.randint(1, C, (count,))] = 4 * torch.randn(count)
    x[:, 0] = 3
    return size * x


def chosen(
    x: Tensor, most: int = 1, parts: int = 4, **options: float
) -> tuple[nn.Module, CalibrationReport]:
    """A model with the layer that was chosen; with a lean, because a careful fit is never exact."""
    model = nn.Sequential(nn.RMSNorm(C, eps=1e-12))
    dynorm.convert_(model, dynorm.find_norms(model, x), to="auto", witnesses=most)
    return model, dynorm.calibrate_(model, list(x.chunk(parts)), lean=0.7, **options)


@pytest.mark.parametrize(
    "kind", ["linear", "linear with witnesses", "dyisru", "dyisru with witnesses"]
)
def test_a_site_gets_the_simplest_layer_that_is_its_norm(kind: str) -> None:
    x = tokens(kind)
    model, report = chosen(x)
    (site,) = report.sites
    assert (type(model[0]), site.layer) == {
        "l": (dynorm.LinearControl, "linear"),
        "d": (dynorm.DyISRU, "dyisru"),
    }[kind[0]]
    assert model[0].witness_channels == ((0,) if "witnesses" in kind else ())
    assert list(site.errors) == [
        "linear",
        "linear with witnesses",
        "dyisru",
        "dyisru with witnesses",
    ]
    assert site.errors[kind] <= min(site.errors.values()) + report.tolerance
    assert all(
        error > min(site.errors.values()) + report.tolerance
        for error in list(site.errors.values())[: list(site.errors).index(kind)]
    )
    assert kind.replace(" with witnesses", " +1") in str(report)
    measured = dynorm.measure(model, [x])
    assert ("1 by linear layers that fold_ can remove" in " ".join(str(measured).split())) == (
        kind == "linear"
    )
    seen = measured.sites[0]
    assert seen.why.startswith(f"{kind}: errors of linear {site.errors['linear']:.3f}, ")


def test_errors_are_those_on_tokens_that_were_not_fitted() -> None:
    x = tokens("dyisru with witnesses")
    norm, (first, second) = nn.RMSNorm(C, eps=1e-12), x.chunk(2)
    _, report = chosen(x, parts=2, tolerance=0.0)
    for name, error in report.sites[0].errors.items():
        to, *more = name.split(" with ")
        model = nn.Sequential(copy.deepcopy(norm))
        dynorm.convert_(model, dynorm.find_norms(model, x), to=to, witnesses=len(more))
        dynorm.calibrate_(model, [first], lean=0.7)
        with torch.no_grad():
            y, now = norm(second), model(second)
        # The spread is that of all tokens, of which the second half counts twice.
        spread = norm(torch.cat([first, second, second])).square().sum(1).mean().detach()
        assert error == pytest.approx(
            float(((now - y).square().sum(1).mean() / spread).sqrt()), rel=1e-4
        )


def test_a_greater_tolerance_takes_the_simpler_layer() -> None:
    x = tokens("dyisru with witnesses")
    assert type(chosen(x, tolerance=10.0)[0][0]) is dynorm.LinearControl
    model, report = chosen(x, most=0, tolerance=0.0)
    assert type(model[0]) is dynorm.DyISRU
    assert list(report.sites[0].errors) == ["linear", "dyisru"]


def test_of_a_single_batch_the_errors_of_the_fit_decide() -> None:
    model, report = chosen(tokens("linear"), parts=1)
    assert type(model[0]) is dynorm.LinearControl
    assert all(math.isfinite(error) for error in report.sites[0].errors.values())


def test_it_chooses_anew_from_other_batches_and_can_be_undone() -> None:
    model, _ = chosen(tokens("linear"))
    dynorm.calibrate_(model, list(tokens("dyisru").chunk(4)))
    assert type(model[0]) is dynorm.DyISRU
    assert type(dynorm.restore_(model)[0]) is nn.RMSNorm


def test_the_layer_takes_the_place_with_all_that_belongs_to_it() -> None:
    """Hooks, mode, sharing of the module, sharing of its weight, and what is trained stay."""
    norm = nn.RMSNorm(C, eps=1e-12)
    model = nn.Sequential(norm, nn.Linear(C, C), norm).eval()
    model[1].extra, calls = norm.weight, []
    norm.register_forward_hook(lambda *_: calls.append(1))
    norm.requires_grad_(False)
    x = tokens("linear")
    dynorm.convert_(model, dynorm.find_norms(model, x), to="auto")
    dynorm.calibrate_(model, list(x.chunk(4)), tolerance=10.0)
    calls.clear()
    model(x)
    assert len(calls) == 2
    assert type(model[0]) is dynorm.LinearControl
    assert model[0] is model[2]
    assert model[1].extra is model[0].weight
    assert not model[0].training
    assert not any(parameter.requires_grad for parameter in model[0].parameters())


def test_an_error_leaves_the_model_as_it_was() -> None:
    x = tokens("linear")
    model = nn.Sequential(nn.RMSNorm(C))
    dynorm.convert_(model, dynorm.find_norms(model, x), to="auto", witnesses=1)
    layer, before = model[0], copy.deepcopy(model.state_dict())
    with pytest.raises(DataError):
        dynorm.calibrate_(model, [x, torch.full_like(x, torch.nan)])
    assert model[0] is layer
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_bad_arguments_are_refused() -> None:
    model = nn.Sequential(nn.RMSNorm(C))
    x = tokens("linear")
    sites = dynorm.find_norms(model, x)
    with pytest.raises(ArgumentError, match="number of channels"):
        dynorm.convert_(model, sites, to="auto", witnesses=[1, 2])
    with pytest.raises(ArgumentError, match="auto"):
        dynorm.convert_(model, sites, to="automatic")
    dynorm.convert_(model, sites, to="auto")
    with pytest.raises(ArgumentError, match="tolerance"):
        dynorm.calibrate_(model, [x], tolerance=-0.1)


def small(kind: str) -> nn.Module:
    """Tokens of two sizes at the first norms, and of nearly one at the last."""
    torch.manual_seed(0)
    if kind == "bert":
        bert = BertConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        model: nn.Module = BertModel(bert)
        table = model.embeddings.word_embeddings
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        )
        table = model.transformer.wte
        nn.init.normal_(model.transformer.h[0].mlp.c_proj.bias, std=5)
    with torch.no_grad():
        table.weight[::2] *= 20
    return model.eval().double()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_mixed_model_is_saved_loaded_and_folded(kind: str, tmp_path: Path) -> None:
    """Post-norm and pre-norm: some sites become linear, others not; of the linear ones nothing stays."""
    batches = [{"input_ids": torch.randint(0, 64, (8, 12))} for _ in range(6)]
    model = small(kind)
    # Without the means, a line without witnesses would not be enough at any site of this GPT-2.
    report = dynorm.convert_model(
        model, batches, to="auto", refine=2, witnesses=2, fold_means=False
    )
    layers = [site.layer for site in report.sites]
    assert {"linear", "dyisru"} == set(layers)
    with torch.no_grad():
        wanted = model(**batches[0])[0]
        dynorm.save(model, tmp_path / "mixed")
        assert_close(dynorm.load(tmp_path / "mixed")(**batches[0])[0], wanted, rtol=0, atol=0)
        done = dynorm.fold_(model, **batches[0], untie=True)
        assert_close(model(**batches[0])[0], wanted, rtol=1e-9, atol=1e-9)
    plain = [site.path for site in report.sites if site.layer == "linear" and not site.witnesses]
    assert plain
    assert [type(model.get_submodule(path)) for path in plain] == [nn.Identity] * len(plain), str(
        done
    )
