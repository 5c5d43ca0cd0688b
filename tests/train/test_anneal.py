"""Annealing: converted models that still are the original, schedules, the start from activations, the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import dynorm
from dynorm import theory
from dynorm.train.anneal import AnnealSchedule, annealed_layers

TARGETS = {"annealed": dynorm.DyISRU, "annealed_dyt": dynorm.DyT, "annealed_derf": dynorm.Derf,
           "annealed_linear": dynorm.LinearControl}  # fmt: skip


class Net(nn.Module):
    """LayerNorm with and without weights, an RMSNorm, and a channels-first norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.first = nn.LayerNorm(24, eps=1e-6)
        self.plain = nn.LayerNorm(24, elementwise_affine=False)
        self.rms = nn.RMSNorm(24, eps=1e-5)
        self.channels = ChannelsFirst(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        h = h + torch.tanh(self.first(h))
        h = h + torch.tanh(self.plain(3 * h))
        h = h + torch.tanh(self.rms(h))
        h = h + self.channels(h.movedim(-1, 1)).movedim(1, -1)
        return self.head(h)


class ChannelsFirst(nn.Module):
    """A LayerNorm over axis 1, as vision models write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        return (x - mean) / (var + 1e-6).sqrt() * self.weight[:, None] + self.bias[:, None]


class Wrapper(nn.Module):
    """As a LightningModule: its arguments have no mask, or it is not called at all."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(**batch)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"])


# The layers whose tokens have the shape of the mask.
MASKED = {"first": "annealed", "rms": "annealed", "*": "keep"}


def positions(model: nn.Module) -> dict[str, float]:
    return {path: layer.position for path, layer in annealed_layers(model).items()}


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batches(count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(6, 7, 8, generator=generator, dtype=dtype) for _ in range(count)]


def annealed(model: nn.Module, to: Any = "annealed", **options: Any) -> nn.Module:
    x = batches(dtype=model.embed.weight.dtype)[0]
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to, **options)
    return model


@pytest.mark.parametrize("to", list(TARGETS))
def test_at_0_outputs_and_gradients_are_the_originals(to: str) -> None:
    original = net()
    model = annealed(copy.deepcopy(original), to)
    assert len(annealed_layers(model)) == 4
    x = batches()[0]
    for module in (original, model):
        module(x).square().sum().backward()
    y, z = original(x), model(x)
    assert torch.linalg.norm(y - z) <= 1e-12 * torch.linalg.norm(y)
    gradients = dict(model.named_parameters())
    for name, parameter in original.named_parameters():
        ours = gradients[name].grad
        assert torch.linalg.norm(ours - parameter.grad) <= 1e-12 * torch.linalg.norm(
            parameter.grad
        ), name


@pytest.mark.parametrize("to", list(TARGETS))
def test_at_the_end_plain_layers_stand_there_with_the_same_parameters(to: str) -> None:
    model = annealed(net(), to)
    dynorm.calibrate_(model, batches())
    dynorm.set_anneal_(model, 1.0)
    before, parameters, x = copy.deepcopy(model), dict(model.named_parameters()), batches()[1]
    assert dynorm.finalize_(model) is model
    assert {type(m) for m in model.modules() if isinstance(m, dynorm.layers.PointwiseNorm)} == {
        TARGETS[to]
    }
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert torch.equal(model(x), before(x))
    restored = dynorm.restore_(model)
    assert isinstance(restored.first, nn.LayerNorm)


def test_hooks_and_mode_come_along_to_the_end() -> None:
    model, seen = net().eval(), []
    model.rms.register_forward_hook(lambda *_: seen.append("forward"))
    model.rms.register_full_backward_hook(lambda *_: seen.append("backward"))
    annealed(model)
    dynorm.set_anneal_(model, 1)
    with pytest.warns(dynorm.errors.CalibrationWarning, match="default constants"):
        dynorm.finalize_(model)
    seen.clear()
    model(batches()[0]).sum().backward()
    assert seen == ["forward", "backward"]
    assert not model.rms.training


def test_finalize_before_the_end_is_refused() -> None:
    model = annealed(net())
    dynorm.set_anneal_(model, 1.0)
    dynorm.set_anneal_(model, 0.5)
    with pytest.raises(dynorm.errors.ModelError, match=r"4 of 4.*set_anneal_\(model, 1.0\)"):
        dynorm.finalize_(model)
    assert len(annealed_layers(model)) == 4


