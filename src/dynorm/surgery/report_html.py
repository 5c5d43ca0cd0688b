"""The report as one HTML page that needs no other file: headline figures, a row a site, and a picture of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dynorm.files import write_text
from dynorm.surgery.report import ModelReport, SiteReport
from dynorm.surgery.report_picture import picture
from dynorm.surgery.report_text import number, plain, share

_KINDS = {"layernorm": "LN", "rmsnorm": "RMS"}
_NAMES = {"dyisru": "DyISRU", "dyt": "DyT", "derf": "Derf", "linear": "linear"}

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
        _table(report.sites),
        *(_unreached(report.unreached) if report.unreached else ()),
        _column_notes(),
        "<h2>Input and output of every norm</h2>",
        _LEGEND,
        f'<div class="grid">{"".join(_panel(site) for site in report.sites)}</div>',
        *(("<h2>How it was made</h2>", _meta(report.meta)) if report.meta else ()),
    ]
    return _PAGE.format(title=escape(f"dynorm: {name}"), style=_STYLE, body="\n".join(parts))


def _lead(report: ModelReport) -> str:
    layers = sorted({_NAMES.get(site.layer, site.layer) for site in report.sites})
    count = len(report.sites)
    what = f"{count} norm{'s' * (count != 1)} replaced by {' and '.join(layers)}, "
    return f"{what}and compared with the original on {report.output.samples:,} held-out samples."


def _cards(report: ModelReport) -> Iterable[str]:
    out = report.output
    what = {"encoder": "of sentence embeddings", "language": "of logits", "tensor": "of outputs"}[out.kind]
    yield _card(number(out.cosine_mean, 3), "mean cosine", f"{what}, converted to original")
    yield _card(number(out.cosine_min, 3), "worst cosine", f"5 % of samples are below {number(out.cosine_p05, 3)}")
    if out.kind == "encoder":
        yield _card(number(out.spearman, 3), "Spearman", "of the similarities of all pairs")
    if out.loss_difference is not None:
        losses = f"nats a token: {number(out.loss_original, 3)} to {number(out.loss_now, 3)}"
        yield _card(f"{out.loss_difference:+.3f}".replace("-", "−"), "loss", losses)
        yield _card(number(out.kl, 3), "KL divergence", "nats a token, from the original")
    best = sum(site.error_dyisru < min(site.error_dyt, site.error_linear) for site in report.sites)
    yield _card(f"{best} of {len(report.sites)}", "sites", "where DyISRU fits the core best of the three")
    worst = max(report.sites, key=lambda site: site.outlier_site)
    yield _card(f"{worst.outlier_site:,.0f} σ", "largest outlier", _breakable(worst.path))


def _card(value: str, label: str, note: str) -> str:
    """A figure with its name, and a note that is HTML already."""
    return f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{note}</dd></div>"


def _table(sites: Sequence[SiteReport]) -> str:
    head = "".join(f'<th scope="col" title="{escape(note)}">{escape(title)}</th>' for title, note in _COLUMNS)
    rows = "".join(_row(site) for site in sites)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of sites">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(site: SiteReport) -> str:
    errors = (site.error_linear, site.error_dyt, site.error_dyisru)
    cells = [
        _KINDS.get(site.kind, site.kind),
        f"{site.channels:,}",
        *(f"{value:,.1f}" for value in (site.outlier, site.outlier_site)),
        number(site.sigma_spread, 2),
        f"{site.sigma_range:,.1f}",
    ]
    rest = [
        number(site.error_now, 3),
        f"{site.beta:,.0f}" if 100 <= site.beta < 1e9 else f"{site.beta:.3g}",
        "–" if site.center is None else f"{site.center:.3f}".replace("-", "−"),
        share(site.saturated),
    ]
    plain_cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    shown = "".join(f"<td{' class=best' * (e == min(errors))}>{number(e, 3)}</td>" for e in errors)
    tail = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
    return f'<tr><th scope="row">{_breakable(site.path)}</th>{plain_cells}{shown}{tail}</tr>'


def _breakable(path: str) -> str:
    """The path, escaped, which may break after its dots and underscores."""
    return escape(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _unreached(paths: Sequence[str]) -> list[str]:
    return [f"<p>Not reached by any batch: {escape(', '.join(paths))}.</p>"]


def _column_notes() -> str:
    rows = "".join(f"<dt>{escape(title)}</dt><dd>{escape(note)}</dd>" for title, note in _COLUMNS[3:])
    return f'<details><summary>What the columns say</summary><dl class="notes">{rows}</dl></details>'


def _panel(site: SiteReport) -> str:
    errors = f"linear {site.error_linear:.3f} · DyT {site.error_dyt:.3f} · DyISRU {site.error_dyisru:.3f}"
    return (
        f"<figure><figcaption><b>{_breakable(site.path)}</b><span>{errors}</span></figcaption>"
        f"{picture(site, _alternative(site))}</figure>"
    )


def _alternative(site: SiteReport) -> str:
    """What the picture shows, in words."""
    return (
        f"Scatter of what the {site.kind} at {site.path} takes and gives, without weight and "
        f"bias; outliers of up to {site.outlier_site:.1f} sigma. Relative errors of the fitted curves: linear "
        f"{site.error_linear:.3f}, DyT {site.error_dyt:.3f}, DyISRU {site.error_dyisru:.3f}."
    )


def _meta(meta: dict[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{_value(plain(value))}</dd>" for key, value in meta.items())
    return f'<dl class="notes">{rows}</dl>'


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key))}: {_value(item)}" for key, item in value.items())
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


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

_STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --ink: #1f2328; --soft: #5c6570; --edge: #dfdcd6;
  --dyisru: #1a5fd0; --dyt: #c2410c; --linear: #5f7a3a; --point: #b4b9bf; --bar: #333a42; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e8e6e3; --soft: #a3abb5;
  --edge: #343a42; --dyisru: #78acff; --dyt: #ff9a62; --linear: #a9cb7b; --point: #5d646d; --bar: #d5dae0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .25rem; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .8rem; font-size: 1.2rem; }
.lead, .note { margin: 0 0 1.2rem; color: var(--soft); max-width: 46rem; }
.note, .legend, .notes { font-size: .875rem; }
dl, dd, figure { margin: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
.cards div, figure, .scroll { background: var(--card); border: 1px solid var(--edge); border-radius: .5rem; }
.cards div { display: flex; flex-direction: column; padding: .75rem .9rem; min-width: 0; }
.cards dt { font-size: .875rem; color: var(--soft); }
.cards dd { font-size: 1.6rem; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.cards dd + dd { font-size: .8rem; font-weight: 400; color: var(--soft); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .5rem; text-align: right; white-space: nowrap; }
thead th { font-weight: 500; color: var(--soft); vertical-align: bottom; white-space: normal; }
tbody tr { border-top: 1px solid var(--edge); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
tbody th { font-weight: 400; }
tbody th wbr { display: none; }
thead th:nth-child(2), td:nth-child(2) { text-align: left; }
.best { font-weight: 700; color: var(--dyisru); }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
.notes { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin-top: .6rem; }
.notes dt { color: var(--soft); }
.notes dd { overflow-wrap: anywhere; min-width: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; margin: 0 0 .6rem; padding: 0; }
.legend li { display: flex; align-items: center; gap: .45rem; }
.legend i { display: inline-block; width: 1.5rem; flex: none; }
.legend .line { border-top: 2.5px solid; }
.legend .dyisru { border-color: var(--dyisru); }
.legend .dyt { border-color: var(--dyt); border-top-style: dashed; }
.legend .linear { border-color: var(--linear); border-top-style: dotted; }
.legend .bound { border-color: var(--soft); border-top: 1px dashed; }
.legend .point { width: .5rem; height: .5rem; border-radius: 50%; background: var(--point); }
.legend .bar { width: 0; height: 1.1rem; border-left: 2px solid var(--bar); }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: .75rem; }
figure { padding: .7rem .8rem .4rem; min-width: 0; }
figcaption { font-size: .84rem; overflow-wrap: anywhere; }
figcaption span { display: block; color: var(--soft); font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; }
@media (max-width: 34rem) { .notes { grid-template-columns: 1fr; gap: 0; } .notes dd { margin-bottom: .5rem; }
  th, td { padding: .35rem .45rem; } tbody th { min-width: 8rem; white-space: normal; overflow-wrap: anywhere; }
  tbody th wbr { display: inline; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
