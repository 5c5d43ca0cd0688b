"""Distillation: it learns, puts all states back, resumes, and refuses what cannot work."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

import dynorm
from dynorm.errors import ArgumentError, CalibrationWarning, DataError, ModelError, StorageError
from dynorm.train.callbacks import AnnealCallback
from dynorm.train.distill import output_loss
from dynorm.train.trainer import rate_factor, relative_rates


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, 8, generator=generator) for _ in range(4)]


def original(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8)).eval()


def converted(width: int = 16) -> nn.Module:
    model = original(width)
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]))
    dynorm.calibrate_(model, batches())
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Raise(TrainerCallback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        raise self.error


def test_it_learns_and_is_final() -> None:
    model, teacher = converted(), original().train()
    report = dynorm.distill_(model, batches(), teacher=teacher, steps=30, lr=1e-2)
    assert report.kept
    assert report.steps == 30
    assert report.loss_after < report.loss_before - 0.02
    assert teacher.training
    assert not model.training
    assert all(p.requires_grad for p in teacher.parameters())
    with pytest.raises(ModelError, match="norm"):
        dynorm.restore_(model)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_random_states_and_weights_are_put_back(error: type[BaseException] | None) -> None:
    model, teacher = converted(), original()
    # Such a buffer cannot be written into.
    model.register_buffer("expanded", torch.ones(1).expand(2))
    before = copy.deepcopy(model)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    options: Any = {"teacher": teacher, "steps": 4, "lr": 1e-2}
    if error is None:
        dynorm.distill_(model, batches(), **options)
    else:
        with pytest.raises(error):
            dynorm.distill_(model, batches(), callbacks=[Raise(error)], **options)
        assert same(model, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_weights_that_are_worse_are_put_back() -> None:
    model = converted()
    before = copy.deepcopy(model)
    with pytest.warns(CalibrationWarning, match="put back"):
        report = dynorm.distill_(model, batches(), teacher=original(), steps=3, lr=10.0)
    assert not report.kept
    assert same(model, before)


class BreakAtTheEnd(TrainerCallback):
    def on_train_end(self, *args: object, model: nn.Module, **kwargs: object) -> None:
        next(model.parameters()).data.fill_(torch.nan)


def test_a_text_that_overflows_takes_no_step() -> None:
    data = batches()
    model = converted()
    with pytest.warns(CalibrationWarning, match="1 steps of this call were left out"):
        report = dynorm.distill_(model, [*data, 1e38 * data[0]], teacher=original(), steps=8)
    assert report.kept
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_gradients_whose_norm_overflows_take_no_step() -> None:
    model = converted()
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 1e25 * gradient)
    with pytest.warns(CalibrationWarning, match="3 steps of this call were left out"):
        dynorm.distill_(model, batches(), teacher=original(), steps=3)
    assert same(model, before)


def test_first_batches_that_overflow_end_it_before_a_step() -> None:
    with pytest.raises(DataError, match="first batches must be finite"):
        dynorm.distill_(converted(), [1e38 * batches()[0]], teacher=original(), steps=8)


def test_an_annealed_model_that_broke_is_put_back() -> None:
    model = original()
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), to="annealed")
    before = copy.deepcopy(model)
    callbacks = [AnnealCallback(start=0.25, length=0.5), BreakAtTheEnd()]
    options: Any = {"teacher": original(), "steps": 4, "callbacks": callbacks}
    with pytest.warns(CalibrationWarning, match=r"made the loss nan: the weights from before"):
        assert not dynorm.distill_(model, batches(), **options).kept
    assert same(model, before)


def test_an_error_in_the_step_that_sets_the_constants_leaves_compilation_on() -> None:
    model = original()
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), to="annealed")
    data = [*batches(), torch.randn(32, 7)]
    with pytest.raises(DataError):
        dynorm.distill_(
            model, data, teacher=original(), steps=6, callbacks=[AnnealCallback(0.7, 0.1)]
        )
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Pair(NamedTuple):
    x: Tensor
    scale: tuple[np.ndarray[Any, Any]]


class OfPairs(nn.Module):
    """A model whose second argument must stay a tuple of an array."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, scale: tuple[np.ndarray[Any, Any]]) -> Tensor:
        assert isinstance(scale, tuple)
        assert isinstance(scale[0], np.ndarray)
        return self.model(x) * float(scale[0])


