"""Parameters of size 0 that DeepSpeed's ZeRO-3 leaves between calls, with its marks: every verb refuses them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ModelError

WORDS = r"'0\.weight'.*placeholder.*deepspeed\.zero\.GatheredParameters\(list\(model\.parameters\(\)\)\):`"
X = torch.linspace(-2, 2, 32).reshape(4, 8)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()


def converted(to: str = "dyisru") -> nn.Sequential:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, X), to)
    dynorm.calibrate_(model, [X])
    if to == "annealed":
        dynorm.set_anneal_(model, 1.0)
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


VERBS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "find_norms": ("", lambda model: dynorm.find_norms(model, X)),
    "convert_": ("", lambda model: dynorm.convert_(model, dynorm.find_norms(build(), X))),
    "calibrate_": ("dyisru", lambda model: dynorm.calibrate_(model, [X])),
    "refine_": ("dyisru", lambda model: dynorm.refine_(model, [X], steps=1)),
    "init_from_batch_": ("dyisru", lambda model: dynorm.init_from_batch_(model, X)),
    "measure": ("dyisru", lambda model: dynorm.measure(model, [X], original=build())),
    "original": ("", lambda original: dynorm.measure(converted(), [X], original=original)),
    "restore_": ("dyisru", dynorm.restore_),
    "save": ("dyisru", lambda model: dynorm.save(model, "nowhere")),
    "load": ("", lambda model: dynorm.load("saved", model)),
    "param_groups": ("dyt", lambda model: dynorm.param_groups(model, lr=1e-3)),
    "finalize_": ("annealed", dynorm.finalize_),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_refuses_them_and_works_when_they_are_gathered(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    to, act = VERBS[verb]
    if verb == "load":
        dynorm.save(converted(), "saved")
    files = list(tmp_path.iterdir())
    model = converted(to) if to else build()
    kinds = [type(module) for module in model]
    values = partitioned(model)
    with pytest.raises(ModelError, match=WORDS):
        act(model)
    assert [type(module) for module in model] == kinds
    assert list(tmp_path.iterdir()) == files
    for parameter, value in values.items():
        parameter.data = value
    act(model)


def test_an_empty_parameter_of_the_model_is_accepted() -> None:
    model = build()
    model.nothing = nn.Parameter(torch.empty(0, 4))
    # ZeRO-3 marks one that is empty as it marks all others.
    model.nothing.ds_id, model.nothing.ds_shape = 0, torch.Size([0, 4])
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    dynorm.convert_(model, dynorm.find_norms(model, X))
    dynorm.calibrate_(model, [X])


def test_an_empty_parameter_of_a_layer_is_refused_without_a_mark_too(tmp_path: Path) -> None:
    """Other tools empty parameters as well: save wrote a tensor of shape (0,)."""
    model = converted()
    model[1].weight.data = torch.empty(0)
    with pytest.raises(ModelError, match=r"'1\.weight' is an empty placeholder"):
        dynorm.save(model, tmp_path / "saved")


def test_the_engine_of_deepspeed_is_named_as_the_wrapper() -> None:
    engine_class = type("DeepSpeedEngine", (nn.Sequential,), {"__module__": "deepspeed.runtime"})
    with pytest.raises(ModelError, match=r"wrapped.*engine\.module"):
        dynorm.find_norms(engine_class(*build()), X)
