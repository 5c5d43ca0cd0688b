"""The numbers behind the figures: as JSON, as CSV, as printed tables and in words."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, takewhile
from typing import Any

import numpy as np

from dynorm.paper.fits import CLOSED
from dynorm.paper.generality import PAPER, Generality, Reproduction, Study
from dynorm.paper.simulation import STEP, STEPS, Array, channel_betas
from dynorm.report.rendering import rendered
from dynorm.table import Table


def document(reproduction: Reproduction) -> dict[str, object]:
    """Return the results as plain lists and dictionaries, which ``json.dumps`` accepts."""
    simulation = reproduction.simulation
    functions = {}
    for fit in reproduction.fits.values():
        functions[fit.name] = {
            fit.constant: fit.value,
            "mean_absolute_residual": fit.mean_absolute_residual,
            "outputs": (fit.residuals + simulation.outputs).tolist(),
            "residuals": fit.residuals.tolist(),
        }
    closed = {"center": reproduction.fits[CLOSED].center, **functions.pop(CLOSED)}
    paper = {}
    for name, (constant, mean) in PAPER.items():
        paper[name] = {"constant": constant, "mean_absolute_residual": mean}
    results: dict[str, Any] = {
        "simulation": {
            "channels": simulation.channels,
            "sigma": simulation.sigma,
            "mean": simulation.mean,
            "seed": simulation.seed,
            "step": STEP,
            "steps": STEPS,
            "outliers": simulation.outliers.tolist(),
            "layer_norm": simulation.outputs.tolist(),
        },
        "fits": functions,
        "closed_form": closed,
        "channel_betas": channel_betas(simulation).tolist(),
        "paper": paper,
    }
    if reproduction.generality is not None:
        results["generality"] = {
            **reproduction.generality.to_dict(),
            "verdict": verdict(reproduction.generality),
        }
    return results


_CSV_HEADER = (
    "function",
    "constant",
    "value",
    "mean_absolute_residual",
    "S",
    "x",
    "layer_norm",
    "output",
    "residual",
)


def outliers_csv(reproduction: Reproduction) -> str:
    """Return one CSV row per function and outlier, with the function's constant and output."""
    simulation = reproduction.simulation
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    for fit in reproduction.fits.values():
        about_fit = (fit.name, fit.constant, fit.value, fit.mean_absolute_residual)
        outputs = fit.residuals + simulation.outputs
        for step in range(STEPS):
            point = (
                float(simulation.outliers[step]),
                float(simulation.outputs[step]),
                float(outputs[step]),
                float(fit.residuals[step]),
            )
            writer.writerow((*about_fit, step + 1, *point))
    return text.getvalue()


def printed(reproduction: Reproduction) -> Iterator[str]:
    """Yield the parts of the terminal's text."""
    simulation = reproduction.simulation
    yield _fit_table(reproduction)
    outputs = {"LayerNorm": simulation.outputs}
    residuals = {}
    for fit in reproduction.fits.values():
        outputs[fit.name] = fit.residuals + simulation.outputs
        residuals[fit.name] = fit.residuals
    yield _outlier_table("outputs", simulation.outliers, outputs, ".4f")
    title = "residuals (function - LayerNorm)"
    yield _outlier_table(title, simulation.outliers, residuals, ".2g")
    # Rounding may make the betas of the steps differ.
    betas = dict.fromkeys(f"{beta:.6g}" for beta in channel_betas(simulation))
    closed = reproduction.fits[CLOSED]
    yield (
        f"The closed form needs no fit: its centre is m_o = {closed.center:.4g}, its beta "
        f"C v_o = {closed.value:.6g}. Eq. 14's beta of the outlier's channel is "
        f"{' or '.join(betas)} at every step.\n"
    )
    if reproduction.generality is not None:
        yield _generality_table(reproduction.generality)
        yield verdict(reproduction.generality)


def _fit_table(reproduction: Reproduction) -> str:
    simulation = reproduction.simulation
    # The paper gives figures for one setting only.
    paper: Mapping[str, tuple[str, str]] = {}
    if (simulation.channels, simulation.sigma) == (100, 2.0):
        paper = PAPER
    rows = []
    for fit in reproduction.fits.values():
        constant = fit.constant
        if fit.name == CLOSED:
            constant = f"{constant} = C v_o"
        value, mean = paper.get(fit.name, ("", ""))
        mean_here = _mean_text(fit.mean_absolute_residual)
        rows.append((fit.name, constant, f"{fit.value:.8g}", value, mean_here, mean))
    columns: list[str] = [
        "function",
        "constant",
        "value",
        "paper",
        "mean |residual|",
        "paper",
    ]
    title = (
        f"C = {simulation.channels}, sigma = {simulation.sigma:g}, mean {simulation.mean:g}, "
        f"seed {simulation.seed}"
    )
    return f"{Table(columns, rows, title=title)}\n"


