"""The recommendation at the end of a report."""

from __future__ import annotations

from typing import Any

import pytest

from dynorm.report.advice import about_sites, about_steps


def errors(values: list[float]) -> dict[str, float]:
    return {f"norm{n}": value for n, value in enumerate(values)}


def stage(losses: list[float], kept: bool = True) -> dict[str, Any]:
    return {"losses": list(enumerate(losses)), "kept": kept}


def test_sites_that_stand_out_are_to_be_kept() -> None:
    sentence = about_sites(errors([0.1, 0.12, 0.1, 0.44, 0.09, 0.3]))
    assert "norm3 (0.440), norm5 (0.300)" in sentence
    assert sentence.endswith("--skip 'norm3' --skip 'norm5'.")
    sentence = about_sites(errors([0.1, 0.12, 0.15]))
    assert (
        "No site stands out: the largest error is 0.150, at norm2, and the median 0.120" in sentence
    )
    # Small errors do not matter, however different they are.
    assert "No site stands out" in about_sites(errors([0.01, 0.01, 0.09]))
    assert about_sites(errors([0.1])) == ""


def test_a_few_hard_batches_do_not_hide_the_fall_of_the_loss() -> None:
    # Single batches are far off, as the last of a small data set that comes again in each pass.
    losses = [1.0 - 0.01 * n for n in range(60)]
    losses[56] += 6.0
    sentence = about_steps(stage(losses))
    assert "more steps would probably help" in sentence
    uneven = stage([0.1 * n for n in range(20)])
    uneven |= {"loss_before": -0.336, "loss_after": -0.392}
    sentence = about_steps(uneven)
    assert "fell from −0.336 to −0.392" in sentence
    assert "too uneven" in sentence
    uneven["loss_after"] = -0.3
    assert "did not fall" in about_steps(uneven)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([-0.1 * n for n in range(20)], "more steps would probably help"),
        ([1 / 2**n for n in range(20)], "more steps would hardly help"),
        ([0.1 * n for n in range(20)], "did not fall"),
    ],
)
def test_the_curve_says_whether_more_steps_would_help(losses: list[float], words: str) -> None:
    sentence = about_steps(stage(losses))
    assert words in sentence
    assert about_steps(stage(losses[:5])) == ""
    assert about_steps(stage(losses, kept=False)) == ""
