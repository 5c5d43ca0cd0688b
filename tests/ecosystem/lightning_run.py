"""A model and the lines of the page, for a run of Lightning."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dynorm

START, LENGTH, STEPS = 6, 3, 12


class Anneal(lightning.Callback):
    """Annealing in Lightning; with accumulated gradients the start takes all batches of its step."""

    schedule = dynorm.AnnealSchedule(start=START / STEPS, length=LENGTH / STEPS)
    begun = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        total = int(trainer.estimated_stepping_batches)
        dynorm.set_anneal_(module, self.schedule.at(trainer.global_step, total))
        self.begin, _ = self.schedule.steps(total)
        if trainer.global_step == self.begin and self.begun is None:
            self.begun = dynorm.AnnealStart(module)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if self.begun is not None and trainer.global_step > self.begin:
            self.begun = self.begun.finish_()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self.begun is not None:
            self.begun = self.begun.cancel_()


class Net(lightning.LightningModule):
    """A regression, which writes down where each of its steps stood on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
        dynorm.convert_(self.net, dynorm.find_norms(self.net, torch.randn(4, 8)), to="annealed")
        self.seen: list[tuple[int, float, float]] = []
        self.entered: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        layer = self.net.get_submodule("1")
        assert isinstance(layer, dynorm.layers.AnnealedNorm)
        self.seen.append((self.trainer.global_step, layer.position, float(layer.beta().detach())))
        self.entered.append(self.net[0](batch[0]).detach())
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(dynorm.param_groups(self, lr=1e-2))


def fit(net: Net, x: Tensor, **options: Any) -> None:
    """Train a net to sum its inputs."""
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[Anneal()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, logger=False, **options,
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))
