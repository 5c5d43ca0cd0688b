"""Input that cannot be sharded or calibrated over ranks: our error on every rank, nothing changed, and no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from tests.parallel.launch import errors, launch, values

# For each case the class and a part of the message, on rank 0 and on rank 1, or on both.
DIFFER = ("ModelError", "those of rank 1 differ from rank 0's")
OTHER = ("DataError", "rank 1 raised an error")
WAYS = ("DataError", "all ranks must reach the same layers in the same order")
REFUSED: dict[str, Any] = {
    "channels_that_two_do_not_divide": (
        "ArgumentError",
        "divisible by the ranks that share them, got 33 for 2 ranks",
    ),
    "a_mesh_of_two_dimensions": ("ArgumentError", "the mesh must have one dimension, got 2"),
    "other_constants": DIFFER,
    "other_weights": DIFFER,
    "other_shapes": DIFFER,
    "a_norm_on_one_rank": [
        ("ModelError", "rank 1 raised an error"),
        ("ModelError", "must be applied to a point-wise layer, got LayerNorm"),
    ],
    "named_twice": ("ModelError", "must not be sharded yet"),
    "annealing_begins_at_other_layers": WAYS,
    "annealing_was_cancelled_on_one_rank": [OTHER, ("ModelError", "this one is over")],
    "annealed_over_channels": ("ModelError", "is at t = 0.5"),
    "annealed_gets_channels": ("ModelError", "is at t = 0"),
    "annealed_with_a_centre_elsewhere": DIFFER,
    "a_layer_that_is_not_sharded": ("ArgumentError", "'log_beta' is a plain tensor"),
    "calibrate_fsdp": ("ModelError", "is sharded: call fully_shard afterwards"),
    "calibrate_dtensors": ("ModelError", "'norm.log_beta' is a DTensor: shard it afterwards"),
    "convert_dtensors": ("ModelError", "'norm.weight' is a DTensor: shard it afterwards"),
    "convert_fsdp": ("ModelError", "is sharded: call fully_shard afterwards"),
    "calibrate_without_batches_on_one": [
        OTHER,
        ("DataError", "must hold at least one batch, got none"),
    ],
    "calibrate_with_nan_on_one": [OTHER, ("DataError", "'blocks.0.norm1' saw NaN")],
    "calibrate_with_an_iterator_that_breaks": [OTHER, ("OSError", "the disk is full")],
    "calibrate_other_models": DIFFER,
    "calibrate_other_ways": WAYS,
    "calibrate_one_more": WAYS,
    "restore_what_is_sharded": ("ModelError", "the original norms must be known"),
    "initialize_with_nan_on_one": ("DataError", "has mean nan"),
    "initialize_with_a_wrong_batch_on_one": [
        OTHER,
        ("DataError", "the model must run on each batch"),
    ],
}
FINE = ("annealed_over_the_sequence", "a_sum_that_is_not_made")


@pytest.mark.slow
def test_every_rank_says_what_is_wrong_and_none_waits(tmp_path: Path) -> None:
    found = launch("bad_cases", 2, tmp_path, *REFUSED, *FINE, "in_step")
    for case, expected in REFUSED.items():
        both = expected if isinstance(expected, list) else [expected] * 2
        for rank, ((kind, message), (wanted, part)) in enumerate(
            zip(errors(found, case), both, strict=True)
        ):
            assert kind == wanted, f"{case} on rank {rank}: {message}"
            assert part in message, f"{case} on rank {rank}"
    for case in FINE:
        assert values(found, case) == [0.0, 0.0], case
    first, second = values(found, "in_step")
    assert first == second


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_model_is_refused() -> None:
    model, x = Model(), torch.randn(2, 4)
    sites = dynorm.find_norms(model, x)
    program = torch.export.export(model, (x,))
    for exported in (program, program.module(), torch.export.unflatten(program)):
        for call in (
            lambda exported=exported: dynorm.convert_(exported, sites),
            lambda exported=exported: dynorm.calibrate_(exported, [x]),
            lambda exported=exported: dynorm.find_norms(exported, x),
        ):
            with pytest.raises(dynorm.errors.ModelError, match=r"exported.*module"):
                call()
    assert isinstance(model.norm, nn.LayerNorm)
