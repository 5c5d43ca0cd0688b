"""Muon for the matrices of the blocks and AdamW for all else, as one optimizer that the Trainer can save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates matrices along the nearest orthogonal one, of the size that AdamW's update would have.

    So a rate means about the same for both.

    Args:
        groups: as ``dynorm.param_groups`` gives them.
        embeddings: the matrices that stay with AdamW: their rows are looked up one by one.

    Reference:
        https://kellerjordan.github.io/posts/muon, with the update's size of arXiv 2502.16982.
    """

    def __init__(self, groups: list[dict[str, Any]], embeddings: set[Tensor]) -> None:
        inner, rest = [], []
        for group in groups:
            matrices = [p for p in group["params"] if p.dim() == 2 and p not in embeddings]
            others = [p for p in group["params"] if p.dim() != 2 or p in embeddings]
            inner += [group | {"params": matrices}] if matrices else []
            rest += [group | {"params": others}] if others else []
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(inner, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(rest, fused=True),
        }
        # The very dictionaries of the two: a rate that a schedule writes there is theirs.
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        """Let both make their step."""
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states of both."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
