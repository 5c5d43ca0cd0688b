"""Parameters of size 0 that DeepSpeed's ZeRO-3 leaves between calls, with its marks: every verb refuses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ModelError
from tests.ecosystem.models import gpt2

WORDS = r"'0\.weight'.*placeholder.*deepspeed\.zero\.GatheredParameters\(list\(model\.parameters\(\)\)\):`"
X = torch.linspace(-2, 2, 32).reshape(4, 8)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()


def converted(to: str = "dyisru") -> nn.Sequential:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, X), to)
    dynorm.calibrate_(model, [X])
    return model


def partitioned(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Take the values of all parameters away, as ZeRO-3 does, and return them."""
    values = {}
    for number, parameter in enumerate(model.parameters()):
        values[parameter] = parameter.data
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return values


def gather(values: dict[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.data = value


VERBS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "find_norms": ("", lambda model: dynorm.find_norms(model, X)),
    "convert_": ("", lambda model: dynorm.convert_(model, dynorm.find_norms(build(), X))),
    "convert_model": ("", lambda model: dynorm.convert_model(model, [X, X])),
    "inspect_norms": ("", lambda model: dynorm.inspect_norms(model, [X])),
    "fold_": ("", lambda model: dynorm.fold_(model, X)),
    "calibrate_": ("dyisru", lambda model: dynorm.calibrate_(model, [X])),
    "refine_": ("dyisru", lambda model: dynorm.refine_(model, [X], steps=1)),
    "distill_": ("dyisru", lambda model: dynorm.distill_(model, [X], teacher=build(), steps=1)),
    "teacher": (
        "",
        lambda teacher: dynorm.distill_(converted(), [X], teacher=teacher, steps=1, lr=1e-4),
    ),
    "init_from_batch_": ("dyisru", lambda model: dynorm.init_from_batch_(model, X)),
    "measure": ("dyisru", lambda model: dynorm.measure(model, [X])),
    "original": ("", lambda original: dynorm.measure(converted(), [X], original=original)),
    "restore_": ("dyisru", dynorm.restore_),
    "save": ("dyisru", lambda model: dynorm.save(model, "nowhere")),
    "param_groups": ("dyt", lambda model: dynorm.param_groups(model, lr=1e-3)),
    "finalize_": ("annealed", lambda model: dynorm.finalize_(model, force=True)),
    "AnnealStart": ("annealed", lambda model: dynorm.AnnealStart(model).cancel_()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_refuses_them_and_works_when_they_are_gathered(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    to, act = VERBS[verb]
    model = converted(to) if to else build()
    kinds = [type(module) for module in model]
    values = partitioned(model)
    with pytest.raises(ModelError, match=WORDS):
        act(model)
    assert [type(module) for module in model] == kinds
    assert not any(tmp_path.iterdir())
    if verb not in ("distill_", "fold_"):
        gather(values)
        act(model)


def test_a_load_into_them_is_refused(tmp_path: Path) -> None:
    dynorm.save(converted(), tmp_path / "model")
    model = build()
    values = partitioned(model)
    with pytest.raises(ModelError, match=WORDS):
        dynorm.load(tmp_path / "model", model)
    gather(values)
    assert torch.equal(dynorm.load(tmp_path / "model", model)(X), converted()(X))


def test_the_slope_of_a_layer_that_is_not_there() -> None:
    layer = dynorm.DyISRU(8)
    values = partitioned(layer)
    with pytest.raises(ModelError, match="'log_beta' is a placeholder"):
        layer.set_slope_(3.0)
    gather(values)
    layer.set_slope_(3.0)
    torch.testing.assert_close(layer.beta(), torch.tensor([3.0]))


def test_transformers_writes_what_its_trainer_has_gathered_only(tmp_path: Path) -> None:
    model = gpt2()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    partitioned(model)
    for write in (
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: dynorm.save(model, tmp_path / "model"),
    ):
        with pytest.raises(ModelError, match=r"placeholder.*DeepSpeed's"):
            write()
    model.save_pretrained(tmp_path / "model", state_dict=state)
    loaded = dynorm.load(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_an_empty_parameter_without_marks_is_accepted(tmp_path: Path) -> None:
    class WithEmpty(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*build())
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.none = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            for module in (self[0], self[1], self[2]):
                x = module(x)
            return x

    model = WithEmpty().eval()
    # ZeRO-3 marks one that is empty as it marks all others.
    model.none.ds_id, model.none.ds_shape = 0, torch.Size([0])
    dynorm.convert_(model, dynorm.find_norms(model, X))
    dynorm.calibrate_(model, [X])
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model", WithEmpty())
    assert loaded.nothing.shape == (0, 4)
    assert torch.equal(loaded(X), model(X))


def test_the_engine_of_deepspeed_is_named_as_the_wrapper() -> None:
    engine_class = type("DeepSpeedEngine", (nn.Sequential,), {"__module__": "deepspeed.runtime"})
    with pytest.raises(ModelError, match=r"wrapped.*engine\.module"):
        dynorm.find_norms(engine_class(*build()), X)


def test_an_empty_parameter_of_a_layer_is_refused_without_a_mark_too(tmp_path: Path) -> None:
    """Other tools empty parameters as well: save wrote a tensor of shape (0,)."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
    dynorm.calibrate_(model, [torch.randn(64, 8)])
    model[1].weight.data = torch.empty(0)
    with pytest.raises(dynorm.errors.ModelError, match=r"'1\.weight' is empty"):
        dynorm.save(model, tmp_path / "saved")
