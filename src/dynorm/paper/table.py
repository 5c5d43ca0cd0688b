"""The numbers behind the figures: as JSON and as printed tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynorm.paper.fits import CLOSED
from dynorm.paper.generality import PAPER, Reproduction, Study
from dynorm.paper.simulation import STEP, STEPS, channel_betas
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
    if reproduction.studies:
        results["studies"] = [study.to_dict() for study in reproduction.studies]
    return results


def printed(reproduction: Reproduction) -> Iterator[str]:
    """Yield the parts of the terminal's text."""
    simulation = reproduction.simulation
    yield _fit_table(reproduction)
    # Rounding may make the betas of the steps differ.
    betas = dict.fromkeys(f"{beta:.6g}" for beta in channel_betas(simulation))
    closed = reproduction.fits[CLOSED]
    yield (
        f"The closed form needs no fit: its centre is m_o = {closed.center:.4g}, its beta "
        f"C v_o = {closed.value:.6g}. Eq. 14's beta of the outlier's channel is "
        f"{' or '.join(betas)} at every step.\n"
    )
    if reproduction.studies:
        yield _studies_table(reproduction.studies)


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


def _studies_table(studies: Sequence[Study]) -> str:
    rows = []
    for study in studies:
        setting = f"C {study.channels}, sigma {study.sigma:g}, mean {study.mean:g}"
        middles = []
        for name in ("DyISRU", "DyT"):
            median, low, high = study.middle(name)
            middles.append(f"{median:.2g} ({low:.2g} to {high:.2g})")
        rows.append((setting, *middles, f"{study.lost:,} of {len(study.seeds):,}"))
    columns = ["setting", "DyISRU", "DyT", "samples that DyT wins"]
    title = "mean |residual| over many samples: median, 5 to 95 %"
    return f"{Table(columns, rows, title=title)}\n"
