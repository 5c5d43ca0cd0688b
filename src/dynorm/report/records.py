"""The reports: one record per site and one per model, printed as a table or written as a page."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar

from dynorm.family import FAMILY
from dynorm.files import write_text
from dynorm.plain import JsonObject, NotTheModel, plain
from dynorm.report.advice import about_sites, about_steps
from dynorm.report.columns import CONVERSION, INSPECTION, SiteColumn, constant
from dynorm.report.output import OutputReport
from dynorm.report.rendering import digits, rendered, table_html, wins
from dynorm.report.sizes import TokenSizes
from dynorm.report.stats import FUNCTIONS, CoreFit, OutlierFit, Picture
from dynorm.table import WIDTH, Table


@dataclass(frozen=True, kw_only=True)
class MeasuredSite:
    """One norm of a model.

    The core of a norm is its output without weight and bias: ``(x - mean) / sigma`` or ``x / rms``.

    Args:
        path: the path of the norm.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        outlier: the largest value of the core: ``|x - mean|`` in sigmas of its own token, at most
            sqrt(C - 1) (for an RMSNorm ``|x|`` in the token's rms, at most sqrt(C)).
        outlier_site: the largest ``|x - mean|`` in typical sigmas, the geometric mean over the
            site's tokens; without a bound.
        sigma_spread: standard deviation of the natural logarithm of the tokens' sigma (an RMSNorm's
            rms). At 0 all tokens are alike, and a constant serves as well as the norm; at 0.5 they
            commonly differ by a factor of 1.6.
        sigma_range: the 99th percentile of sigma over the 1st.
        sizes: the largest tokens, and how much of the sizes' variation the best 0, 1, 2 and 4
            channels could explain.
        picture: the points and bars of its picture.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    outlier: float
    outlier_site: float
    sigma_spread: float
    sigma_range: float
    sizes: TokenSizes = field(repr=False)
    picture: Picture = field(repr=False)

    def to_dict(self) -> JsonObject:
        """Return the row as plain values, without the sampled points."""
        return asdict(self, dict_factory=_without_points)


def _without_points(fields: list[tuple[str, object]]) -> dict[str, object]:
    drawn = ("picture", "sums", "points")
    return {name: value for name, value in fields if name not in drawn}


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(NotTheModel):
    """A report on a model, which prints itself as a table and writes itself as a page."""

    _template: ClassVar[str]
    _columns: ClassVar[Sequence[SiteColumn]]
    model: str
    sites: Sequence[MeasuredSite]
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, without the sampled points; None for NaN."""
        values = asdict(self) | {"sites": [site.to_dict() for site in self.sites]}
        return {name: plain(value) for name, value in values.items()}

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        columns = []
        for column in self._columns:
            if not column.only_with or self.has(column.only_with):
                columns.append(column)
        rows = [[column.value(site) for column in columns] for site in self.sites]
        title = rendered(f"{self._template}.txt", report=self).rstrip()
        return Table(columns, rows, self._notes(), title)

    def _notes(self) -> list[str]:
        """Return the lines below the table: the modules without a row."""
        return [f"{path}  not reached" for path in self.unreached]

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file.

        If it fails, no partly written file is left.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            ArgumentError: matplotlib is not installed.
            StorageError: the file cannot be written.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8)])
            >>> report.to_html(getfixture("tmp_path") / "report.html")
        """
        write_text(path, rendered(f"{self._template}.html", report=self))

    def __str__(self) -> str:
        """Return the report as a table of 80 columns."""
        return str(self.table())

    def __repr__(self) -> str:
        """Return the report in a few words."""
        sites = "1 site" if len(self.sites) == 1 else f"{len(self.sites)} sites"
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        return f"<{type(self).__name__} of {self.name}: {sites}, {batches}>"

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it."""
        table = self.table()
        return f'<p style="white-space: pre-line">{escape(table.title)}</p>{table_html(table)}'

    @property
    def name(self) -> str:
        """Return the model's name, or its class if it has none."""
        return str(self.meta.get("model", self.model))

    def has(self, name: str) -> bool:
        """Return whether an attribute, such as "witnesses", is not empty at some site."""
        return any(getattr(site, name, ()) for site in self.sites)


