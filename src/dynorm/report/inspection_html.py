"""An inspection as one HTML page: what was found, a row a norm, and a picture of each."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dynorm.report.inspection import InspectedSite, InspectionReport
from dynorm.report.inspection_text import findings
from dynorm.report.page import (
    breakable,
    card,
    column_notes,
    meta_list,
    panel,
    scrolled_table,
    three,
    unreached_note,
    whole_page,
)
from dynorm.report.picture import Drawing, svg_picture
from dynorm.report.stats import FUNCTIONS
from dynorm.report.text import constant, number, short_kind

_COLUMNS = (
    ("site", "path of the norm in the model, in call order"),
    ("norm", "LayerNorm or RMSNorm"),
    ("C", "channels"),
    ("outlier, own\u00a0σ", "largest |x − mean| in standard deviations of its own token; √(C−1) at most"),
    ("σ spread", "standard deviation over tokens of ln σ; at 0 a constant serves as well as the norm"),
    ("linear, outliers", "mean |residual| of a straight line on outliers, in units of the norm's core"),
    ("DyT, outliers", "the same of √(C−1) tanh(α (x − c))"),
    ("DyISRU, outliers", "the same of √(C−1) (x − c)/√(β + (x − c)²)"),
    ("DyT / DyISRU", "ratio of the two residuals; the paper's claim is that it lies above 1"),
    ("α", "DyT's constant, fitted on outliers"),
    ("β", "DyISRU's constant, fitted on outliers"),
    ("own β spread", "standard deviation over outliers of ln of the β that each would need to match the norm exactly"),
    ("linear, all", "relative error |y − f| / |y| on all channels, one constant fitted on all channels"),
    ("DyT, all", "the same of DyT"),
    ("DyISRU, all", "the same of DyISRU"),
)


def render(report: InspectionReport) -> str:
    """Return the page as text.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    name = str(report.meta.get("model", report.model))
    parts = [
        f"<h1>{escape(name)}: what its norms do to outliers</h1>",
        f'<p class="lead">{_LEAD}</p>',
        f'<dl class="cards">{"".join(_cards(report))}</dl>',
        f"<p>{escape(' '.join(findings(report)))}</p>",
        "<h2>Every norm</h2>",
        scrolled_table(_COLUMNS, map(_row, report.sites), "Table of norms"),
        *unreached_note(report.unreached),
        *(f"<p>{breakable(path)} is left out: {escape(reason)}.</p>" for path, reason in report.refused.items()),
        column_notes(_COLUMNS[3:]),
        "<h2>Outliers and the functions fitted to them</h2>",
        _LEGEND,
        f'<div class="grid">{"".join(map(_panel, report.sites))}</div>',
        *meta_list(report.meta),
    ]
    return whole_page(f"dynorm: {name}, inspected", parts)


def _cards(report: InspectionReport) -> Iterable[str]:
    found = report.summary()
    yield card(f"{found['holds']} of {found['sites']}", "norms", "where DyISRU describes outliers better than DyT")
    span = f"{found['ratio_min']:.2f} to {found['ratio_max']:.2f}"
    yield card(number(found["ratio_median"], 2), "median ratio", f"of DyT's residual to DyISRU's; {span}")
    best = found["outliers_best"]
    yield card(f"{best['linear']} of {found['sites']}", "norms", "where a straight line describes outliers best")
    worst = max(report.sites, key=lambda site: site.outlier)
    yield card(f"{worst.outlier:,.1f} σ", "largest outlier", f"in its token's own σ, at {breakable(worst.path)}")
    yield card(f"{found['exact']:.0e}", "exact form", "largest residual of DyISRU with each outlier's own constant")


def _row(site: InspectedSite) -> str:
    residuals, errors = site.outliers.residuals, site.core.errors
    cells = [
        f"<td>{escape(cell)}</td>"
        for cell in (
            short_kind(site.kind),
            f"{site.channels:,}",
            f"{site.outlier:,.1f}",
            number(site.sigma_spread, 2),
        )
    ]
    cells += three(*map(residuals.__getitem__, FUNCTIONS))
    cells += [
        f"<td>{cell}</td>"
        for cell in (
            number(site.ratio, 2),
            f"{site.alpha:.3g}",
            constant(site.beta),
            number(site.outliers.beta_spread, 2),
        )
    ]
    cells += three(*map(errors.__getitem__, FUNCTIONS))
    return f'<tr><th scope="row">{breakable(site.path)}</th>{"".join(cells)}</tr>'


def _panel(site: InspectedSite) -> str:
    residuals = site.outliers.residuals
    caption = f"linear {residuals['linear']:.3f} · DyT {residuals['dyt']:.3f} · DyISRU {residuals['dyisru']:.3f}"
    words = (
        f"Outliers at the {site.kind} {site.path}, up to {site.outlier:.1f} sigma of their token, and the functions "
        f"fitted to them. Mean absolute residuals: {caption}."
    )
    return panel(site.path, caption, svg_picture(drawing(site), words))


def drawing(site: InspectedSite) -> Drawing:
    """Return what the picture of a site shows."""
    return Drawing(site.path, site.outliers.fit, site.picture, site.outliers.points)


_LEAD = """In each token the channel farthest from the mean is its outlier. Each function has one constant a norm,
fitted by least squares on the outliers of some tokens and measured on those of others: section 4 of the DyISRU paper,
on real activations."""

_LEGEND = """<ul class="legend">
<li><i class="point outlier"></i>outliers: one a token</li>
<li><i class="point"></i>other values of the norm's core</li>
<li><i class="line dyisru"></i>DyISRU</li>
<li><i class="line dyt"></i>DyT</li>
<li><i class="line linear"></i>linear</li>
<li><i class="line bound"></i>the norm's bounds</li>
</ul>
<p class="note">Mean absolute residuals on outliers stand above each picture. Both axes are linear near 0 and
logarithmic far from it (asinh): a straight line bends in the logarithmic part unless it is as steep as the axes.</p>"""
