"""How general the paper's claim is, in words made from the figures of the study."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dynorm.paper.generality import STEP, Generality, Study

__all__ = ["verdict"]


def verdict(generality: Generality) -> str:
    """State in a paragraph in how many samples DyISRU is nearer to LayerNorm than DyT, and where it is not.

    Args:
        generality: What :func:`dynorm.paper.generality.study_all` returns.

    Returns:
        Plain text in one line; every number comes from the study.

    Example:
        >>> from dynorm.paper.generality import study_all
        >>> verdict(study_all(samples=20))[:72]
        'At C = 100, sigma = 2 and mean 0, DyISRU is nearer to LayerNorm in 20 of'
    """
    sentences = [
        _base(generality.base),
        _axis("C", generality.over_channels, lambda study: f"{study.channels:,}"),
        _axis("sigma", generality.over_sigma, lambda study: f"{study.sigma:g}"),
        _axis("the mean", generality.over_mean, lambda study: f"{study.mean / study.sigma:g} sigma"),
        _reach(generality),
        _cause(generality.base),
        _closed(generality),
        _skipped(generality),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _base(base: Study) -> str:
    wins = len(base.seeds) - _wins(base)
    dyisru, dyt = base.residuals["DyISRU"], base.residuals["DyT"]
    seed, ratio = base.closest
    return (
        f"At C = {base.channels:,}, sigma = {base.sigma:g} and mean {base.mean:g}, DyISRU is nearer to LayerNorm in "
        f"{wins:,} of {len(base.seeds):,} samples: its mean absolute residual has the median {np.median(dyisru):.2g} "
        f"(5 to 95 %: {_middle(dyisru)}), DyT's {np.median(dyt):.2g} ({_middle(dyt)}). "
        f"DyT does best with seed {seed}, where its residual is {ratio:.2g} times DyISRU's. DyISRU's is below 0.01, "
        f"as the paper's, in {100 * base.below_paper:.1f} % of the samples, and {dyisru.max():.2g} at most."
    )


def _axis(name: str, studies: Sequence[Study], place: Callable[[Study], str]) -> str:
    lost = [f"{_wins(study):,} of {len(study.seeds):,} at {place(study)}" for study in studies if _wins(study)]
    where = f"DyT wins in {_joined(lost)}" if lost else "DyT never wins"
    nowhere_else = ", and nowhere else" if lost and len(lost) < len(studies) else ""
    return f"Over {name} from {place(studies[0])} to {place(studies[-1])} {where}{nowhere_else}."


def _reach(generality: Generality) -> str:
    """Return the settings around the base in which DyT wins no sample, and whether the search ended there."""
    if _wins(generality.base) or any(_wins(study) for study in generality.over_channels):
        return ""
    sigmas = _until_lost(generality.over_sigma)
    left = _until_lost([study for study in reversed(generality.over_mean) if study.mean <= 0])
    right = _until_lost([study for study in generality.over_mean if study.mean >= 0])
    if not sigmas:
        return ""
    step = f"a step of the outlier is at least {STEP / sigmas[-1].sigma:.3g} sigma"
    if sigmas[-1] is generality.over_sigma[-1]:
        step = "the steps of the outlier are among those looked at"
    low = _bound("not below", left, generality.over_mean[0])
    high = _bound("not above", right, generality.over_mean[-1])
    ends = " and ".join(end for end in (low, high) if end)
    mean = f"the mean is {ends}" if ends else "the mean is among those looked at"
    return f"So, one thing changed at a time, DyISRU wins every sample as long as {step}, and as long as {mean}."


def _bound(words: str, kept: Sequence[Study], last: Study) -> str:
    """Return the last setting that is not lost, where one beyond it is."""
    return "" if kept[-1] is last else f"{words} {kept[-1].mean / kept[-1].sigma:g} sigma"


def _cause(base: Study) -> str:
    if len(base.seeds) < 3:
        return ""
    correlation = np.corrcoef(np.abs(base.centers), base.residuals["DyISRU"])[0, 1]
    if correlation < 0.9:
        return ""
    return (
        "What DyISRU misses is the centre m_o, which eq. 15 leaves out: over the samples its residual and |m_o| "
        f"correlate with r = {correlation:.2f}."
    )


def _closed(generality: Generality) -> str:
    largest = max(study.closed_residuals.max() for studies in generality.axes.values() for study in studies)
    return (
        f"With m_o and C v_o in place of 0 and beta, the closed form needs no fit and misses by {largest:.1e} at most."
    )


def _skipped(generality: Generality) -> str:
    # The base setting is on every axis.
    every = {(s.channels, s.sigma, s.mean): s.skipped for studies in generality.axes.values() for s in studies}
    skipped = sum(every.values())
    if not skipped:
        return ""
    return (
        f"{skipped:,} samples were left out: after its first step their outlier is still negative, and no function "
        "through 0 can be fitted."
    )


def _until_lost(studies: Sequence[Study]) -> list[Study]:
    kept: list[Study] = []
    for study in studies:
        if _wins(study):
            break
        kept.append(study)
    return kept


def _wins(study: Study) -> int:
    return round(study.dyt_wins * len(study.seeds))


def _middle(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    low, high = np.quantile(values, (0.05, 0.95))
    return f"{low:.2g} to {high:.2g}"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
