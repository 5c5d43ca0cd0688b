"""The numbers behind the figures: as a document for JSON, as rows for CSV, printed, and in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dynorm.paper.generality import PAPER, STEP, Generality, Reproduction, Study
from dynorm.paper.simulation import Array, channel_betas
from dynorm.table import Column, Table

CLOSED = "closed form"


def document(reproduction: Reproduction) -> dict[str, Any]:
    """Return every number as plain lists and dictionaries, which ``json.dumps`` accepts.

    Example:
        >>> from dynorm.paper.generality import reproduce
        >>> round(document(reproduce())["fits"]["DyISRU"]["beta"], 2)
        301.06
    """
    simulation = reproduction.simulation
    functions = {
        name: {
            constant: value,
            "mean_absolute_residual": _mean(residuals),
            "outputs": (residuals + simulation.outputs).tolist(),
            "residuals": residuals.tolist(),
        }
        for name, constant, value, residuals in _functions(reproduction)
    }
    closed = {"center": reproduction.closed.center, **functions.pop(CLOSED)}
    found: dict[str, Any] = {
        "simulation": {
            **{name: getattr(simulation, name) for name in ("channels", "sigma", "mean", "seed", "step", "steps")},
            "outliers": simulation.outliers.tolist(),
            "layer_norm": simulation.outputs.tolist(),
        },
        "fits": functions,
        "closed_form": closed,
        "channel_betas": channel_betas(simulation).tolist(),
        "paper": {name: {"constant": text, "mean_absolute_residual": mean} for name, (text, mean) in PAPER.items()},
    }
    if reproduction.generality is not None:
        found["generality"] = {**reproduction.generality.to_dict(), "verdict": verdict(reproduction.generality)}
    return found


def outliers_csv(reproduction: Reproduction) -> str:
    """Return one row per function and outlier: its constant, its mean absolute residual, and the output there.

    Example:
        >>> from dynorm.paper.generality import reproduce
        >>> outliers_csv(reproduce()).splitlines()[0]
        'function,constant,value,mean_absolute_residual,S,x,layer_norm,output,residual'
    """
    simulation, rows = reproduction.simulation, []
    for name, constant, value, residuals in _functions(reproduction):
        numbers = zip(simulation.outliers, simulation.outputs, residuals + simulation.outputs, residuals, strict=True)
        mean = _mean(residuals)
        rows += [[name, constant, value, mean, s, *map(float, row)] for s, row in enumerate(numbers, start=1)]
    header = ["function", "constant", "value", "mean_absolute_residual", "S", "x", "layer_norm", "output", "residual"]
    return _csv(header, rows)


def generality_csv(generality: Generality) -> str:
    """Return a row for each setting and function: the distribution of its mean absolute residual.

    Example:
        >>> from dynorm.paper.generality import study_all
        >>> generality_csv(study_all(samples=5)).splitlines()[0]
        'axis,channels,sigma,mean,samples,function,min,p5,median,p95,max,best,dyt_wins'
    """
    rows = []
    for axis, study in _settings(generality):
        found = study.to_dict()
        setting = [axis, study.channels, study.sigma, study.mean, len(study.seeds)]
        rows += [
            [*setting, name, *spread.values(), found["best"][name], study.dyt_wins]
            for name, spread in found["residuals"].items()
        ]
    header = ["axis", "channels", "sigma", "mean", "samples", "function"]
    return _csv([*header, "min", "p5", "median", "p95", "max", "best", "dyt_wins"], rows)


def samples_csv(base: Study) -> str:
    """Return a row for each sample of one setting: its seed, the residuals, beta and what the closed form has for it.

    Example:
        >>> from dynorm.paper.generality import study
        >>> samples_csv(study(samples=5)).splitlines()[0]
        'seed,DyT,Derf,DyISRU,linear,closed form,beta,C v_o,m_o'
    """
    columns = [base.seeds, *base.residuals.values(), base.closed_residuals, base.betas, base.closed_betas, base.centers]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return _csv(["seed", *base.residuals, CLOSED, "beta", "C v_o", "m_o"], rows)


def printed(reproduction: Reproduction) -> Iterator[str]:
    """Yield what the terminal shows, part by part.

    Example:
        >>> from dynorm.paper.generality import reproduce
        >>> len(list(printed(reproduce())))
        4
    """
    simulation = reproduction.simulation
    title = f"C = {simulation.channels}, sigma = {simulation.sigma:g}, mean {simulation.mean:g}, seed {simulation.seed}"
    mean = Column("mean |residual|", lambda value: f"{value:.6g}" if value > 1e-9 else f"{value:.2g}")
    # The paper gives figures for one setting only.
    paper = PAPER if (simulation.channels, simulation.sigma) == (100, 2.0) else {}
    rows, columns = [], {}
    for name, constant, value, residuals in _functions(reproduction):
        columns[name] = residuals
        named = f"{constant} = C v_o" if name == CLOSED else constant
        printed_value, printed_mean = paper.get(name, ("", ""))
        rows.append((name, named, value, printed_value, _mean(residuals), printed_mean))
    yield f"{Table(['function', 'constant', Column('value', '.8g'), 'paper', mean, 'paper'], rows, title=title)}\n"
    x, y = simulation.outliers, simulation.outputs
    yield _outlier_table("outputs", x, {"LayerNorm": y} | {name: r + y for name, r in columns.items()}, ".4f")
    yield _outlier_table("residuals (function - LayerNorm)", x, columns, ".2g")
    betas = " or ".join(dict.fromkeys(f"{beta:.6g}" for beta in channel_betas(simulation)))
    yield (
        f"The closed form needs no fit: its centre is m_o = {reproduction.closed.center:.4g}, its beta "
        f"C v_o = {reproduction.closed.beta:.6g}. Eq. 14's beta of the outlier's channel is {betas} at every step.\n"
    )
    if reproduction.generality is not None:
        yield _generality_table(reproduction.generality)
        yield verdict(reproduction.generality)


def _outlier_table(title: str, x: Array, columns: Mapping[str, Array], form: str) -> str:
    head: list[str | Column] = ["S", Column("x_o", ".2f"), *(Column(name, form) for name in columns)]
    rows = list(zip(range(1, len(x) + 1), x, *columns.values(), strict=True))
    return f"{Table(head, rows, title=title)}\n"


def _generality_table(generality: Generality) -> str:
    names, shares = ("DyT", "DyISRU"), {"5 %": 0.05, "50 %": 0.5, "95 %": 0.95}
    rows = []
    for axis, study in _settings(generality):
        spreads = np.quantile([study.residuals[name] for name in names], list(shares.values()), axis=1)
        values = {"channels": f"C {study.channels}", "sigma": f"sigma {study.sigma:g}"}
        named = values.get(axis, f"mean {study.mean / study.sigma:g} sigma")
        named = f"C {study.channels}, sigma {study.sigma:g}" if axis == "base" else named
        rows.append((named, *spreads.T.flat, study.dyt_wins))
    columns = [Column(share, ".2g", group=name) for name in names for share in shares]
    title = f"mean |residual| over {len(generality.base.seeds):,} samples per setting: quantiles"
    wins = Column("DyT wins", lambda share: f"{100 * share:.3g}%")
    return f"{Table(['setting', *columns, wins], rows, title=title)}\n"


def _settings(generality: Generality) -> Iterator[tuple[str, Study]]:
    yield "base", generality.base
    for axis, studies in generality.axes.items():
        yield from ((axis, study) for study in studies)


def _functions(reproduction: Reproduction) -> Iterator[tuple[str, str, float, Array]]:
    """Yield each function's name, with its constant's name and value and its residuals; the closed form is the last."""
    for name, fit in reproduction.fits.items():
        yield name, fit.constant, fit.value, fit.residuals
    yield CLOSED, "beta", reproduction.closed.beta, reproduction.closed.residuals


def _mean(residuals: Array) -> float:
    return float(np.abs(residuals).mean())


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def verdict(generality: Generality) -> str:
    """State in a paragraph in how many samples DyISRU is nearer to LayerNorm than DyT, and where it is not.

    It is plain text in one line; every number comes from the study.

    Example:
        >>> from dynorm.paper.generality import study_all
        >>> verdict(study_all(samples=20))[:72]
        'At C = 100, sigma = 2 and mean 0, DyISRU is nearer to LayerNorm in 20 of'
    """
    base = generality.base
    wins, (seed, ratio) = len(base.seeds) - _wins(base), base.closest
    dyisru, dyt = base.residuals["DyISRU"], base.residuals["DyT"]
    middles = []
    for residuals in (dyisru, dyt):
        low, high = np.quantile(residuals, (0.05, 0.95))
        middles.append(f"{low:.2g} to {high:.2g}")
    sentences = [
        f"At C = {base.channels:,}, sigma = {base.sigma:g} and mean {base.mean:g}, DyISRU is nearer to LayerNorm in "
        f"{wins:,} of {len(base.seeds):,} samples: its mean absolute residual has the median {np.median(dyisru):.2g} "
        f"(5 to 95 %: {middles[0]}), DyT's {np.median(dyt):.2g} ({middles[1]}). "
        f"DyT does best with seed {seed}, where its residual is {ratio:.2g} times DyISRU's. DyISRU's is below 0.01, "
        f"as the paper's, in {100 * base.below_paper:.1f} % of the samples, and {dyisru.max():.2g} at most.",
        _axis("C", generality.over_channels, lambda study: f"{study.channels:,}"),
        _axis("sigma", generality.over_sigma, lambda study: f"{study.sigma:g}"),
        _axis("the mean", generality.over_mean, lambda study: f"{study.mean / study.sigma:g} sigma"),
        _reach(generality),
    ]
    correlation = np.corrcoef(np.abs(base.centers), dyisru)[0, 1] if len(base.seeds) > 2 else 0.0
    if correlation >= 0.9:
        sentences.append(
            "What DyISRU misses is the centre m_o, which eq. 15 leaves out: over the samples its residual and |m_o| "
            f"correlate with r = {correlation:.2f}."
        )
    every = [study for studies in generality.axes.values() for study in studies]
    largest = max(study.closed_residuals.max() for study in every)
    sentences.append(
        f"With m_o and C v_o in place of 0 and beta, the closed form needs no fit and misses by {largest:.1e} at most."
    )
    # The base setting is on every axis, and counts once.
    skipped = sum({(study.channels, study.sigma, study.mean): study.skipped for study in every}.values())
    if skipped:
        sentences.append(
            f"{skipped:,} samples were left out: after its first step their outlier is still negative, and no function "
            "through 0 can be fitted."
        )
    return " ".join(sentence for sentence in sentences if sentence)


def _axis(name: str, studies: Sequence[Study], place: Callable[[Study], str]) -> str:
    lost = [f"{_wins(study):,} of {len(study.seeds):,} at {place(study)}" for study in studies if _wins(study)]
    joined = lost[0] if len(lost) == 1 else f"{', '.join(lost[:-1])} and {lost[-1]}" if lost else ""
    where = f"DyT wins in {joined}" if lost else "DyT never wins"
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
    bounds = [("not below", left[-1], generality.over_mean[0]), ("not above", right[-1], generality.over_mean[-1])]
    ends = [f"{words} {kept.mean / kept.sigma:g} sigma" for words, kept, last in bounds if kept is not last]
    mean = f"the mean is {' and '.join(ends) or 'among those looked at'}"
    return f"So, one thing changed at a time, DyISRU wins every sample as long as {step}, and as long as {mean}."


def _until_lost(studies: Sequence[Study]) -> list[Study]:
    kept: list[Study] = []
    for study in studies:
        if _wins(study):
            break
        kept.append(study)
    return kept


def _wins(study: Study) -> int:
    return round(study.dyt_wins * len(study.seeds))