@dataclass(frozen=True, kw_only=True)
class SiteReport(MeasuredSite):
    """One replaced norm, with the fields of :class:`MeasuredSite` and these.

    Args:
        layer: the layer that replaced the norm: "dyisru", "dyt", "derf" or "linear".
        error_now: the error of the layer in the converted model against the norm in the original:
            root of the squared distance of their outputs over that of the norm's outputs from their
            channel's mean. 1 is as bad as a constant. None if the two cannot be paired.
        beta: the layer's constant, as the inverse square of its slope (if each channel has one,
            their median).
        center: its centre (also a median), or None.
        saturated: share of the converted layer's outputs beyond 95% of its bound; the linear
            control has no bound, so the norm's is used.
        witnesses: the layer's witness channels; empty for a function of one channel.
        gains: the weight of the square of each witness.
        explained: share of the variation of the tokens' sums that the layer's ``beta + sum g u^2``
            explains, up to a factor: 0 is no more than a constant explains, 1 is all. It is that of
            the measured tokens, with the weight ``S ** 0.5`` for a token with the sum S; the report
            of :func:`calibrate_` has the weight ``S ** 0.2``, and no factor.
        size_error: how far that sum misjudges the size of a token: standard deviation of
            ``ln(sqrt((beta + sum g u^2) / S))``, with S the norm's own sum. 0.05 is 5%.
        size_error_fit: the same on the batches ``fit_on``; None without them.
        why: why ``to="auto"`` chose the layer; empty if the caller chose it.
        sums: ``beta + sum g u^2`` and the norm's own sum of some tokens.
        fit: the curves, fitted to the core on some tokens. ``fit.errors`` has the relative error
            ``|y - f| / |y|`` of each over all other tokens and channels: "linear" is
            ``scale / sqrt(beta) (x - c)``, "dyt" is ``scale tanh((x - c) / sqrt(beta))``, and
            "dyisru" is ``scale (x - c) / sqrt(beta + (x - c)^2)``.
    """

    layer: str
    error_now: float | None
    beta: float
    center: float | None
    saturated: float | None
    witnesses: tuple[int, ...]
    gains: tuple[float, ...]
    explained: float
    size_error: float
    size_error_fit: float | None
    why: str
    sums: tuple[list[float], list[float]] = field(repr=False)
    fit: CoreFit = field(repr=False)

    def to_dict(self) -> JsonObject:
        """Return the row as plain values, with the picture's bars but without sampled points."""
        return super().to_dict() | {"bins": [asdict(interval) for interval in self.picture.bins]}

    def named_witnesses(self) -> str | None:
        """Return the witnesses with their gains as text; None if the layer has none."""
        pairs = zip(self.witnesses, self.gains, strict=True)
        return ", ".join(f"{channel} ({constant(gain)})" for channel, gain in pairs) or None


@dataclass(frozen=True)
class Continuation:
    """A held-out text as both models continue it, or held-out audio as both transcribe it.

    Both take the likeliest token at each step.
    """

    prompt: str  # the text to continue, or the audio file
    original: str  # the continuation or transcript of the original
    now: str  # that of the converted model
    # the share of places with the same token; for a transcript one minus the word error rate
    same: float
    length: int = 1  # the weight in the mean: the number of words of the original's transcript


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelReport(Report):
    """The findings of ``measure``.

    Args:
        model: the class of the model.
        sites: the replaced norms, in call order; empty if no norm is known, as in a loaded model.
        output: the model's output, compared with the original's.
        batches: how many batches were measured.
        continuations: held-out texts, continued by a language model and its original, or audio
            files, transcribed by both; only ``dynorm convert`` has them.
        unreached: paths of the layers that no batch reached.
        left: paths of the layers whose norm is not known, because the model was loaded or folded
            with them: they have no row.
        meta: facts to show with the figures: recipe, texts, seeds, versions.
    """

    _template = "conversion"
    _columns = CONVERSION
    sites: list[SiteReport]
    output: OutputReport
    left: list[str] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)

    @property
    def same(self) -> float | None:
        """Return the mean of ``Continuation.same``, weighted by length; None if there is none."""
        if not self.continuations:
            return None
        shares = [continuation.same for continuation in self.continuations]
        return fmean(shares, [continuation.length for continuation in self.continuations])

    def verdict(self) -> str:
        """Return a few sentences: the loss, the sample that lost most, and the next step."""
        return _paragraph("verdict.txt", report=self)

    def falls(self) -> list[str]:
        """Return a sentence for each stage that is kept although the held-out figure got worse."""
        sentences = []
        before: JsonObject = {}
        for name, title in _STAGES.items():
            stage = self.meta.get("stages", {}).get(name, {})
            after = stage.get("output", {})
            if not after or stage.get("kept") is False:
                continue
            change = _worse(before, after)
            if change:
                sentences.append(
                    f"The {title} is kept because it lowered the error on its own batches, but on "
                    f"{after['samples']:,} held-out samples {change}."
                )
            before = after
        return sentences

    def advice(self) -> list[str]:
        """Return the recommendation: which norms to keep, and whether more steps would help."""
        errors = {site.path: site.error_now for site in self.sites if site.error_now is not None}
        training = self.meta.get("stages", {}).get("distill", {})
        return [words for words in (about_sites(errors), about_steps(training)) if words]

    def __str__(self) -> str:
        """Return the report as a table of 80 columns, with the recommendation below."""
        sentences = [textwrap.fill(sentence, WIDTH) for sentence in self.advice()]
        return "\n\n".join([super().__str__(), *sentences])

    def stray(self) -> SiteReport | None:
        """Return the site whose layer is farthest from its norm; None if no error is known."""
        known = [site for site in self.sites if site.error_now is not None]
        return max(known, key=lambda site: site.error_now or 0.0, default=None)

    def layers(self) -> list[str]:
        """Return the titles of the layers that replaced the norms."""
        titles = set()
        for site in self.sites:
            titles.add(FAMILY[site.layer].title if site.layer in FAMILY else site.layer)
        return sorted(titles)

    def _notes(self) -> list[str]:
        left = [f"{path}  not compared, its norm is not known" for path in self.left]
        return super()._notes() + left


