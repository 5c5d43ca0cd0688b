"""The recommendation at the end of a report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynorm.report.advice import advice


def report(errors: list[float], losses: list[float] | None = None, kept: bool = True) -> Any:
    sites = [SimpleNamespace(path=f"norm{n}", error_now=error) for n, error in enumerate(errors)]
    stage = {"losses": list(enumerate(losses or [])), "kept": kept}
    return SimpleNamespace(sites=sites, meta={"stages": {"distill": stage}})


def test_sites_that_stand_out_are_to_be_kept() -> None:
    [sentence] = advice(report([0.1, 0.12, 0.1, 0.44, 0.09, 0.3]))
    assert "norm3 (0.440), norm5 (0.300)" in sentence
    assert sentence.endswith("--skip 'norm3' --skip 'norm5'.")
    [sentence] = advice(report([0.1, 0.12, 0.15]))
    assert (
        "No site stands out: the largest error is 0.150, at norm2, and the median 0.120" in sentence
    )
    # Small errors do not matter, however different they are.
    assert "No site stands out" in advice(report([0.01, 0.01, 0.09]))[0]
    assert advice(report([0.1])) == []


def test_a_few_hard_batches_do_not_hide_the_fall_of_the_loss() -> None:
    # Single batches are far off, as the last of a small data set that comes again in each pass.
    losses = [1.0 - 0.01 * n for n in range(60)]
    losses[56] += 6.0
    [sentence] = advice(report([], losses))
    assert "more steps would probably help" in sentence
    uneven = report([], [0.1 * n for n in range(20)])
    uneven.meta["stages"]["distill"] |= {"loss_before": -0.336, "loss_after": -0.392}
    [sentence] = advice(uneven)
    assert "fell from −0.336 to −0.392" in sentence
    assert "too uneven" in sentence
    uneven.meta["stages"]["distill"]["loss_after"] = -0.3
    assert "did not fall" in advice(uneven)[0]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([-0.1 * n for n in range(20)], "more steps would probably help"),
        ([1 / 2**n for n in range(20)], "more steps would hardly help"),
        ([0.1 * n for n in range(20)], "did not fall"),
    ],
)
def test_the_curve_says_whether_more_steps_would_help(losses: list[float], words: str) -> None:
    [sentence] = advice(report([], losses))
    assert words in sentence
    assert advice(report([], losses[:5])) == []
    assert advice(report([], losses, kept=False)) == []