@pytest.mark.parametrize("kind", [tuple, Pair._make])
def test_batches_reach_the_model_as_they_are(kind: Callable[[Any], tuple[Any, ...]]) -> None:
    data = [kind((batch, (np.ones(()),))) for batch in batches()]
    report = dynorm.distill_(OfPairs(converted()), data, teacher=OfPairs(original()), steps=4)
    assert report.steps == 4


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_a_run_resumes_from_its_checkpoint_and_another_models_is_refused(tmp_path: Path) -> None:
    done, again = converted(), converted()
    options: Any = {"teacher": original(), "lr": 1e-3, "steps": 10, "checkpoints": tmp_path}
    dynorm.distill_(done, batches(), **options)
    report = dynorm.distill_(again, batches(), **options)
    assert report.steps == report.resumed == 10
    assert "continued from the checkpoint of step 10" in str(report)
    assert same(again, done)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "trainer_state.json").write_text("")
    for changes, words in (
        ({"steps": 12}, "steps is 10"),
        ({"lr": 1.05e-3}, "lr is 0.001"),
        ({"seed": 1}, "seed is 0"),
    ):
        with pytest.raises(StorageError, match=f"of this run, but its {words}, where this run has"):
            dynorm.distill_(converted(), batches(), **(options | changes))
    with pytest.raises(StorageError, match="loss of the first batches"):
        dynorm.distill_(converted(), [2 * batch for batch in batches()], **options)
    with pytest.raises(StorageError, match="checkpoint"):
        dynorm.distill_(converted(24), batches(), **(options | {"teacher": original(24)}))
    options["teacher"] = nn.Sequential(original())
    with pytest.raises(StorageError, match="Unexpected key"):
        dynorm.distill_(nn.Sequential(converted()), batches(), **options)
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match="checkpoint"):
        dynorm.distill_(nn.Sequential(converted()), batches(), **options)
    (tmp_path / "run.json").write_text('{"steps": "a", "lr": 1}')
    with pytest.raises(StorageError, match=r"come with run\.json"):
        dynorm.distill_(nn.Sequential(converted()), batches(), **options)


def test_after_an_error_layers_and_buffers_are_those_from_before() -> None:
    teacher = original()
    teacher.register_buffer("count", torch.zeros(()), persistent=False)

    def count(module: nn.Module, _: object) -> None:
        module.count += 1

    teacher.register_forward_pre_hook(count)
    model = copy.deepcopy(teacher)
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), to="annealed")
    layer = model[1]

    class Finalize(Raise):
        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            dynorm.set_anneal_(model, 1.0)
            layer.set_slope_(20.0)
            dynorm.finalize_(model)
            layer.register_forward_hook(print)

    with pytest.warns(CalibrationWarning, match="no AnnealCallback"), pytest.raises(KeyError):
        dynorm.distill_(model, batches(), teacher=teacher, steps=4, callbacks=[Finalize(KeyError)])
    assert model[1] is layer
    assert layer.position == model.count == teacher.count == len(layer._forward_hooks) == 0


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    model = converted()
    file = tmp_path / "file"
    file.touch()
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ArgumentError, "teacher", {"teacher": None}),
        (ArgumentError, "steps", {"steps": 0}),
        (ArgumentError, "callbacks must be a list of TrainerCallback", {"callbacks": None}),
        (ArgumentError, "callbacks.*make them", {"callbacks": [AnnealCallback]}),
        (ArgumentError, "checkpoints must be a path.*got 3", {"checkpoints": 3}),
        (StorageError, "cannot be written", {"checkpoints": file}),
        (ModelError, "converted already", {"teacher": converted()}),
    ]
    for error, words, options in refused:
        with pytest.raises(error, match=words):
            dynorm.distill_(model, batches(), **({"teacher": original(), "steps": 1} | options))
    with pytest.raises(DataError):
        dynorm.distill_(model, iter(batches()), teacher=original(), steps=9)
    frozen = converted().requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        dynorm.distill_(frozen, batches(), teacher=original(), steps=1)


def test_the_first_step_moves_each_weight_by_a_share_of_its_size() -> None:
    model = converted()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[0].bias.zero_()
    before = copy.deepcopy(model)
    lr = 1e-3
    dynorm.distill_(model, batches(), teacher=original(), steps=1, lr=lr)
    weight = before[0].weight.detach()
    moved = (model[0].weight.detach() - weight).abs().max()
    assert float(moved / weight.square().mean().sqrt()) == pytest.approx(lr, rel=1e-2)
    assert float(model[0].bias.detach().abs().max()) == pytest.approx(0.06 * lr, rel=1e-2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    zero = nn.Parameter(torch.zeros(2, 2))
    module = nn.ParameterList([*frozen.parameters(), zero])
    assert [group["lr"] for group in relative_rates(module, 1.0)] == [0.06]


def test_frozen_weights_stay_as_they_are() -> None:
    model = converted()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    dynorm.distill_(model, batches(), teacher=original(), steps=2)
    assert same(model[0], before[0])
    assert not same(model[1], before[1])


def test_bfloat16_is_not_used_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    model, twin = converted(), converted()
    dynorm.distill_(model, batches(), teacher=original(), steps=2)
    with pytest.warns(CalibrationWarning, match="bfloat16 instructions") as caught:
        dynorm.distill_(twin, batches(), teacher=original(), steps=2, bf16=True)
    assert caught[0].filename == __file__
    assert same(model, twin)


def test_the_rate_falls_to_0() -> None:
    factors = [rate_factor(step, 100) for step in range(101)]
    assert factors[0] > 0
    assert max(factors) == factors[10] == 1
    assert factors[100] == pytest.approx(0, abs=1e-9)


def test_the_loss_on_logits_is_a_divergence_without_padding() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {"attention_mask": mask}
    p, q = theirs.softmax(-1), ours.softmax(-1)
    expected = (p * (p / q).log()).sum(-1)[mask.bool()].mean()
    torch.testing.assert_close(output_loss({"logits": ours}, {"logits": theirs}, batch), expected)