@dataclass(frozen=True, kw_only=True)
class InspectedSite(MeasuredSite):
    """One norm and its outliers, with the fields of :class:`MeasuredSite` and these.

    An outlier is the channel of a token that is farthest from the mean (for an RMSNorm from 0). The
    functions are "linear", "dyt" (scaled) and "dyisru"; each has one constant per site, fitted on
    some tokens and measured on others.

    Args:
        outliers: how well the functions describe outliers when fitted only on outliers, as in
            section 4.2.
        core: how well they describe all channels when fitted on all channels.
    """

    outliers: OutlierFit = field(repr=False)
    core: CoreFit = field(repr=False)

    @property
    def alpha(self) -> float:
        """Return DyT's constant, fitted on the outliers: ``1 / sqrt(beta)`` of the same slope."""
        return 1 / math.sqrt(self.outliers.fit.betas["dyt"])

    @property
    def beta(self) -> float:
        """Return DyISRU's constant, fitted on the outliers."""
        return self.outliers.fit.betas["dyisru"]

    @property
    def ratio(self) -> float:
        """Return DyT's mean absolute residual on outliers over DyISRU's: above 1 if it holds."""
        residuals = self.outliers.residuals
        return residuals["dyt"] / max(residuals["dyisru"], 1e-300)

    @property
    def holds(self) -> bool:
        """Return whether DyISRU's residual on outliers is below DyT's, as the paper claims."""
        return self.outliers.residuals["dyisru"] < self.outliers.residuals["dyt"]

    def to_dict(self) -> JsonObject:
        """Return the row as plain values, without the sampled points."""
        return super().to_dict() | {"alpha": self.alpha, "beta": self.beta, "holds": self.holds}


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

    _template = "inspection"
    _columns = INSPECTION
    sites: list[InspectedSite]
    refused: dict[str, str] = field(default_factory=dict)

    def summary(self) -> JsonObject:
        """Return at how many sites the paper's claim holds, and by how much."""
        ratios = [site.ratio for site in self.sites]
        core = [site.core.errors for site in self.sites]
        residuals = [site.outliers.residuals for site in self.sites]
        return {
            "sites": len(self.sites),
            "holds": sum(site.holds for site in self.sites),
            "outliers_best": wins(residuals),
            "core_best": wins(core),
            "core_holds": sum(errors["dyisru"] < errors["dyt"] for errors in core),
            "ratio_median": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "exact": max(site.outliers.exact for site in self.sites),
            "massive": [site.path for site in self.sites if site.sizes.massive],
        }

    def to_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, without the sampled points."""
        return super().to_dict() | {"summary": plain(self.summary())}

    def massive(self) -> str:
        """Return sentences: whether the model has massive activations, and on which tokens."""
        return _paragraph("massive.txt", report=self)

    def findings(self) -> str:
        """Return a few sentences: at how many norms the paper's claim holds, and by how much."""
        spreads = [site.outliers.beta_spread for site in self.sites]
        span = (math.exp(min(spreads)), math.exp(max(spreads)))
        titles = {name: FAMILY[name].title for name in FUNCTIONS}
        return _paragraph("findings.txt", summary=self.summary(), titles=titles, span=span)

    def _notes(self) -> list[str]:
        refused = [f"{path}  left out: {reason}" for path, reason in self.refused.items()]
        return super()._notes() + refused


# The stages after calibration, by their names in the meta of a report.
_STAGES = {"calibrate": "calibration", "refine": "refinement", "distill": "distillation"}
# The figures of an OutputReport, the first that applies: the field, its words, and whether more is
# better.
_MAIN_FIGURES = (
    ("loss_now", "the loss", False),
    ("spearman", "the rank correlation", True),
    ("error", "the error of the output", False),
    ("cosine_mean", "the mean cosine", True),
)


def _worse(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return in words how the main figure got worse from one output report to the next, or ""."""
    for name, words, more_is_better in _MAIN_FIGURES:
        old = before.get(name)
        new = after.get(name)
        if old is None or new is None:
            continue
        is_worse = new < old if more_is_better else new > old
        # Only a change that is seen in the figures is worth a sentence.
        if not is_worse or digits(old) == digits(new):
            return ""
        verb = "fell" if more_is_better else "rose"
        return f"{words} {verb} from {digits(old)} to {digits(new)}"
    return ""


def _paragraph(template: str, **values: object) -> str:
    """Return the text of a template as one line."""
    return " ".join(rendered(template, **values).split())
