"""An inspection as plain text: a row a norm, and what follows for the paper's claim."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynorm.report.inspection import InspectedSite, InspectionReport
from dynorm.report.text import number, short_kind, short_path

_LONGEST_PATH = 40
_TITLES = ("norm", "C", "max/s", "spread", "linear", "DyT", "DyISRU", "ratio", "linear", "DyT", "DyISRU")
_WIDTHS = (4, 5, 6, 6, 8, 6, 6, 6, 9, 6, 6)


def table(report: InspectionReport) -> str:
    """Return the report as a table, at most 120 columns wide."""
    width = min(max([4, *(len(site.path) for site in report.sites)]), _LONGEST_PATH)
    name = report.meta.get("model", report.model)
    lines = [
        f"{name}: {len(report.sites)} norms, outliers against functions with one constant a site",
        "",
        f"{'':<{width}} {'':>24} {'outliers, mean |residual|':>29} {'all channels, relative error':>29}",
        f"{'site':<{width}} {_cells(_TITLES)}",
        *(_row(site, width) for site in report.sites),
        *(f"{path}  not reached" for path in report.unreached),
        *(f"{path}  left out: {reason}" for path, reason in report.refused.items()),
        "",
        *findings(report),
        "",
        "max/s: largest deviation in its token's sigmas; spread: of log sigma over tokens; ratio: DyT's residual over",
        "DyISRU's. Residuals in units of the norm's core. Fitted on some tokens, measured on others.",
    ]
    return "\n".join(lines)


def findings(report: InspectionReport) -> list[str]:
    """What was found, in sentences that follow from the figures alone."""
    found = report.summary()
    count, best, core = found["sites"], found["outliers_best"], found["core_best"]
    low, high = (math.exp(f(site.outliers.beta_spread for site in report.sites)) for f in (min, max))
    return [
        f"On outliers DyISRU's residual is below DyT's, as the paper claims, at {found['holds']} of {count} norms;",
        f"DyT's over DyISRU's is {found['ratio_min']:.2f} to {found['ratio_max']:.2f}, median "
        f"{found['ratio_median']:.2f}. Smallest of the three: DyISRU {best['dyisru']}, DyT {best['dyt']}, linear "
        f"{best['linear']}.",
        f"On all channels DyISRU is below DyT at {found['core_holds']} of {count}; smallest: DyISRU {core['dyisru']}, "
        f"DyT {core['dyt']}, linear {core['linear']}.",
        f"With a constant of its own for each outlier DyISRU is the norm, to {found['exact']:.0e}; one for all",
        f"falls short because these differ, by a factor of {low:.2f} to {high:.2f} (a standard deviation of their "
        "logarithm).",
    ]


def _row(site: InspectedSite, width: int) -> str:
    residuals, errors = site.outliers.residuals, site.core.errors
    cells = (
        short_kind(site.kind),
        str(site.channels),
        f"{site.outlier:.1f}",
        number(site.sigma_spread, 3),
        *(number(residuals[name], 3) for name in ("linear", "dyt", "dyisru")),
        number(site.ratio, 2),
        *(number(errors[name], 3) for name in ("linear", "dyt", "dyisru")),
    )
    return f"{short_path(site.path, width):<{width}} {_cells(cells)}"


def _cells(values: Sequence[str]) -> str:
    return " ".join(f"{value:>{width}}" for value, width in zip(values, _WIDTHS, strict=True))
