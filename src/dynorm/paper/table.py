"""The numbers behind the figures: as a document for JSON, as rows for CSV, and printed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynorm.paper.generality import Generality, Study
from dynorm.paper.reproduction import PAPER, Reproduction
from dynorm.paper.simulation import Array, channel_betas
from dynorm.paper.verdict import verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["document", "generality_csv", "outliers_csv", "printed", "samples_csv"]

CLOSED = "closed form"


def document(reproduction: Reproduction) -> dict[str, Any]:
    """Return every number as plain lists and dictionaries.

    Args:
        reproduction: What :func:`dynorm.paper.reproduction.reproduce` returns.

    Returns:
        A dictionary that ``json.dumps`` accepts.

    Example:
        >>> from dynorm.paper.reproduction import reproduce
        >>> round(document(reproduce())["fits"]["DyISRU"]["beta"], 2)
        301.06
    """
    simulation, closed = reproduction.simulation, reproduction.closed
    functions = _functions(reproduction)
    found: dict[str, Any] = {
        "simulation": {
            **{name: getattr(simulation, name) for name in ("channels", "sigma", "mean", "seed", "step", "steps")},
            "outliers": simulation.outliers.tolist(),
            "layer_norm": simulation.outputs.tolist(),
        },
        "fits": {
            name: {
                fit.constant: fit.value,
                "mean_absolute_residual": fit.mean_absolute_residual,
                "outputs": functions[name].tolist(),
                "residuals": fit.residuals.tolist(),
            }
            for name, fit in reproduction.fits.items()
        },
        "closed_form": {
            "center": closed.center,
            "beta": closed.beta,
            "mean_absolute_residual": float(np.abs(closed.residuals).mean()),
            "outputs": functions[CLOSED].tolist(),
            "residuals": closed.residuals.tolist(),
        },
        "channel_betas": channel_betas(simulation).tolist(),
        "paper": {name: {"constant": text, "mean_absolute_residual": mean} for name, (text, mean) in PAPER.items()},
    }
    if reproduction.generality is not None:
        found["generality"] = {**reproduction.generality.to_dict(), "verdict": verdict(reproduction.generality)}
    return found


def outliers_csv(reproduction: Reproduction) -> str:
    """Return a row for each function and outlier: its constant, its mean absolute residual, and the output there.

    Example:
        >>> from dynorm.paper.reproduction import reproduce
        >>> outliers_csv(reproduce()).splitlines()[0]
        'function,constant,value,mean_absolute_residual,S,x,layer_norm,output,residual'
    """
    simulation, rows = reproduction.simulation, []
    for name, residuals in _residuals(reproduction).items():
        fit, outputs = reproduction.fits.get(name), _functions(reproduction)[name]
        constant, value = ("beta", reproduction.closed.beta) if fit is None else (fit.constant, fit.value)
        mean = float(np.abs(residuals).mean())
        numbers = zip(simulation.outliers, simulation.outputs, outputs, residuals, strict=True)
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


def printed(reproduction: Reproduction) -> Iterator[RenderableType]:
    """Yield what the terminal shows, for rich's ``Console.print``.

    Example:
        >>> from dynorm.paper.reproduction import reproduce
        >>> len(list(printed(reproduce())))
        4
    """
    simulation = reproduction.simulation
    title = f"C = {simulation.channels}, sigma = {simulation.sigma:g}, mean {simulation.mean:g}, seed {simulation.seed}"
    yield _constants(reproduction, title)
    columns = ["S", "x_o", "LayerNorm", *_functions(reproduction)]
    outputs = [simulation.outliers, simulation.outputs, *_functions(reproduction).values()]
    yield _outlier_table("outputs", columns, outputs, "{:.4f}")
    columns = ["S", "x_o", *_residuals(reproduction)]
    yield _outlier_table(
        "residuals (function - LayerNorm)", columns, [simulation.outliers, *_residuals(reproduction).values()], "{:.2g}"
    )
    betas = " or ".join(dict.fromkeys(f"{beta:.6g}" for beta in channel_betas(simulation)))
    yield (
        f"The closed form needs no fit: its centre is m_o = {reproduction.closed.center:.4g}, its beta "
        f"C v_o = {reproduction.closed.beta:.6g}. Eq. 14's beta of the outlier's channel is {betas} at every step."
    )
    if reproduction.generality is not None:
        yield _generality_table(reproduction.generality)
        yield verdict(reproduction.generality)


def _constants(reproduction: Reproduction, title: str) -> Table:
    table = _table(title, ["function", "constant", "value", "paper", "mean |residual|", "paper"], text=2)
    simulation = reproduction.simulation
    # The paper gives figures for one setting only.
    paper = PAPER if (simulation.channels, simulation.sigma) == (100, 2.0) else {}
    for name, fit in reproduction.fits.items():
        value, mean = paper.get(name, ("", ""))
        table.add_row(name, fit.constant, f"{fit.value:.8g}", value, f"{fit.mean_absolute_residual:.6g}", mean)
    mean = f"{np.abs(reproduction.closed.residuals).mean():.2g}"
    table.add_row(CLOSED, "beta = C v_o", f"{reproduction.closed.beta:.8g}", "", mean, "")
    return table


def _outlier_table(title: str, columns: Sequence[str], values: Sequence[Array], form: str) -> Table:
    table = _table(title, columns)
    x, *rest = values
    for i, place in enumerate(x):
        table.add_row(str(i + 1), f"{place:.2f}", *(form.format(column[i]) for column in rest))
    return table


def _generality_table(generality: Generality) -> Table:
    title = f"mean |residual| over {len(generality.base.seeds):,} samples a setting: quantiles"
    columns = [f"{name}\n{share}" for name in ("DyT", "DyISRU") for share in ("5 %", "50 %", "95 %")]
    table = _table(title, ["setting", *columns, "DyT\nwins"], text=1)
    before = "base"
    for axis, study in _settings(generality):
        if axis != before:
            table.add_section()
        before = axis
        spreads = np.quantile([study.residuals[name] for name in ("DyT", "DyISRU")], (0.05, 0.5, 0.95), axis=1)
        numbers = (f"{value:.2g}" for value in spreads.T.flat)
        table.add_row(_named(axis, study), *numbers, f"{100 * study.dyt_wins:.3g}%")
    return table


def _settings(generality: Generality) -> Iterator[tuple[str, Study]]:
    yield "base", generality.base
    for axis, studies in generality.axes.items():
        yield from ((axis, study) for study in studies)


def _named(axis: str, study: Study) -> str:
    if axis == "base":
        return f"C {study.channels}, sigma {study.sigma:g}"
    values = {"channels": f"C {study.channels}", "sigma": f"sigma {study.sigma:g}"}
    return values.get(axis, f"mean {study.mean / study.sigma:g} sigma")


def _functions(reproduction: Reproduction) -> Mapping[str, Array]:
    """Return the outputs of every function at the outliers."""
    return {name: residuals + reproduction.simulation.outputs for name, residuals in _residuals(reproduction).items()}


def _residuals(reproduction: Reproduction) -> Mapping[str, Array]:
    fitted = {name: fit.residuals for name, fit in reproduction.fits.items()}
    return {**fitted, CLOSED: reproduction.closed.residuals}


def _table(title: str, columns: Sequence[str], *, text: int = 0) -> Table:
    """Return a table whose first columns are text and stand left, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text else "right", no_wrap=True)
    return table


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
