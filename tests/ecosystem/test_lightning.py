"""The lines for Lightning, in a real run."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dynorm

# What Lightning 2.6 says of torch 2.13, and of a machine of few cores.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]

START, LENGTH, STEPS = 6, 3, 12


class Anneal(lightning.Callback):
    """Annealing in Lightning; with accumulated gradients the start takes all batches of its step."""

    schedule = dynorm.AnnealSchedule(start=START / STEPS, length=LENGTH / STEPS)
    begun = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        total = int(trainer.estimated_stepping_batches)
        self.schedule.apply_(module, trainer.global_step, total)
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


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_lines_of_the_page_do_what_the_callback_of_the_trainer_does(accumulated: int) -> None:
    x = torch.randn(512, 8)
    net = Net()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[Anneal()], accumulate_grad_batches=accumulated,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))

    assert [step for step, *_ in net.seen] == [
        step for step in range(STEPS) for _ in range(accumulated)
    ]
    schedule = dynorm.AnnealSchedule(START / STEPS, LENGTH / STEPS)
    assert [t for _, t, _ in net.seen] == pytest.approx(
        [schedule.at(step, STEPS) for step, *_ in net.seen]
    )
    # As built until the annealing begins; then from the activations of all of that step, to the
    # step that follows.
    assert all(beta == pytest.approx(16.0) for step, _, beta in net.seen if step <= START)
    begun = torch.cat(
        [
            entered
            for (step, *_), entered in zip(net.seen, net.entered, strict=True)
            if step == START
        ]
    )
    found = next(beta for step, _, beta in net.seen if step == START + 1)
    assert len(begun) == 16 * accumulated
    assert found == pytest.approx(expected(begun), rel=1e-4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert type(dynorm.finalize_(net).get_submodule("net.1")) is dynorm.DyISRU


def test_a_step_that_fails_leaves_torch_compile_on_and_the_model_unwatched() -> None:
    class Failing(Net):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if self.trainer.global_step == START:
                raise RuntimeError("out of memory")
            return loss

    net, x = Failing(), torch.randn(512, 8)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[Anneal()], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    before = torch._dynamo.eval_frame._stance
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))
    assert torch._dynamo.eval_frame._stance == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def expected(x: Tensor) -> float:
    """The begin's constant by its formula: the geometric mean of C times the variance of a token's other channels."""
    x, (_, channels) = x.double(), x.shape
    others = torch.stack([x[:, [j for j in range(channels) if j != i]] for i in range(channels)])
    variance = others.var(-1, unbiased=False)
    return float((channels * variance + channels**2 * 1e-5 / (channels - 1)).log().mean().exp())
