"""The report as one HTML page that needs no other file: headline figures, a row a site, and a picture of each."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from dynorm.family import FAMILY
from dynorm.files import write_text
from dynorm.report.measure import ModelReport, SiteReport
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
from dynorm.report.text import constant, number, share, short_kind

# Title and meaning of each column of the table.
_COLUMNS = (
    ("site", "path of the norm in the model, in call order"),
    ("norm", "what stood there: LayerNorm or RMSNorm"),
    ("C", "channels"),
    ("outlier, own\u00a0σ", "largest |x − mean| in standard deviations of its own token; √(C−1) at most"),
    (
        "outlier, site\u00a0σ",
        "the same in the site's typical standard deviation, the geometric mean over its tokens; no bound",
    ),
    ("σ spread", "standard deviation over tokens of ln σ; at 0 a constant serves as well as the norm"),
    ("σ p99/p1", "99th percentile of the tokens' σ over the 1st"),
    ("linear", "relative error |y − f| / |y| of a straight line against the norm's core y, one constant for the site"),
    ("DyT", "the same of √(C−1) tanh((x − c)/√β)"),
    ("DyISRU", "the same of √(C−1) (x − c)/√(β + (x − c)²)"),
    (
        "layer now",
        "error of the layer in place, fed by the converted model, against the norm in the original; 1 = a constant",
    ),
    ("β", "the layer's constant; the median where each channel has one"),
    ("centre", "what the layer subtracts first; the median where each channel has one"),
    ("saturated", "share of values that the layer takes beyond 95 % of its bound"),
)


def save_html(report: ModelReport, path: str | Path) -> None:
    """Write a report as one HTML page, whole or not at all.

    The page loads nothing: style and pictures are in it. It follows the reader's choice of light or dark.

    Args:
        report: what :func:`measure` returned.
        path: the file; one that exists is replaced.

    Raises:
        ArgumentError: matplotlib is not installed.
        StorageError: the file cannot be written.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> report = dynorm.measure(model, [torch.randn(64, 8)])
        >>> save_html(report, getfixture("tmp_path") / "report.html")
    """
    write_text(path, render(report))


def render(report: ModelReport) -> str:
    """Return the page as text.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    name = str(report.meta.get("model", report.model))
    parts = [
        f"<h1>{escape(name)} without its norms</h1>",
        f'<p class="lead">{escape(_lead(report))}</p>',
        f'<dl class="cards">{"".join(_cards(report))}</dl>',
        "<h2>Every site</h2>",
        scrolled_table(_COLUMNS, map(_row, report.sites), "Table of sites"),
        *unreached_note(report.unreached),
        column_notes(_COLUMNS[3:]),
        "<h2>Input and output of every norm</h2>",
        _LEGEND,
        f'<div class="grid">{"".join(_panel(site) for site in report.sites)}</div>',
        *meta_list(report.meta),
    ]
    return whole_page(f"dynorm: {name}", parts)


def _lead(report: ModelReport) -> str:
    layers = sorted({FAMILY[site.layer].title if site.layer in FAMILY else site.layer for site in report.sites})
    count = len(report.sites)
    what = f"{count} norm{'s' * (count != 1)} replaced by {' and '.join(layers)}, "
    return f"{what}and compared with the original on {report.output.samples:,} held-out samples."


def _cards(report: ModelReport) -> Iterable[str]:
    out = report.output
    what = {"encoder": "of sentence embeddings", "language": "of logits", "tensor": "of outputs"}[out.kind]
    yield card(number(out.cosine_mean, 3), "mean cosine", f"{what}, converted to original")
    yield card(number(out.cosine_min, 3), "worst cosine", f"5 % of samples are below {number(out.cosine_p05, 3)}")
    if out.kind == "encoder":
        yield card(number(out.spearman, 3), "Spearman", "of the similarities of all pairs")
    if out.loss_difference is not None:
        losses = f"nats a token: {number(out.loss_original, 3)} to {number(out.loss_now, 3)}"
        yield card(f"{out.loss_difference:+.3f}".replace("-", "−"), "loss", losses)
        yield card(number(out.kl, 3), "KL divergence", "nats a token, from the original")
    best = sum(site.error_dyisru < min(site.error_dyt, site.error_linear) for site in report.sites)
    yield card(f"{best} of {len(report.sites)}", "sites", "where DyISRU fits the core best of the three")
    worst = max(report.sites, key=lambda site: site.outlier_site)
    yield card(f"{worst.outlier_site:,.0f} σ", "largest outlier", breakable(worst.path))


def _row(site: SiteReport) -> str:
    cells = [
        short_kind(site.kind),
        f"{site.channels:,}",
        *(f"{value:,.1f}" for value in (site.outlier, site.outlier_site)),
        number(site.sigma_spread, 2),
        f"{site.sigma_range:,.1f}",
    ]
    rest = [
        number(site.error_now, 3),
        constant(site.beta),
        "–" if site.center is None else f"{site.center:.3f}".replace("-", "−"),
        share(site.saturated),
    ]
    plain_cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    shown = "".join(three(site.error_linear, site.error_dyt, site.error_dyisru))
    tail = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
    return f'<tr><th scope="row">{breakable(site.path)}</th>{plain_cells}{shown}{tail}</tr>'


def _panel(site: SiteReport) -> str:
    errors = f"linear {site.error_linear:.3f} · DyT {site.error_dyt:.3f} · DyISRU {site.error_dyisru:.3f}"
    return panel(site.path, errors, svg_picture(Drawing(site.path, site.fit, site.picture), _alternative(site)))


def _alternative(site: SiteReport) -> str:
    """What the picture shows, in words."""
    return (
        f"Scatter of what the {site.kind} at {site.path} takes and gives, without weight and "
        f"bias; outliers of up to {site.outlier_site:.1f} sigma. Relative errors of the fitted curves: linear "
        f"{site.error_linear:.3f}, DyT {site.error_dyt:.3f}, DyISRU {site.error_dyisru:.3f}."
    )


_LEGEND = """<ul class="legend">
<li><i class="point"></i>sampled values of the norm's core, outliers drawn more often</li>
<li><i class="bar"></i>mean ± standard deviation of all values</li>
<li><i class="line dyisru"></i>DyISRU</li>
<li><i class="line dyt"></i>DyT</li>
<li><i class="line linear"></i>linear</li>
<li><i class="line bound"></i>the norm's bounds</li>
</ul>
<p class="note">Each curve has the one constant that fits the site best. Both axes are linear near 0 and logarithmic far
from it (asinh), so that a straight line through the centre stays straight and outliers stay in view.</p>"""
