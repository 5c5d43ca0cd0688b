"""The report of ``inspect_norms``: massive activations, outliers and curves, in figures and in sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from dynorm.family import FAMILY
from dynorm.report.curves import CurveFit, Picture
from dynorm.report.report import KINDS, Report
from dynorm.table import Table, count_of, digits

# An activation is called massive if its channel makes a token larger than usual by this factor.
_MASSIVE = 3.0
# With a spread of the tokens' sizes below this, a layer without witnesses loses little.
_ALIKE = 0.2
_OUTLIER = "outlier: the largest |x − mean| in the σ of its token; √(C−1) at most"
_SPREAD = "σ spread: standard deviation of ln σ over the tokens; 0 if all have one size"


@dataclass(frozen=True, kw_only=True)
class InspectedSite:
    """One norm before its replacement.

    The core of a norm is its output without weight and bias: ``(x - mean) / sigma`` or ``x / rms``.

    Args:
        path: the path of the norm.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        outlier: the largest value of the core: ``|x - mean|`` in sigmas of its own token, at most
            sqrt(C - 1) (for an RMSNorm ``|x|`` in the token's rms, at most sqrt(C)).
        sigma_spread: standard deviation of the natural logarithm of the tokens' sigma (an RMSNorm's
            rms). At 0 all tokens are alike, and a constant serves as well as the norm; at 0.5 they
            commonly differ by a factor of 1.6.
        core: curves of one constant, fitted to a sample of the core's values.
        outliers: the same, fitted only to outliers: the channel of each token that is farthest from
            the mean (for an RMSNorm from 0), as in section 4.2.
        picture: the points of its picture; not in the JSON of a report.
        largest: sigma (an RMSNorm's rms) of the largest token over the typical one.
        channel: the largest channel of that token.
        share: the part of its sum of squares that this channel holds.
        explained: the share of the variation of the tokens' sizes that the best 1 and 4 channels
            explain; a constant explains 0.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    outlier: float
    sigma_spread: float
    core: CurveFit = field(repr=False)
    outliers: CurveFit = field(repr=False)
    picture: Picture = field(repr=False)
    largest: float
    channel: int
    share: float
    explained: dict[int, float]

    def caption(self) -> str:
        """Return the relative errors of the curves."""
        return " · ".join(f"{FAMILY[name].title} {e:.3f}" for name, e in self.core.errors.items())

    @property
    def massive(self) -> bool:
        """Whether one channel holds most of the largest token, and that is over 3 times the usual size."""
        return self.largest > _MASSIVE and self.share > 0.5

    @property
    def ratio(self) -> float:
        """Return DyT's error on outliers over DyISRU's: above 1 if the paper's claim holds."""
        return self.outliers.errors["dyt"] / max(self.outliers.errors["dyisru"], 1e-300)


@dataclass(frozen=True, kw_only=True, repr=False)
class InspectionReport(Report):
    """The findings of :func:`inspect_norms`.

    Args:
        model: the class of the model.
        sites: the norms, in call order.
        batches: how many batches were measured.
        refused: paths of modules that look like a norm but cannot be replaced, with the reason.
        unreached: paths of the norms that no batch reached.
        meta: facts to show with the figures: recipe, texts, seeds, versions.
    """

    _template = "inspection.html"
    sites: list[InspectedSite]
    refused: dict[str, str] = field(default_factory=dict)

    def title(self) -> str:
        """Return one line: how many norms there are."""
        norms = count_of(len(self.sites), "norm")
        return f"{self.name}: {norms}, and functions with one constant per norm"

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        titles = [FAMILY[name].title for name in self.sites[0].outliers.errors]
        columns = ["site", "norm", "outlier", "σ spread", *titles, "ratio", "by 1", "by 4"]
        rows = []
        for site in self.sites:
            errors = [digits(error) for error in site.outliers.errors.values()]
            rows.append(
                [
                    site.path,
                    KINDS[site.kind],
                    f"{site.outlier:,.1f}",
                    f"{site.sigma_spread:.2f}",
                    *errors,
                    f"{site.ratio:.2f}",
                    f"{site.explained[1]:.0%}",
                    f"{site.explained[4]:.0%}",
                ]
            )
        notes = [f"{path}: not reached" for path in self.unreached]
        notes += [f"{path}: left out, {reason}" for path, reason in self.refused.items()]
        meanings = [
            _OUTLIER,
            _SPREAD,
            f"{', '.join(titles)}: curve error |y − f| / |y| of the best constant on outliers",
            "ratio: DyT's curve error over DyISRU's; the paper claims that it is above 1",
            "by 1, by 4: share of the variation of the tokens' sums that 1 and 4 channels explain",
        ]
        return Table(columns, rows, notes + meanings)

    def advice(self) -> list[str]:
        """Return sentences about large tokens, about outliers, and about strict layers."""
        return [
            _about_massive(self.sites),
            _about_outliers(self.sites),
            _about_strictness(self.sites),
        ]


def _about_massive(sites: Sequence[InspectedSite]) -> str:
    """Return a sentence: whether the model has massive activations, and in which channels."""
    massive = [site for site in sites if site.massive]
    worst = max(massive or sites, key=lambda site: site.largest)
    if not massive:
        return (
            "No massive activations: no token whose sum is mostly in one channel is more than 3 "
            f"times the usual size. The largest is {worst.largest:.1f} times that size."
        )
    channels = ", ".join(dict.fromkeys(str(site.channel) for site in massive))
    return (
        f"Massive activations at {len(massive)} of {count_of(len(sites), 'norm')}, in channel "
        f"{channels}. The largest token is {worst.largest:,.1f} times the usual size, with "
        f"{worst.share:.0%} of its sum in channel {worst.channel}, at {worst.path}."
    )


def _about_outliers(sites: Sequence[InspectedSite]) -> str:
    """Return a sentence: at how many norms the paper's claim holds, and by how much."""
    ratios = [site.ratio for site in sites]
    holds = sum(ratio > 1 for ratio in ratios)
    return (
        "The paper claims that DyISRU fits outliers better than DyT. Here its error is smaller at "
        f"{holds} of {count_of(len(ratios), 'norm')}. The ratio of DyT's error to DyISRU's is "
        f"{min(ratios):.2f} to {max(ratios):.2f}, with a median of {median(ratios):.2f}."
    )


def _about_strictness(sites: Sequence[InspectedSite]) -> str:
    """Return advice: where a layer without witnesses is enough, and where a few would help."""
    varied = [site for site in sites if site.sigma_spread >= _ALIKE]
    helped = [site for site in varied if site.explained[4] >= 0.5]
    words = (
        "A strict layer, of which each value depends on its own channel, loses little at "
        f"{len(sites) - len(varied)} of {count_of(len(sites), 'norm')}, where the σ spread is below "
        f"{_ALIKE}."
    )
    if not varied:
        return words
    return (
        f"{words} At the others the sizes of tokens vary: distil the model after the conversion. At "
        f"{len(helped)} of them four channels explain more than half of the variation, so that "
        "witnesses=4 would help without training."
    )
