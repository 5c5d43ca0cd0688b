"""The columns of the reports' tables, in their order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynorm.family import FAMILY
from dynorm.report.rendering import digits
from dynorm.table import Column


@dataclass(frozen=True, kw_only=True)
class SiteColumn(Column):
    """A column of a report's table, with one value for each site."""

    value: Callable[[Any], Any]  # takes a row of the report, such as a SiteReport
    # Show the column only if this attribute of a site is not empty.
    only_with: str = ""


def constant(value: float) -> str:
    """Return a constant as a table shows it: an integer if it is large, else three digits."""
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"


def _share(value: float) -> str:
    """Return a share in percent; only 0 is shown as 0."""
    if not value:
        return "0"
    return f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def _norm(kind: str) -> str:
    return {"layernorm": "LN", "rmsnorm": "RMS"}.get(kind, kind)


def _curves(
    group: str,
    note: str,
    errors: Callable[[Any], Mapping[str, float]],
    page_only: bool = False,
) -> list[SiteColumn]:
    """Return the columns of a group that compares the three curves."""

    def column(name: str, note: str) -> SiteColumn:
        return SiteColumn(
            FAMILY[name].title,
            ".3f",
            note,
            group,
            page_only,
            value=lambda site: errors(site)[name],
        )

    return [
        column("linear", note),
        column("dyt", "f = √(C−1) tanh((x − c)/√(β)), where 1/√(β) is α"),
        column("dyisru", "f = √(C−1) (x − c)/√(β + (x − c)²)"),
    ]


def _explained(count: int, only_with: str = "") -> SiteColumn:
    """Return the column of the variation that some number of channels explain."""
    channels, ending = f"the best {count} channels", ""
    if count == 1:
        channels, ending = "the best channel", "s"
    return SiteColumn(
        f"by {count}",
        ".0%",
        f"share of the variation of the tokens' sums that {channels} explain{ending}",
        page_only=True,
        only_with=only_with,
        value=lambda site: site.sizes.explained[count],
    )


_SITE = SiteColumn("site", value=lambda site: site.path)
_NORM = SiteColumn("norm", _norm, value=lambda site: site.kind)
_CHANNELS = SiteColumn("C", ",", "channels", page_only=True, value=lambda site: site.channels)
_OUTLIER = SiteColumn(
    "outlier",
    ",.1f",
    "largest |x − mean|, in the σ of its token; √(C−1) at most",
    value=lambda site: site.outlier,
)
_SPREAD = SiteColumn(
    "σ spread",
    ".2f",
    "standard deviation of ln σ over the tokens; at 0 a constant is as good as the norm",
    page_only=True,
    value=lambda site: site.sigma_spread,
)

# Columns of one group are compared: in text the note of the first one is the note of the group.
CONVERSION = [
    _SITE,
    _NORM,
    SiteColumn("layer", only_with="why", value=lambda site: site.layer),
    SiteColumn(
        "error",
        digits,
        "distance of the layer's output from that of the norm; 1 is as bad as a constant",
        value=lambda site: site.error_now,
    ),
    SiteColumn(
        "saturated",
        _share,
        "share of values beyond 95% of the layer's bound",
        value=lambda site: site.saturated,
    ),
    _OUTLIER,
    SiteColumn(
        "β", constant, "the layer's constant, or their median", value=lambda site: site.beta
    ),
    SiteColumn(
        "witnesses",
        note="how many channels the layer reads to estimate a token's size",
        only_with="witnesses",
        value=lambda site: len(site.witnesses),
    ),
    SiteColumn(
        "explained",
        ".0%",
        "share of the variation of the tokens' sums that the layer's β + sum g u² explains",
        only_with="witnesses",
        value=lambda site: site.explained,
    ),
    SiteColumn(
        "why",
        note="why this layer was chosen, with the errors of all candidates on held-out tokens "
        "before training",
        page_only=True,
        only_with="why",
        value=lambda site: site.why,
    ),
    _CHANNELS,
    SiteColumn(
        "largest value",
        ",.1f",
        "the largest |x − mean| in the site's typical σ, which is without a bound",
        page_only=True,
        value=lambda site: site.outlier_site,
    ),
    _SPREAD,
    SiteColumn(
        "σ p99/p1",
        ",.1f",
        "99th percentile of the tokens' σ over the 1st",
        page_only=True,
        value=lambda site: site.sigma_range,
    ),
    *_curves(
        "relative error",
        "|y − f| / |y| of the norm's core y and a function f of one constant",
        lambda site: site.fit.errors,
        page_only=True,
    ),
    SiteColumn(
        "centre",
        digits,
        "subtracted before the function; the median if there are several",
        page_only=True,
        value=lambda site: site.center,
    ),
    SiteColumn(
        "channels",
        note="the witnesses, each with its gain",
        page_only=True,
        only_with="witnesses",
        value=lambda site: site.named_witnesses(),
    ),
    _explained(1, "witnesses"),
    _explained(2, "witnesses"),
    _explained(4, "witnesses"),
]

INSPECTION = [
    _SITE,
    _NORM,
    _CHANNELS,
    _OUTLIER,
    _SPREAD,
    *_curves(
        "outliers",
        "mean |y − f| of the norm's core y and a function f of one constant",
        lambda site: site.outliers.residuals,
    ),
    SiteColumn(
        "ratio",
        ".2f",
        "residual of DyT over that of DyISRU; the paper claims that it is above 1",
        value=lambda site: site.ratio,
    ),
    SiteColumn(
        "α",
        ".3g",
        "DyT's constant, fitted on outliers",
        page_only=True,
        value=lambda site: site.alpha,
    ),
    SiteColumn(
        "β",
        constant,
        "DyISRU's constant, fitted on outliers",
        page_only=True,
        value=lambda site: site.beta,
    ),
    SiteColumn(
        "own β spread",
        ".2f",
        "standard deviation of ln of the β that each outlier would need",
        page_only=True,
        value=lambda site: site.outliers.beta_spread,
    ),
    SiteColumn(
        "size",
        ",.1f",
        "σ of the largest token over the median one's",
        page_only=True,
        value=lambda site: site.sizes.largest.size,
    ),
    SiteColumn(
        "channel",
        note="the largest one of that token",
        page_only=True,
        value=lambda site: site.sizes.largest.channel,
    ),
    SiteColumn(
        "share",
        ".0%",
        "share of the token's sum of squares in that channel",
        page_only=True,
        value=lambda site: site.sizes.largest.share,
    ),
    SiteColumn(
        "on",
        note="the largest tokens: text or number, and position",
        page_only=True,
        value=lambda site: site.sizes.places(),
    ),
    _explained(1),
    _explained(2),
    _explained(4),
    *_curves(
        "all channels",
        "|y − f| / |y|, fitted and measured on all channels",
        lambda site: site.core.errors,
    ),
]
