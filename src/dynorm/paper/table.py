"""The numbers behind the figures: as JSON and as printed tables."""

from collections.abc import Iterator, Sequence

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
    return {
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
        "studies": [study.to_dict() for study in reproduction.studies],
    }


def printed(reproduction: Reproduction) -> Iterator[str]:
    """Yield the parts of the terminal's text."""
    simulation = reproduction.simulation
    yield _fit_table(reproduction)
    closed = reproduction.fits[CLOSED]
    yield (
        f"The closed form needs no fit: its centre is m_o = {closed.center:.4g}, its beta "
        f"C v_o = {closed.value:.6g}. Eq. 14's beta of the outlier's channel is "
        f"{channel_betas(simulation)[0]:.6g} at every step.\n"
    )
    yield _studies_table(reproduction.studies)


def _fit_table(reproduction: Reproduction) -> str:
    simulation = reproduction.simulation
    rows = []
    for fit in reproduction.fits.values():
        constant = fit.constant
        if fit.name == CLOSED:
            constant = f"{constant} = C v_o"
        value, mean = PAPER.get(fit.name, ("", ""))
        mean_here = f"{fit.mean_absolute_residual:.6g}"
        rows.append((fit.name, constant, f"{fit.value:.8g}", value, mean_here, mean))
    columns = ["function", "constant", "value", "paper", "mean |residual|", "paper"]
    title = f"C = {simulation.channels}, sigma = {simulation.sigma:g}, seed {simulation.seed}"
    return f"{Table(columns, rows, title=title)}\n"


def _studies_table(studies: Sequence[Study]) -> str:
    rows = []
    for study in studies:
        setting = f"C {study.channels}, sigma {study.sigma:g}, mean {study.mean:g}"
        middles = []
        for name in ("DyISRU", "DyT"):
            median, low, high = study.middle(name)
            middles.append(f"{median:.2g} ({low:.2g} to {high:.2g})")
        rows.append((setting, *middles, f"{study.lost:,} of {study.samples:,}"))
    columns = ["setting", "DyISRU", "DyT", "samples that DyT wins"]
    title = "mean |residual| over many samples: median, 5 to 95 %"
    return f"{Table(columns, rows, title=title)}\n"