@pytest.mark.parametrize("call", [
    lambda m: dynorm.set_anneal_(0.3, m),
    lambda m: dynorm.finalize_("a"), lambda m: dynorm.AnnealStart(None),
])  # fmt: skip
def test_what_is_no_module_is_refused(call: Any) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"model.*torch\.nn\.Module"):
        call(annealed(net()))


def test_calibration_leaves_the_model_as_it_is_at_0_and_sets_where_it_goes() -> None:
    model, x = annealed(net()), batches()[0]
    before = model(x)
    report = dynorm.calibrate_(model, batches())
    assert torch.equal(model(x), before)
    assert [site.path for site in report.sites] == ["first", "plain", "rms", "channels"]
    # The constants fit the norms' cores, so the end of the path is nearer than with the defaults.
    fresh = annealed(net())
    errors = []
    for each in (model, fresh):
        dynorm.set_anneal_(each, 1.0)
        errors.append(float((each(x) - before).detach().norm()))
    assert errors[0] < 0.7 * errors[1]


def test_a_layer_alone_cannot_be_replaced_in_itself() -> None:
    with pytest.raises(dynorm.errors.ModelError, match=r"have.*parent"):
        dynorm.finalize_(dynorm.layers.AnnealedDyISRU(8, t=1.0))


def test_a_wrapped_model_is_not_finalized() -> None:
    """DDP would go on to send the buffers of the layers from before."""
    inside = nn.Sequential(dynorm.layers.AnnealedDyISRU(8, t=1.0))
    with pytest.raises(dynorm.errors.ModelError, match=r"pass model\.module, wrap afterwards"):
        dynorm.finalize_(nn.DataParallel(inside))
    assert isinstance(inside[0], dynorm.layers.AnnealedDyISRU)


class TestSchedule:
    @given(st.integers(0, 50), st.integers(1, 40))
    def test_it_rises_from_0_to_1_and_fits(self, start: int, length: int) -> None:
        schedule, total = AnnealSchedule(start / 100, length / 100), 100
        values = [schedule.at(step, total) for step in range(total)]
        expected = [min(max((step - start) / length, 0.0), 1.0) for step in range(total)]
        assert values == expected

    @pytest.mark.parametrize("value", [-1, 1.5, float("nan"), "a", True, None])
    def test_wrong_shares_and_steps_are_refused(self, value: Any) -> None:
        for make in (lambda: AnnealSchedule(start=value), lambda: AnnealSchedule(length=value)):
            with pytest.raises(dynorm.errors.ArgumentError, match="number from 0 to 1"):
                make()
        schedule = AnnealSchedule()
        for call in (lambda: schedule.steps(value), lambda: schedule.at(value, 1000)):
            with pytest.raises(dynorm.errors.ArgumentError, match="integer"):
                call()

    @pytest.mark.parametrize("schedule", [(0.8, 0.3), (0.5, 0.5), (1, 0)])
    def test_the_end_must_come_before_that_of_the_run(self, schedule: Any) -> None:
        with pytest.raises(dynorm.errors.ArgumentError, match=r"end.*before"):
            AnnealSchedule(*schedule).steps(100)


