"""Runs side by side: what a model keeps elsewhere, calls outside of a run, ends in the middle."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import DataError, ModelError
from dynorm.fit import calibrate
from dynorm.fit.lockstep import PausedRun, stopping_at
from dynorm.replace.converted import dynorm_layers

C = 16
_outside: dict[str, Tensor] = {}


class Keeping(nn.Module):
    """A residual stream that lies in a store while its branch runs."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(C, C) for _ in range(3))
        self.store = store

    def put(self, x: Tensor) -> None:
        if isinstance(self.store, SimpleNamespace):
            self.store.x = x
        elif isinstance(self.store, list):
            self.store[0] = x
        else:
            self.store["x"] = x

    def taken(self) -> Tensor:
        if isinstance(self.store, SimpleNamespace):
            return self.store.x
        return self.store[0] if isinstance(self.store, list) else self.store["x"]

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            self.put(x)
            y = linear(norm(x))
            x = self.taken() + y
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


@pytest.mark.parametrize("place", ["dict", "list", "object", "outside"])
def test_a_model_that_keeps_a_batch_anywhere_runs_batch_after_batch(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch gets what another has left, nor the converted model what the original has left."""
    stores = {"dict": {}, "list": [None], "object": SimpleNamespace(), "outside": _outside}
    torch.manual_seed(0)
    keeping = Keeping(stores[place])
    passing = Passing(None)
    passing.load_state_dict(keeping.state_dict())
    dynorm.calibrate_(converted(keeping), batches())
    monkeypatch.setattr(calibrate, "_RUNS_AT_ONCE", 1)
    dynorm.calibrate_(converted(passing), batches())
    assert betas(keeping) == pytest.approx(betas(passing), rel=1e-5)


def test_a_model_that_keeps_nothing_runs_side_by_side(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = converted(Passing(None))
    runs = []
    fit = calibrate._Group.fit

    def counted(group: Any, weight: float) -> None:
        runs.append(len(group.runs))
        fit(group, weight)

    monkeypatch.setattr(calibrate._Group, "fit", counted)
    dynorm.calibrate_(model, batches())
    assert runs == [5]


class CallingAtLast(nn.Module):
    """A model that calls a layer in a ``finally``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.first(x)
        finally:
            z = self.second(x)
        return y + z


def test_an_error_ends_runs_that_call_layers_in_a_finally() -> None:
    model = converted(CallingAtLast())
    data = batches()
    data[2][0] = float("nan")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            dynorm.calibrate_(model, data)
        except DataError as error:
            errors.append(error)

    # In a thread, so that a hang fails the test.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert "must be finite" in str(errors[0])


def test_batches_may_be_made_with_the_model_itself() -> None:
    torch.manual_seed(0)
    model = converted(Passing(None))
    with torch.no_grad():
        made = [model(x) for x in batches()]
    other = converted(Passing(None))
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
