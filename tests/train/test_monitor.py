"""The monitor: its figures against plain computations, its warning, and its road to the Trainer's reports."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm


def watched(layer: nn.Module, x: Tensor) -> dict[str, float]:
    with dynorm.Monitor(nn.Sequential(layer)) as monitor:
        layer(x)
        return monitor.read()


class TestMonitor:
    @pytest.mark.parametrize(
        ("make", "witnesses"),
        [
            (dynorm.DyISRU, 0),
            (dynorm.DyISRU, 2),
            (dynorm.DyT, 0),
            (dynorm.Derf, 0),
            (dynorm.LinearControl, 0),
        ],
    )
    def test_figures_are_those_of_a_plain_computation(self, make: Any, witnesses: int) -> None:
        torch.manual_seed(0)
        layer = make(6, scale=6**0.5, witnesses=witnesses)
        with torch.no_grad():
            layer.set_slope_(4.0)
            layer.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, 0.0]))
            layer.bias.copy_(torch.arange(6.0))
        x = 5 * torch.randn(3, 40, 6)
        found = watched(layer, x)
        bare = make(6, elementwise_affine=False, scale=1.0, witnesses=witnesses)
        bare.set_slope_(4.0)
        wanted = (bare(x)[..., :5].abs() > 0.95).float().mean() * 5 / 6
        assert found["saturated/0"] == pytest.approx(float(wanted), abs=1e-6)
        assert found["size/0"] == pytest.approx(float(x.square().mean().sqrt()), rel=1e-6)
        assert found["beta/0"] == pytest.approx(4.0, rel=1e-5)
        assert found["drift/0"] == 1.0

    @pytest.mark.filterwarnings("ignore:the layer '' saturates")
    def test_drift_is_from_the_start_and_figures_are_since_the_last_call(self) -> None:
        layer = dynorm.DyISRU(4)
        with dynorm.Monitor(layer) as monitor:
            for beta, inputs in ((4.0, (1.0, 3.0)), (8.0, (10.0,))):
                layer.set_slope_(beta)
                for value in inputs:
                    layer(torch.full((2, 4), value))
                found = monitor.read()
            pickle.loads(pickle.dumps(layer))
            assert found == pytest.approx(
                {"saturated/": 1.0, "size/": 10.0, "beta/": 8.0, "drift/": 2.0}, rel=1e-5
            )
            assert monitor.read() == {}
            layer.eval()(torch.ones(2, 4))
            assert monitor.read() == {}
        layer.train()(torch.ones(2, 4))
        assert monitor.read() == {}
        assert not layer._forward_hooks

    def test_many_tokens_are_sampled_evenly(self) -> None:
        x = torch.randn(7000, 4, generator=torch.Generator().manual_seed(0))
        assert watched(dynorm.DyISRU(4), x)["size/0"] == pytest.approx(1.0, rel=0.05)

    @pytest.mark.parametrize(
        ("first", "beta", "remedy"),
        [
            (100.0, 4.0, r"size 100, and sqrt\(beta\) is 2\. .*init_from_batch_"),
            (2.0, 4.0, r"50-fold, and sqrt\(beta\) 1-fold: .*param_groups, lower"),
            (4.0, 400.0, r"25-fold, and sqrt\(beta\) 10-fold: .*param_groups, lower"),
        ],
    )
    def test_it_warns_once_and_names_the_remedy_that_fits(
        self, first: float, beta: float, remedy: str
    ) -> None:
        layer = dynorm.DyISRU(4)
        with dynorm.Monitor(nn.Sequential(layer)) as monitor:
            if first < 100:
                layer(torch.full((2, 4), first))
                monitor.read()
            layer.set_slope_(beta)
            layer(torch.full((2, 4), 100.0))
            kind = dynorm.errors.CalibrationWarning
            with pytest.warns(kind, match=rf"'0' saturates: 100%.*{remedy}"):
                monitor.read()
            layer(torch.full((2, 4), 100.0))
            monitor.read()

    def test_a_model_without_layers(self) -> None:
        with pytest.raises(dynorm.errors.ModelError, match=r"point-wise.*layers"):
            dynorm.Monitor(nn.LayerNorm(4))
        with pytest.raises(dynorm.errors.ArgumentError, match=r"torch\.nn\.Module.*str"):
            dynorm.Monitor("a")  # type: ignore[arg-type]

    def test_channels_first(self) -> None:
        layer = dynorm.DyISRU(4, dim=1)
        found = watched(layer, 2 * torch.ones(2, 4, 5))
        assert found["size/0"] == pytest.approx(2.0)
        assert found["saturated/0"] == float(2 / math.sqrt(4 + 4) > 0.95)

    def test_a_call_by_keyword_and_one_without_tokens(self) -> None:
        layer = dynorm.DyISRU(4)
        with dynorm.Monitor(nn.Sequential(layer)) as monitor:
            layer(x=2 * torch.ones(3, 4))
            layer(torch.ones(0, 4))
            assert monitor.read()["size/0"] == 2.0


class TestCallback:
    def test_the_figures_reach_the_history_and_the_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        transformers = pytest.importorskip("transformers")
        callbacks = pytest.importorskip("dynorm.train.callbacks")
        torch.manual_seed(0)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.norm = nn.Linear(4, 8), dynorm.DyISRU(8)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"loss": self.norm(100 * self.first(x)).mean()}

        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", dataloader_pin_memory=False, per_device_train_batch_size=2,
        )  # fmt: skip
        data = [{"x": torch.ones(4)}] * 8
        monitor = callbacks.MonitorCallback()
        trainer = transformers.Trainer(Net(), arguments, train_dataset=data, callbacks=[monitor])
        kind = dynorm.errors.CalibrationWarning
        with pytest.warns(kind, match="'norm' saturates"):
            trainer.train()
        names = {f"{name}/norm" for name in ("saturated", "size", "beta", "drift")}
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [names <= set(entry) for entry in entries] == [True, True]
        assert entries[1]["drift/norm"] != entries[0]["drift/norm"]
        assert not trainer.model.norm._forward_hooks
        lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
        assert ["saturated" in line for line in lines] == [True, True]


def test_a_monitor_that_is_attached_lets_a_restored_norm_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    before = model(x)
    dynorm.convert_(model, dynorm.find_norms(model, x), to="annealed")
    with dynorm.Monitor(model) as monitor:
        dynorm.restore_(model)
        assert torch.equal(model(x), before)
        assert monitor.read() == {}
