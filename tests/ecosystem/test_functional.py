"""torch.func, autograd's other modes, averaged and copied models, casts, and the utilities of torch.nn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import dynorm
from tests.ecosystem.models import bert, first, gpt2

# torch scripts its own formulas when forward mode is first used.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

LAYERS = ["dyisru", "dyt", "derf", "linear"]


def mlp(to: str = "dyisru", norm: type[nn.Module] = nn.LayerNorm, **options: Any) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(6, 8), norm(8), nn.GELU(), nn.Linear(8, 8), norm(8), nn.Linear(8, 3)
    )
    dynorm.convert_(
        model,
        dynorm.find_norms(model, torch.randn(16, 6)),
        to=to,
        **{"per_channel": False, "witnesses": 0, **options},
    )
    if to in LAYERS:
        dynorm.calibrate_(model, [torch.randn(64, 6)])
    return model


def own(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("to", [*LAYERS, "annealed"])
def test_gradients_per_sample(to: str) -> None:
    model, x, y = mlp(to), torch.randn(5, 6), torch.randn(5, 3)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, parameters, (x[None],)) - y).pow(2).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(own(model), x, y)
    for i in range(5):
        model.zero_grad()
        (model(x[i : i + 1]) - y[i]).pow(2).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("to", LAYERS)
def test_an_ensemble_of_models(to: str) -> None:
    models, x = [mlp(to) for _ in range(3)], torch.randn(5, 6)
    parameters, buffers = stack_module_state(models)
    frame = copy.deepcopy(models[0]).to("meta")
    together = vmap(lambda p, b: functional_call(frame, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("to", LAYERS)
def test_derivatives_forward_backward_and_twice(to: str) -> None:
    model, x, v = (
        mlp(to).double(),
        torch.randn(6, dtype=torch.float64),
        torch.randn(6, dtype=torch.float64),
    )
    jacobian = jacrev(model)(x)
    torch.testing.assert_close(jacfwd(model)(x), jacobian)
    torch.testing.assert_close(jvp(model, (x,), (v,))[1], jacobian @ v)
    torch.testing.assert_close(
        vjp(model, x)[1](torch.ones(3, dtype=torch.float64))[0], jacobian.sum(0)
    )
    torch.testing.assert_close(torch.autograd.functional.jacobian(model, x), jacobian)
    curvature = hessian(lambda x: model(x).sum())(x)
    torch.testing.assert_close(
        torch.autograd.functional.hessian(lambda x: model(x).sum(), x), curvature
    )
    assert torch.autograd.gradgradcheck(model, x.clone().requires_grad_())


def test_a_tangent_of_the_constants_themselves() -> None:
    model, x = mlp().double(), torch.randn(4, 6, dtype=torch.float64)
    parameters = own(model)
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    _, tangent = jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (tangents,))
    step = 1e-6
    ahead, behind = (
        functional_call(
            model, {name: p + sign * step * tangents[name] for name, p in parameters.items()}, (x,)
        )
        for sign in (1, -1)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("to", [*LAYERS, "annealed"])
def test_checkpointed_activations(to: str, use_reentrant: bool) -> None:
    model, x = mlp(to), torch.randn(5, 6)
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf).pow(2).sum().backward()
        found.append(
            [leaf.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    assert len(found[0]) == len(found[1]) > 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Averages


@pytest.mark.parametrize("to", LAYERS)
def test_an_exponential_moving_average(to: str) -> None:
    model, decay = mlp(to), 0.9
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    average.update_parameters(model)
    expected = own(copy.deepcopy(model))
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        average.update_parameters(model)
        expected = {
            name: decay * expected[name] + (1 - decay) * p for name, p in own(model).items()
        }
    for name, value in own(average.module).items():
        torch.testing.assert_close(value, expected[name])
    x = torch.randn(4, 6)
    torch.testing.assert_close(average(x), functional_call(model, expected, (x,)))
    twin = AveragedModel(mlp(to))
    twin.load_state_dict(average.state_dict())
    assert torch.equal(twin(x), average(x))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_follows_the_path(use_buffers: bool) -> None:
    model, x = mlp("annealed"), torch.randn(4, 6)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=use_buffers)
    average.update_parameters(model)
    for t in (0.25, 1.0):
        dynorm.set_anneal_(model, t)
        for _ in range(40 if use_buffers else 1):
            average.update_parameters(model)
        torch.testing.assert_close(average(x), model(x), rtol=1e-4, atol=1e-5)
    # Copied exactly; averaged, it nears the end and does not reach it.
    ends = [
        layer.position for layer in average.module if isinstance(layer, dynorm.layers.AnnealedNorm)
    ]
    assert ends == [1.0, 1.0] if not use_buffers else all(0.999 < end <= 1 for end in ends)
    point_wise = dynorm.finalize_(average.module, force=use_buffers)
    torch.testing.assert_close(point_wise(x), dynorm.finalize_(model)(x), rtol=1e-4, atol=1e-5)


# Copies


def test_a_copy_has_nothing_in_common_with_the_model() -> None:
    model = gpt2()
    twin, expected = copy.deepcopy(model), first(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(first(model), expected)
    dynorm.restore_(copy.deepcopy(model))
    assert torch.equal(first(model), expected)


def test_a_state_dict_by_torchs_own_means(tmp_path: Path) -> None:
    model = gpt2()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = gpt2()
    assert not torch.equal(first(other), first(model))
    state = torch.load(tmp_path / "state.pt", weights_only=True, mmap=True)
    other.load_state_dict(state, assign=True)
    assert torch.equal(first(other), first(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_there_and_back(dtype: torch.dtype) -> None:
    model = bert()
    exact = first(model)
    narrow = first(model.to(dtype))
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), exact, rtol=0.1, atol=0.1)
    assert first(model.float()).dtype == torch.float32
    assert dynorm.restore_(model).dtype == torch.float32


@pytest.mark.parametrize("to", [*LAYERS, "annealed", "annealed_dyt"])
def test_from_the_meta_device(to: str) -> None:
    model, x = mlp(to), torch.randn(4, 6)
    shell = copy.deepcopy(model).to("meta")
    assert all(tensor.is_meta for tensor in (*shell.parameters(), *shell.buffers()))
    assert shell(x.to("meta")).shape == (4, 3)
    shell.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(shell(x), model(x))


@pytest.mark.parametrize("to", ["dyisru", "annealed"])
def test_shared_memory(to: str) -> None:
    model, x = mlp(to), torch.randn(4, 6)
    expected = model(x)
    model.share_memory()
    assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model(x), expected)


def test_another_process_writes_into_the_shared_model() -> None:
    model = mlp().share_memory()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    # Pickles the layers, and the norms that they replaced, by their tensors' place in shared
    # memory.
    process = torch.multiprocessing.get_context("spawn").Process(
        target=model.load_state_dict, args=(zeros,)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert not any(parameter.any() for parameter in model.parameters())


# Utilities


def test_parametrizations_beside_and_of_a_layer() -> None:
    model, x = mlp(), torch.randn(4, 6)
    expected = model(x)
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[3])
    model[0].parametrizations.weight.original0.data.mul_(2)
    assert not torch.allclose(model(x), expected)
    parametrize.remove_parametrizations(model[0], "weight")
    assert isinstance(model[1], dynorm.DyISRU)

    class Positive(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.abs()

    layer = dynorm.DyISRU(8)
    nn.init.constant_(layer.weight, -2.0)
    x = torch.randn(4, 8)
    wanted = -(layer(x) - layer.bias) + layer.bias
    parametrize.register_parametrization(layer, "weight", Positive())
    torch.testing.assert_close(layer(x), wanted)
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


def test_pruned_linear_maps_and_weights_of_layers() -> None:
    model, x = mlp(), torch.randn(4, 6)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.random_unstructured(model[1], "weight", amount=4)
    hidden = model[1](model[0](x))
    gone = model[1].weight_mask == 0
    assert gone.sum() == 4
    torch.testing.assert_close(hidden[:, gone], model[1].bias[gone].expand(4, 4))
    for module in (model[0], model[1]):
        prune.remove(module, "weight")
    torch.testing.assert_close(model[1](model[0](x)), hidden)


def test_hooks_see_the_layers() -> None:
    model, seen = mlp(), []
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model[1].register_full_backward_hook(lambda module, before, after: seen.append(after[0].shape))
    model(torch.randn(4, 6)).sum().backward()
    assert seen == [(4, 8), (4, 8)]
    handle.remove()


# accelerate


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


@pytest.mark.parametrize("to", ["dyisru", "annealed"])
def test_an_empty_model_is_filled_and_dispatched(tmp_path: Path, to: str) -> None:
    model, x = mlp(to), torch.randn(4, 6)
    if to == "annealed":
        dynorm.set_anneal_(model, 0.25)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    with accelerate.init_empty_weights(include_buffers=True):
        shell = mlp_of_layers(model)
    assert all(tensor.is_meta for tensor in (*shell.parameters(), *shell.buffers()))
    devices = {"0": "cpu", "1": "cpu", "2": "cpu", "3": "cpu", "4": "disk", "5": "cpu"}
    filled = accelerate.load_checkpoint_and_dispatch(
        shell,
        tmp_path,
        device_map=devices,
        offload_folder=tmp_path / "offload",
        offload_buffers=True,
    )
    assert torch.equal(filled(x), model(x))


def mlp_of_layers(like: nn.Sequential) -> nn.Sequential:
    """A model whose layers are written down, not converted."""
    first, second = (
        type(like[i])(**like[i].config() | ({"t": 0.0} if hasattr(like[i], "t") else {}))
        for i in (1, 4)
    )
    return nn.Sequential(
        nn.Linear(6, 8), first, nn.GELU(), nn.Linear(8, 8), second, nn.Linear(8, 3)
    )


def test_a_prepared_model_trains_as_it_is() -> None:
    model, x = mlp(), torch.randn(8, 6)
    twin = copy.deepcopy(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator.backward(prepared(x).pow(2).mean())
    twin(x).pow(2).mean().backward()
    optimizer.step()
    plain.step()
    unwrapped = accelerator.unwrap_model(prepared)
    assert all(
        torch.equal(a, b) for a, b in zip(unwrapped.parameters(), twin.parameters(), strict=True)
    )
