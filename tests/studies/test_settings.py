"""A run's settings: impossible ones are refused at once, and different runs have different names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dynorm.errors import ArgumentError
from studies.arms import ARMS
from studies.settings import Settings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arm": "batchnorm"}, "arm.*layernorm"),
        ({"lr": 0.0}, "learning rate"),
        ({"lr": -1e-3}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"lr": 0.00123456789}, "lr.*digits"),
        ({"constants_rate": 10.0000001}, "constants_rate.*digits"),
        (
            {"arm": "dyisru_annealed", "path_start": 0.5000001},
            "path_start.*digits",
        ),
        ({"steps": 0}, "steps"),
        ({"steps": 50}, "warm-up must end"),
        ({"warmup": -1}, "warm-up must end"),
        ({"seed": -1}, "seed"),
        ({"task": "images"}, "task"),
        ({"model": "bert"}, "model"),
        ({"task": "digits", "model": "gpt2"}, "model"),
        ({"size": "huge"}, "size"),
        ({"task": "digits", "size": "large"}, "size"),
        ({"device": "tpu"}, "device"),
        ({"constants_rate": 0.0}, "constants' rate"),
        ({"arm": "layernorm", "constants_rate": 10.0}, "no constants"),
        ({"arm": "rmsnorm", "center": True}, "no constants"),
        ({"arm": "dyt_published", "warmup_constants": True}, "from a batch"),
        ({"warmup_constants": True, "warmup": 9}, "10 steps or more"),
        ({"share": 0.9}, "has no witnesses"),
        ({"arm": "dyisru_witnesses", "share": 1.0}, "between 0 and 1"),
        ({"optimizer": "sgd"}, "optimizer.*muon"),
        ({"scale_loss": -0.1}, "scale.*negative"),
        ({"scale_loss": float("nan")}, "scale.*negative"),
        ({"scale_loss": 0.1000001}, "scale_loss.*digits"),
        ({"arm": "layernorm", "scale_loss": 0.1}, "leave --scale-loss out"),
        ({"arm": "dyisru_final_norm", "scale_loss": 0.1}, "leave --scale-loss out"),
        ({"arm": "layernorm", "fixed_writers": True}, "leave --fixed-writers out"),
        ({"task": "digits", "fixed_writers": True}, "leave --fixed-writers out"),
        ({"path_start": 0.5}, "is not annealed"),
        (
            {"arm": "dyisru_annealed", "path_start": 0.8},
            "after.*first.*end",
        ),
        (
            {"arm": "dyisru_annealed", "path_length": 0.0},
            "after.*first.*end",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Settings(**{"arm": "dyisru", "lr": 1e-3} | change)


def test_names_differ_where_settings_do() -> None:
    annealed = {"arm": "dyisru_annealed", "lr": 1e-3}
    changes = {
        "arm": "linear_annealed", "lr": 2e-3, "steps": 700, "seed": 1, "model": "llama", "size": "medium",
        "warmup": 50, "constants_rate": 10.0, "center": False, "path_start": 0.5,
        "path_length": 0.2, "device": "cuda", "bf16": True,
        "optimizer": "muon",
    }  # fmt: skip
    several = [Settings(**annealed | {name: value}) for name, value in changes.items()]
    several += [
        Settings(**annealed),
        Settings(**annealed | {"task": "digits"}),
        Settings(**annealed | {"center": True}),
    ]
    several += [Settings("dyisru", 1e-3), Settings("dyisru", 1e-3, warmup_constants=True)]
    several += [
        Settings("dyisru", 1e-3, scale_loss=0.1),
        Settings("dyisru", 1e-3, fixed_writers=True),
    ]
    several += [Settings("dyisru_witnesses", 1e-3), Settings("dyisru_witnesses", 1e-3, share=0.9)]
    assert {field.name for field in fields(Settings)} == {
        *changes, "task", "warmup_constants", "share", "scale_loss", "fixed_writers"
    }  # fmt: skip
    assert len({settings.name for settings in several}) == len(several)


def test_runs_of_a_group_differ_in_rate_and_seed_only() -> None:
    groups = {
        Settings(arm, lr, seed=seed).group
        for arm in ARMS
        for lr in (1e-3, 1.6e-2)
        for seed in (0, 2)
    }
    assert len(groups) == len(ARMS)


def test_settings_come_back_from_their_values() -> None:
    settings = Settings("dyt", 1.25e-4, task="digits", center=True)
    assert Settings(**settings.to_dict()) == settings
