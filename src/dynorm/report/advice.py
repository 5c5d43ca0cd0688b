"""The recommendation at the end of a conversion's report: which norms to keep, and whether to train longer."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from dynorm.errors import listed
from dynorm.report.rendering import digits

# A site stands out if its error is this many times the median, and at least this large.
_TIMES = 2.0
_LEAST = 0.1
# The most sites that are named.
_NAMED = 3
# A curve needs this many points to be judged.
_POINTS = 8
# More steps are worth it if the second half of a training brought this share of its whole gain.
_WORTH = 0.1


def about_sites(errors: Mapping[str, float]) -> str:
    """Return a sentence about the sites with the largest errors, or "" if there are too few."""
    if len(errors) < 2:
        return ""
    middle = median(errors.values())
    by_error = sorted(errors, key=lambda path: errors[path], reverse=True)
    worst = []
    for path in by_error[:_NAMED]:
        if errors[path] >= max(_TIMES * middle, _LEAST):
            worst.append(path)
    if not worst:
        path = by_error[0]
        return (
            f"No site stands out: the largest error is {digits(errors[path])}, at {path}, and the "
            f"median {digits(middle)}. Keeping single norms would change little."
        )
    figures = listed([f"{path} ({digits(errors[path])})" for path in worst])
    options = " ".join(f"--skip '{path}'" for path in worst)
    more = "more than twice" if len(worst) == 1 else "each more than twice"
    return (
        f"If you may keep some norms, keep those of the largest errors, {more} the median "
        f"({digits(middle)}): {figures}. In the command: {options}."
    )


def about_steps(stage: Mapping[str, Any]) -> str:
    """Return a sentence about the loss curve of a distillation, or "" if it is too short."""
    losses = stage.get("losses", ())
    if len(losses) < _POINTS or not stage.get("kept", True):
        return ""
    values = [loss for _, loss in losses]
    tenth = max(1, len(values) // 10)
    middle = len(values) // 2
    # A few batches may have a loss far from that of the others.
    first = median(values[:tenth])
    half = median(values[middle - tenth : middle + tenth])
    last = median(values[-tenth:])
    gain = first - last
    before = stage.get("loss_before")
    after = stage.get("loss_after")
    if gain <= 0 and before is not None and after is not None and after < before:
        return (
            f"The loss of the first batches fell from {digits(before)} to {digits(after)}, but the "
            "curve is too uneven to say whether more steps would help."
        )
    if gain <= 0:
        return "The loss of the distillation did not fall: try a lower rate, or more data."
    share = max(half - last, 0.0) / gain
    fall = f"The second half of the distillation brought {share:.0%} of the fall of its loss"
    if share >= _WORTH:
        return f"{fall}, so more steps would probably help."
    return f"{fall}, so more steps would hardly help."
