"""The numbers behind the figures: as a document for JSON, as rows for CSV, printed, and in words."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from dynorm.paper.fits import CLOSED
from dynorm.paper.generality import PAPER, Generality, Reproduction, Study
from dynorm.paper.simulation import STEP, STEPS, Array, channel_betas
from dynorm.report.page import rendered
from dynorm.table import Column, Table


def document(reproduction: Reproduction) -> dict[str, Any]:
    """Return what was found as plain lists and dictionaries, which ``json.dumps`` accepts."""
    simulation = reproduction.simulation
    functions = {
        fit.name: {
            fit.constant: fit.value,
            "mean_absolute_residual": fit.mean_absolute_residual,
            "outputs": (fit.residuals + simulation.outputs).tolist(),
            "residuals": fit.residuals.tolist(),
        }
        for fit in reproduction.fits.values()
    }
    closed = {"center": reproduction.fits[CLOSED].center, **functions.pop(CLOSED)}
    found: dict[str, Any] = {
        "simulation": {
            **{name: getattr(simulation, name) for name in ("channels", "sigma", "mean", "seed")},
            "step": STEP,
            "steps": STEPS,
            "outliers": simulation.outliers.tolist(),
            "layer_norm": simulation.outputs.tolist(),
        },
        "fits": functions,
        "closed_form": closed,
        "channel_betas": channel_betas(simulation).tolist(),
        "paper": {
            name: {"constant": text, "mean_absolute_residual": mean}
            for name, (text, mean) in PAPER.items()
        },
    }
    if reproduction.generality is not None:
        found["generality"] = {
            **reproduction.generality.to_dict(),
            "verdict": verdict(reproduction.generality),
        }
    return found


def outliers_csv(reproduction: Reproduction) -> str:
    """Return one row per function and outlier: its constant, its mean absolute residual, and the output there."""
    simulation, rows = reproduction.simulation, []
    for fit in reproduction.fits.values():
        outputs = fit.residuals + simulation.outputs
        numbers = zip(simulation.outliers, simulation.outputs, outputs, fit.residuals, strict=True)
        named = [fit.name, fit.constant, fit.value, fit.mean_absolute_residual]
        rows += [[*named, s, *map(float, row)] for s, row in enumerate(numbers, start=1)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = [
        "function",
        "constant",
        "value",
        "mean_absolute_residual",
        "S",
        "x",
        "layer_norm",
        "output",
        "residual",
    ]
    writer.writerows([header, *rows])
    return text.getvalue()


def printed(reproduction: Reproduction) -> Iterator[str]:
    """Yield what the terminal shows, part by part."""
    simulation = reproduction.simulation
    title = f"C = {simulation.channels}, sigma = {simulation.sigma:g}, mean {simulation.mean:g}, seed {simulation.seed}"
    means = Column(
        "mean |residual|", lambda value: f"{value:.6g}" if value > 1e-9 else f"{value:.2g}"
    )
    # The paper gives figures for one setting only.
    paper = PAPER if (simulation.channels, simulation.sigma) == (100, 2.0) else {}
    rows = []
    for fit in reproduction.fits.values():
        named = f"{fit.constant} = C v_o" if fit.name == CLOSED else fit.constant
        printed_value, printed_mean = paper.get(fit.name, ("", ""))
        rows.append(
            (fit.name, named, fit.value, printed_value, fit.mean_absolute_residual, printed_mean)
        )
    yield f"{Table(['function', 'constant', Column('value', '.8g'), 'paper', means, 'paper'], rows, title=title)}\n"
    x, y, columns = (
        simulation.outliers,
        simulation.outputs,
        {fit.name: fit.residuals for fit in reproduction.fits.values()},
    )
    yield _outlier_table(
        "outputs", x, {"LayerNorm": y} | {name: r + y for name, r in columns.items()}, ".4f"
    )
    yield _outlier_table("residuals (function - LayerNorm)", x, columns, ".2g")
    betas = " or ".join(dict.fromkeys(f"{beta:.6g}" for beta in channel_betas(simulation)))
    closed = reproduction.fits[CLOSED]
    yield (
        f"The closed form needs no fit: its centre is m_o = {closed.center:.4g}, its beta "
        f"C v_o = {closed.value:.6g}. Eq. 14's beta of the outlier's channel is {betas} at every "
        "step.\n"
    )
    if reproduction.generality is not None:
        yield _generality_table(reproduction.generality)
        yield verdict(reproduction.generality)


def _outlier_table(title: str, x: Array, columns: Mapping[str, Array], form: str) -> str:
    head: list[str | Column] = [
        "S",
        Column("x_o", ".2f"),
        *(Column(name, form) for name in columns),
    ]
    rows = list(zip(range(1, len(x) + 1), x, *columns.values(), strict=True))
    return f"{Table(head, rows, title=title)}\n"


def _generality_table(generality: Generality) -> str:
    names, rows = ("DyT", "DyISRU"), []
    others = ((axis, study) for axis, studies in generality.axes.items() for study in studies)
    for axis, study in [("base", generality.base), *others]:
        values = {"channels": f"C {study.channels}", "sigma": f"sigma {study.sigma:g}"}
        named = (
            values.get(axis, f"mean {study.offset:g} sigma")
            if axis != "base"
            else ", ".join(values.values())
        )
        rows.append(
            (
                named,
                *(value for name in names for value in sorted(study.middle(name))),
                study.dyt_wins,
            )
        )
    columns = [
        Column(share, ".2g", group=name) for name in names for share in ("5 %", "50 %", "95 %")
    ]
    title = f"mean |residual| over {len(generality.base.seeds):,} samples per setting: quantiles"
    wins = Column("DyT wins", lambda share: f"{100 * share:.3g}%")
    return f"{Table(['setting', *columns, wins], rows, title=title)}\n"


def verdict(generality: Generality) -> str:
    """State in a paragraph in how many samples DyISRU is nearer to LayerNorm than DyT, and where it is not.

    It is plain text in one line; every number comes from the study.
    """
    base, every = (
        generality.base,
        [study for studies in generality.axes.values() for study in studies],
    )
    correlation = (
        np.corrcoef(np.abs(base.centers), base.residuals["DyISRU"])[0, 1]
        if len(base.seeds) > 2
        else 0.0
    )
    text = rendered(
        "generality.txt",
        generality=generality,
        base=base,
        bounds=_bounds(generality),
        correlation=correlation,
        largest=max(study.closed_residuals.max() for study in every),
        # The base setting is on every axis, and counts once.
        skipped=sum(
            {(study.channels, study.sigma, study.mean): study.skipped for study in every}.values()
        ),
    )
    return " ".join(text.split())


def _bounds(generality: Generality) -> tuple[str, str] | None:
    """Return the settings around the base in which DyT wins no sample, and whether the search ended there."""

    def kept(studies: Iterable[Study]) -> list[Study]:
        return list(takewhile(lambda study: not study.lost, studies))

    sigmas, means = kept(generality.axes["sigma"]), generality.axes["mean"]
    if (
        generality.base.lost
        or any(study.lost for study in generality.axes["channels"])
        or not sigmas
    ):
        return None
    left = kept(study for study in reversed(means) if study.mean <= 0)[-1]
    right = kept(study for study in means if study.mean >= 0)[-1]
    step = f"a step of the outlier is at least {STEP / sigmas[-1].sigma:.3g} sigma"
    if sigmas[-1] is generality.axes["sigma"][-1]:
        step = "the steps of the outlier are among those looked at"
    ends = [("not below", left, means[0]), ("not above", right, means[-1])]
    named = [f"{words} {found.offset:g} sigma" for words, found, last in ends if found is not last]
    return step, f"the mean is {' and '.join(named) or 'among those looked at'}"
