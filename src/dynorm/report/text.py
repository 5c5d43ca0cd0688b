"""The report as plain text, a few lines on the model and a row a site, and as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynorm.report.measure import ModelReport, SiteReport

_LONGEST_PATH = 42


def table(report: ModelReport) -> str:
    """Return the report as a table, at most 120 columns wide."""
    return "\n".join([*_headline(report), "", *_table(report.sites), *_notes(report)])


def plain(value: Any) -> Any:
    """The value as JSON knows it: what is not finite becomes None, what is unknown its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _headline(report: ModelReport) -> list[str]:
    """The model as a whole, in a few lines."""
    out, count = report.output, len(report.sites)
    name = report.meta.get("model", report.model)
    lines = [f"{name}: {count} norm{'s' * (count != 1)} replaced, measured on {report.batches} batches"]
    figures = f"mean {number(out.cosine_mean)}, worst {number(out.cosine_min)}, median {number(out.cosine_median)}"
    lines.append(f"cosine of the output to the original's, {out.samples} samples: {figures}")
    if out.kind == "encoder":
        lines.append(f"Spearman of all pair similarities: {number(out.spearman)}")
    if out.kind == "language" and out.loss_now is not None:
        change = f"{number(out.loss_original)} -> {number(out.loss_now)} ({out.loss_difference:+.4f})"
        lines.append(f"loss {change} nats a token, KL {number(out.kl)}, {out.tokens} tokens")
    return lines


def _table(sites: Sequence[SiteReport]) -> list[str]:
    width = min(max([4, *(len(site.path) for site in sites)]), _LONGEST_PATH)
    titles = ("norm", "C", "max/s", "max/S", "spread", "linear", "DyT", "DyISRU", "now", "beta", "sat")
    rows = [_row(site, width) for site in sites]
    return [f"{'site':<{width}} {_cells(titles)}", *rows]


def _row(site: SiteReport, width: int) -> str:
    cells = (
        short_kind(site.kind),
        str(site.channels),
        f"{site.outlier:.1f}",
        f"{site.outlier_site:.1f}",
        *(number(v, 3) for v in (site.sigma_spread, site.error_linear, site.error_dyt, site.error_dyisru)),
        number(site.error_now, 3),
        f"{site.beta:.3g}",
        share(site.saturated),
    )
    return f"{short_path(site.path, width):<{width}} {_cells(cells)}"


def _cells(values: Sequence[str]) -> str:
    widths = (4, 5, 5, 6, 6, 6, 6, 6, 6, 8, 6)
    return " ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def short_kind(kind: str) -> str:
    """Return a kind of norm as a table shows it."""
    return {"layernorm": "LN", "rmsnorm": "RMS"}.get(kind, kind)


def short_path(path: str, width: int) -> str:
    """Return the end of a path that is too long for its column."""
    return path if len(path) <= width else "…" + path[1 - width :]


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as a table shows it, a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def constant(value: float) -> str:
    """Return a constant as a page shows it: whole where it is large, else to three digits."""
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share in percent as a table shows it, a dash for None; what is not 0 does not look like it."""
    if not value:
        return "-" if value is None else "0"
    return f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def _notes(report: ModelReport) -> list[str]:
    return [
        *(f"{path}  not reached" for path in report.unreached),
        "max/s: largest deviation in its token's sigmas; max/S: in the site's typical sigma; spread: of log sigma.",
        "linear, DyT, DyISRU: relative error of each, with one constant, against the norm's core; now: error of the",
        "layer in place; sat: values beyond 95 % of the bound. All on held-out data.",
    ]
