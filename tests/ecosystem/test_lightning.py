"""The lines for Lightning, in a real run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dynorm

# What Lightning 2.6 says of torch 2.13, and of a machine of few cores.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_lines_of_the_page_do_what_the_callback_of_the_trainer_does(accumulated: int) -> None:
    # Its import takes seconds, in each process that collects the tests.
    from tests.ecosystem.lightning_run import LENGTH, START, STEPS, Net, fit

    x = torch.randn(512, 8)
    net = Net()
    fit(net, x, accumulate_grad_batches=accumulated)

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
    expected = dynorm.theory.leave_one_out_beta(begun.double(), eps=1e-5).log().mean().exp()
    assert found == pytest.approx(float(expected), rel=1e-4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert type(dynorm.finalize_(net).get_submodule("net.1")) is dynorm.DyISRU


def test_a_step_that_fails_leaves_torch_compile_on_and_the_model_unwatched() -> None:
    from tests.ecosystem.lightning_run import START, Net, fit

    class Failing(Net):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if self.trainer.global_step == START:
                raise RuntimeError("out of memory")
            return loss

    net, x = Failing(), torch.randn(512, 8)
    before = torch._dynamo.eval_frame._stance
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(net, x)
    assert torch._dynamo.eval_frame._stance == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