def _mean_text(mean: float) -> str:
    # The closed form's is rounding.
    if mean > 1e-9:
        return f"{mean:.6g}"
    return f"{mean:.2g}"


def _outlier_table(
    title: str,
    x: Array,
    values: Mapping[str, Array],
    form: str,
) -> str:
    columns: list[str] = ["S", "x_o"]
    for name in values:
        columns.append(name)
    steps = range(1, len(x) + 1)
    rows = []
    for step, x_o, *row in zip(steps, x, *values.values(), strict=True):
        rows.append((step, f"{x_o:.2f}", *(format(value, form) for value in row)))
    return f"{Table(columns, rows, title=title)}\n"


def _generality_table(generality: Generality) -> str:
    base = generality.base
    rows = [_generality_row(f"C {base.channels}, sigma {base.sigma:g}", base)]
    for study in generality.axes["channels"]:
        rows.append(_generality_row(f"C {study.channels}", study))
    for study in generality.axes["sigma"]:
        rows.append(_generality_row(f"sigma {study.sigma:g}", study))
    for study in generality.axes["mean"]:
        rows.append(_generality_row(f"mean {study.offset:g} sigma", study))
    columns: list[str] = ["setting"]
    for name in ("DyT", "DyISRU"):
        for quantile in ("5 %", "50 %", "95 %"):
            columns.append(f"{name} {quantile}")
    columns.append("DyT wins")
    title = f"mean |residual| over {len(base.seeds):,} samples per setting: quantiles"
    return f"{Table(columns, rows, title=title)}\n"


def _generality_row(setting: str, study: Study) -> tuple[object, ...]:
    return (
        setting,
        *(f"{value:.2g}" for value in sorted(study.middle("DyT"))),
        *(f"{value:.2g}" for value in sorted(study.middle("DyISRU"))),
        f"{100 * study.dyt_wins:.3g}%",
    )


def verdict(generality: Generality) -> str:
    """Return a paragraph that compares DyISRU with DyT over all samples.

    It says in how many samples DyISRU is nearer to LayerNorm and in which settings it is not, as
    plain text in one line. Every number comes from the study.
    """
    base = generality.base
    studies = list(chain(*generality.axes.values()))
    correlation = 0.0
    if len(base.seeds) > 2:
        correlation = np.corrcoef(np.abs(base.centers), base.residuals["DyISRU"])[0, 1]
    # The base setting is on every axis, and counts once.
    skipped = {}
    for study in studies:
        skipped[study.channels, study.sigma, study.mean] = study.skipped
    text = rendered(
        "generality.txt",
        generality=generality,
        base=base,
        bounds=_bounds(generality),
        correlation=correlation,
        largest=max(study.closed_residuals.max() for study in studies),
        skipped=sum(skipped.values()),
    )
    return " ".join(text.split())


def _bounds(generality: Generality) -> tuple[str, str] | None:
    """Return in words the range of settings around the base in which DyT wins no sample.

    The first text is about sigma, the second about the mean; None if there is no such range.
    """
    sigmas = generality.axes["sigma"]
    means = generality.axes["mean"]
    won_sigmas = _until_lost(sigmas)
    lost_channels = any(study.lost for study in generality.axes["channels"])
    if generality.base.lost or lost_channels or not won_sigmas:
        return None
    largest_sigma = won_sigmas[-1]
    if largest_sigma is sigmas[-1]:
        step = "the steps of the outlier are among those looked at"
    else:
        step = f"a step of the outlier is at least {STEP / largest_sigma.sigma:.3g} sigma"
    lowest_mean = _until_lost(study for study in reversed(means) if study.mean <= 0)[-1]
    highest_mean = _until_lost(study for study in means if study.mean >= 0)[-1]
    limits = []
    if lowest_mean is not means[0]:
        limits.append(f"not below {lowest_mean.offset:g} sigma")
    if highest_mean is not means[-1]:
        limits.append(f"not above {highest_mean.offset:g} sigma")
    mean = " and ".join(limits) or "among those looked at"
    return step, f"the mean is {mean}"


def _until_lost(studies: Iterable[Study]) -> list[Study]:
    """Return the studies before the first one in which DyT wins a sample."""
    return list(takewhile(lambda study: not study.lost, studies))
