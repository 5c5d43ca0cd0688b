"""Paused runs: they can be ended wherever they are."""

from threading import Thread

import torch
from torch import Tensor, nn

import dynorm
from dynorm.fit.lockstep import PausedRun, stopping_at
from dynorm.replace.converted import dynorm_layers


class CallsAgain(nn.Module):
    """Calls its norm once more after any exception."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.norm(x)
        except BaseException:
            x = self.norm(x)
        return x


def test_a_model_that_catches_every_exception_can_be_closed() -> None:
    model = CallsAgain()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    dynorm.convert_(model, dynorm.find_norms(model, x))
    with stopping_at(dynorm_layers(model).values()):
        run = PausedRun(model, x)
        assert run.call is not None
        # In a thread, so that a run that never ends fails the test.
        closing = Thread(target=run.close, daemon=True)
        closing.start()
        closing.join(timeout=60)
    assert not closing.is_alive()
    assert run.call is None
