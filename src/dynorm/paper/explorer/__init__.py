"""The explorer: an interactive HTML page with LayerNorm and the point-wise functions."""

from importlib.resources import files
from string import Template

from dynorm import version
from dynorm.report.colours import css_colors

# The page's scripts; each uses only those before it.
SCRIPTS = (
    "random.js",
    "functions.js",
    "fits.js",
    "state.js",
    "model.js",
    "plots.js",
    "handle.js",
    "controls.js",
    "table.js",
    "main.js",
)


def build_page() -> str:
    """Return the explorer as one self-contained HTML page that works offline.

    For one token with a movable outlier it shows LayerNorm, scaled DyT, Derf and DyISRU, the fits
    and residuals of the paper's section 4, the derivative, and the annealing from LayerNorm to
    DyISRU (closed form 4).
    """
    scripts = "\n".join(_read(name) for name in SCRIPTS)
    return Template(_read("page.html")).substitute(
        version=version.__version__,
        licence=_read("vendor", "LICENSE").strip(),
        style=_read("vendor", "uPlot.min.css") + css_colors() + _read("style.css"),
        equations=_read("equations.html").strip(),
        library=_read("vendor", "uPlot.iife.min.js"),
        # The braces make a block, so that the scripts define no global names.
        script="{\n" + scripts + "}",
    )


def _read(*parts: str) -> str:
    """Return a file of this package."""
    return files(__package__).joinpath(*parts).read_text(encoding="utf-8")
