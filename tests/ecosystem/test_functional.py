"""Derivatives of every order, averages of models on the path, and models too large for memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.func import hessian, jacfwd, jacrev, jvp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import dynorm
from tests.ecosystem.models import first, gpt2

# torch scripts its own formulas when forward mode is first used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)


def mlp(to: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(16, 6)), to)
    return model


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
def test_derivatives_forward_backward_and_twice(to: str) -> None:
    model = mlp(to).double()
    x, v = torch.randn(2, 6, dtype=torch.float64)
    jacobian = jacrev(model)(x)
    torch.testing.assert_close(jacfwd(model)(x), jacobian)
    torch.testing.assert_close(jvp(model, (x,), (v,))[1], jacobian @ v)
    curvature = torch.autograd.functional.hessian(lambda x: model(x).sum(), x)
    torch.testing.assert_close(hessian(lambda x: model(x).sum())(x), curvature)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("to", ["dyisru", "annealed"])
def test_checkpointed_activations(to: str, use_reentrant: bool) -> None:
    model = mlp(to)
    x = torch.randn(5, 6, requires_grad=True)
    wanted = torch.autograd.grad(model(x).pow(2).sum(), x)[0]
    checkpoint(model, x, use_reentrant=use_reentrant).pow(2).sum().backward()
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_follows_the_path(use_buffers: bool) -> None:
    model, x = mlp("annealed"), torch.randn(4, 6)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    for t in (0.25, 1.0):
        dynorm.set_anneal_(model, t)
        for _ in range(40):
            average.update_parameters(model)
        torch.testing.assert_close(average(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_too_large_for_memory_is_dispatched(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "m", max_shard_size="10KB")
    devices = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "lm_head": "cpu"}
    devices |= {"transformer.h.0": "cpu", "transformer.h.1": "disk", "transformer.ln_f": "disk"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", device_map=devices, offload_folder=tmp_path / "offload"
    )
    assert loaded.transformer.ln_f.log_beta.is_meta
    assert torch.equal(first(loaded), first(model))
