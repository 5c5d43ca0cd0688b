"""Runs side by side: what a model keeps elsewhere, calls outside of a run, ends in the middle."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ModelError
from dynorm.fit import calibrate
from dynorm.fit.lockstep import PausedRun, stopping_at
from dynorm.replace.converted import dynorm_layers

C = 16


class Keeping(nn.Module):
    """A residual stream that lies in a store while its branch runs."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(C, C) for _ in range(3))
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            self.store["x"] = x
            y = linear(norm(x))
            x = self.store["x"] + y
        return x


class Passing(Keeping):
    """The same model without a store."""

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


def converted(model: nn.Module) -> nn.Module:
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, C)))
    return model


def batches(count: int = 5) -> list[Tensor]:
    torch.manual_seed(3)
    return [(1 + k) * torch.randn(30, C) for k in range(count)]


def betas(model: nn.Module) -> list[float]:
    return [
        float(module.beta().detach().median())
        for module in model.modules()
        if isinstance(module, dynorm.DyISRU)
    ]


def test_a_model_that_keeps_a_batch_runs_batch_after_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch gets what another has left, nor the converted model what the original has left."""
    torch.manual_seed(0)
    keeping = Keeping({})
    passing = Passing({})
    passing.load_state_dict(keeping.state_dict())
    dynorm.calibrate_(converted(keeping), batches())
    monkeypatch.setattr(calibrate, "_RUNS_AT_ONCE", 1)
    dynorm.calibrate_(converted(passing), batches())
    assert betas(keeping) == pytest.approx(betas(passing), rel=1e-5)


def test_a_model_that_keeps_nothing_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = converted(Passing({}))
    runs = []
    fit = calibrate._fit_group

    def counted(group: list[Any], *rest: Any) -> None:
        runs.append(len(group))
        fit(group, *rest)

    monkeypatch.setattr(calibrate, "_fit_group", counted)
    dynorm.calibrate_(model, batches())
    assert runs == [5]


def test_batches_may_be_made_with_the_model_itself() -> None:
    torch.manual_seed(0)
    model = converted(Passing({}))
    with torch.no_grad():
        made = [model(x) for x in batches()]
    other = converted(Passing({}))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        report = dynorm.calibrate_(other, (other(x) for x in batches()))
    dynorm.calibrate_(model, made)
    assert report.batches == 5
    assert betas(other) == pytest.approx(betas(model), rel=1e-5)


class Threaded(nn.Module):
    """A model that computes its branches in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)])

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            first, second = pool.map(lambda norm: norm(x), self.norms)
        return first + second


def test_layers_called_in_a_thread_of_the_model_are_refused_by_the_reason() -> None:
    model = converted(Threaded())
    with pytest.raises(ModelError, match=r"thread.*started"):
        dynorm.calibrate_(model, batches())


class Interrupted(nn.Module):
    """A model during whose run the user presses Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.armed and threading.current_thread() is not threading.main_thread():
            self.armed = False
            # To the process and not to this thread, so that it interrupts the wait of the main one.
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return self.norm(y + x)


def test_ctrl_c_leaves_no_thread_behind() -> None:
    model = converted(Interrupted())
    before = betas(model)
    count = threading.active_count()
    model.armed = True
    with pytest.raises(KeyboardInterrupt):
        dynorm.calibrate_(model, batches())
    assert threading.active_count() == count
    assert betas(model) == before
    assert model.training


class CallsAgain(nn.Module):
    """Calls its norm once more after any exception."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.norm(x)
        except BaseException:
            x = self.norm(x)
        return x


def test_a_model_that_catches_every_exception_can_be_closed() -> None:
    model = CallsAgain()
    x = torch.randn(4, C, generator=torch.Generator().manual_seed(0))
    dynorm.convert_(model, dynorm.find_norms(model, x))
    with stopping_at(dynorm_layers(model).values()):
        run = PausedRun(model, x)
        assert run.call is not None
        # In a thread, so that a run that never ends fails the test.
        closing = threading.Thread(target=run.close, daemon=True)
        closing.start()
        closing.join(timeout=60)
    assert not closing.is_alive()
    assert run.call is None