class TestStart:
    def test_the_constants_are_those_of_the_closed_form(self) -> None:
        model = annealed(net())
        seen: dict[str, list[Tensor]] = {name: [] for name in ("first", "rms")}
        for name, found in seen.items():
            model.get_submodule(name).register_forward_pre_hook(
                lambda m, args, found=found: found.append(args[0])
            )
        start = dynorm.AnnealStart(model)
        for batch in batches():
            model(batch)
        start.finish_()
        x = torch.cat(seen["first"]).reshape(-1, 24)
        expected = theory.leave_one_out_beta(x, eps=1e-6).log().mean()
        torch.testing.assert_close(model.first.log_beta.squeeze(), expected)
        x = torch.cat(seen["rms"]).reshape(-1, 24)
        expected = theory.leave_one_out_square_sum(x, eps=1e-5).log().mean()
        torch.testing.assert_close(model.rms.log_beta.squeeze(), expected)

    def test_dyt_takes_the_same_slope(self) -> None:
        models = [annealed(net(), to) for to in ("annealed", "annealed_dyt")]
        for model in models:
            start = dynorm.AnnealStart(model)
            model(batches()[0])
            start.finish_()
        torch.testing.assert_close(models[0].first.beta(), models[1].first.beta())

    def test_a_compiled_model_is_watched_too(self) -> None:
        torch._dynamo.reset()
        counter = CompileCounter()
        model, eager = annealed(net()), annealed(net())
        compiled = torch.compile(model, backend=counter)
        compiled(batches()[0])
        traced = counter.frame_count
        for each, run in ((model, compiled), (eager, eager)):
            start = dynorm.AnnealStart(each)
            run(batches()[1])
            start.finish_()
        assert torch.equal(model.first.log_beta, eager.first.log_beta)
        compiled(batches()[2])
        assert counter.frame_count == traced

    @pytest.mark.parametrize("form", ["keyword", "position", "dict", "wrapped"])
    def test_padding_is_left_out_however_the_mask_comes(self, form: str) -> None:
        x = batches()[0]
        mask = (torch.arange(7) < torch.tensor([[7], [3], [5], [2], [6], [7]])).long()
        constants = []
        for value in (x, torch.where(mask[..., None].bool(), x, 1e4)):
            model = annealed(net(), MASKED)
            wrapper, batch = Wrapper(model), {"x": value, "attention_mask": mask}
            with dynorm.AnnealStart(model if form in ("keyword", "position") else wrapper):
                if form == "keyword":
                    model(**batch)
                elif form == "position":
                    model(value, mask)
                elif form == "dict":
                    wrapper(batch)
                else:
                    wrapper.step(batch)
            constants.append(model.first.log_beta.item())
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert constants[0] == constants[1]
        unmasked = annealed(net(), MASKED)
        with dynorm.AnnealStart(unmasked):
            unmasked(x)
        assert unmasked.first.log_beta.item() != constants[0]

    def test_a_batch_without_a_mask_does_not_inherit_one(self) -> None:
        x, mask = batches()[0], torch.zeros(6, 7, dtype=torch.long)
        mask[:, :2] = 1
        models = [annealed(net(), MASKED) for _ in range(2)]
        with dynorm.AnnealStart(models[0]):
            models[0](x, attention_mask=mask)
            models[0](x)
        with dynorm.AnnealStart(models[1]):
            models[1](torch.cat([x, x]), attention_mask=torch.cat([mask, torch.ones_like(mask)]))
        torch.testing.assert_close(models[0].first.log_beta, models[1].first.log_beta)

    def test_several_micro_batches_are_one(self) -> None:
        small, large = batches()[0], 9 * batches()[1]
        models = [annealed(net()) for _ in range(2)]
        with dynorm.AnnealStart(models[0]):
            models[0](small)
            models[0](large)
        with dynorm.AnnealStart(models[1]):
            models[1](torch.cat([small, large]))
        torch.testing.assert_close(models[0].first.log_beta, models[1].first.log_beta)
        torch.testing.assert_close(models[0].rms.log_beta, models[1].rms.log_beta)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_what_runs_again_in_the_backward_pass_is_counted_once(self, reentrant: bool) -> None:
        model, other = annealed(net()), annealed(net())
        x = batches()[0].requires_grad_()
        with dynorm.AnnealStart(model):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            model(7 * x)
        with dynorm.AnnealStart(other):
            other(x)
            other(7 * x)
        assert torch.equal(model.first.log_beta, other.first.log_beta)

    def test_an_error_inside_leaves_nothing_behind(self) -> None:
        model = annealed(net())
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="shape"), dynorm.AnnealStart(model):
            model(torch.randn(3, 5, dtype=torch.float64))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert torch._dynamo.eval_frame._stance.stance == "default"
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        start = dynorm.AnnealStart(model)
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(3, 5, dtype=torch.float64))
        model(batches()[0])
        start.finish_()
        with pytest.raises(dynorm.errors.ModelError, match="finished once"):
            start.finish_()
        start.cancel_()

    def test_what_was_not_reached_or_is_not_finite(self) -> None:
        model = annealed(net())
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(dynorm.errors.DataError, match=r"saw.*training"):
            dynorm.AnnealStart(model).finish_()
        start = dynorm.AnnealStart(model)
        bad = batches()[0]
        bad[0, 0, 0] = torch.nan
        model(bad)
        with pytest.raises(dynorm.errors.DataError, match="NaN or inf"):
            start.finish_()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with pytest.raises(dynorm.errors.ModelError):
            dynorm.AnnealStart(net())
