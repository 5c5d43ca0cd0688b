"""The launcher itself: a worker that a signal ends is launched again once, and the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import launch, values


def test_a_signal_gives_one_more_launch_and_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)died by SIGABRT.*dies_the_first_time"):
        found = launch("launch_cases", 2, tmp_path, "dies_the_first_time")
    assert values(found, "dies_the_first_time") == ["done", "done"]


def test_a_second_signal_fails(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="died by SIGABRT"),
        pytest.raises(AssertionError, match="dies_every_time"),
    ):
        launch("launch_cases", 2, tmp_path, "dies_every_time")


def test_an_exit_code_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="by peer"):
        launch("launch_cases", 2, tmp_path, "leaves_once")
