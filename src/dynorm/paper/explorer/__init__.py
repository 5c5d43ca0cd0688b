"""The page to play with: one HTML file that draws LayerNorm, its point-wise rivals and the annealing between them."""

import os
from importlib.resources import files
from pathlib import Path
from string import Template

from dynorm import __version__
from dynorm.family import css_colors
from dynorm.files import require_writable, write_text

# The page's scripts, in the order in which they use each other.
_NAMES = "random functions fits state model plots handle controls table main"
SCRIPTS = tuple(f"{name}.js" for name in _NAMES.split())


def build_page() -> str:
    """Return the explorer as one self-contained HTML page, which loads nothing and works from a file.

    It shows, for one token with a movable outlier, LayerNorm beside scaled DyT, Derf and DyISRU,
    with the fits and the residuals of the paper's section 4, the derivative, and the annealing
    between both (closed form 4).
    """
    return Template(_read("page.html")).substitute(
        version=__version__,
        licence=_read("vendor", "LICENSE").strip(),
        style=_read("vendor", "uPlot.min.css") + css_colors() + _read("style.css"),
        equations=_read("equations.html").strip(),
        library=_read("vendor", "uPlot.iife.min.js"),
        # A block keeps the names of the scripts to themselves.
        script="{\n" + "\n".join(_read(name) for name in SCRIPTS) + "}",
    )


def save_page(path: str | os.PathLike[str]) -> Path:
    """Write the explorer's page, whole or not at all, and return its absolute path; a missing folder is made."""
    require_writable(path)
    write_text(path, build_page())
    return Path(path).resolve()


def _read(*parts: str) -> str:
    """Return a file of this package."""
    return files(__package__).joinpath(*parts).read_text(encoding="utf-8")
