"""The reports: one record per site and one per model, printed as a table or written as a page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

from dynorm.family import FAMILY
from dynorm.files import write_text
from dynorm.plain import JsonObject, NotTheModel, PlainRecord, plain
from dynorm.report import words
from dynorm.report.output import OutputReport
from dynorm.report.rendering import rendered, table_html
from dynorm.report.sizes import TokenSizes
from dynorm.report.values import CurveFit, Picture
from dynorm.report.words import count_of, digits
from dynorm.table import Table, wrapped

_KINDS = {"layernorm": "LN", "rmsnorm": "RMS"}
_OUTLIER = "outlier: the largest |x − mean| in the σ of its token; √(C−1) at most"
_SPREAD = "σ spread: standard deviation of ln σ over the tokens; 0 if all have one size"
_NO_PICTURE = Picture([], [], [], [], 1.0)


@dataclass(frozen=True, kw_only=True)
class MeasuredSite(PlainRecord):
    """One norm of a model.

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
        picture: the points of its picture.
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

    def to_dict(self) -> JsonObject:
        """Return the row as plain values, without the sampled points."""
        values = super().to_dict()
        del values["picture"]
        return values

    def caption(self) -> str:
        """Return the relative errors of the curves."""
        return " · ".join(f"{FAMILY[name].title} {e:.3f}" for name, e in self.core.errors.items())


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
        witnesses: the channels that the layer reads besides each value's own.
        gains: the weight of the square of each.
        annealing: whether the layer is still a norm in part.
    """

    layer: str
    error_now: float | None
    beta: float
    center: float | None
    witnesses: tuple[int, ...]
    gains: tuple[float, ...]
    annealing: bool = False


@dataclass(frozen=True, kw_only=True)
class InspectedSite(MeasuredSite):
    """One norm before its replacement, with the fields of :class:`MeasuredSite` and this one.

    Args:
        sizes: the largest tokens, and how much of the sizes' variation the best 0, 1, 2 and 4
            channels could explain.
    """

    sizes: TokenSizes = field(repr=False)

    @property
    def ratio(self) -> float:
        """Return DyT's error on outliers over DyISRU's: above 1 if the paper's claim holds."""
        return self.outliers.errors["dyt"] / max(self.outliers.errors["dyisru"], 1e-300)

    @property
    def holds(self) -> bool:
        """Return whether DyISRU's error on outliers is below DyT's, as the paper claims."""
        return self.outliers.errors["dyisru"] < self.outliers.errors["dyt"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(NotTheModel):
    """A report on a model, which prints itself as a table and writes itself as a page."""

    _template: ClassVar[str]
    model: str
    sites: Sequence[MeasuredSite]
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, without the sampled points; None for NaN."""
        values = asdict(self) | {"sites": [site.to_dict() for site in self.sites]}
        return {name: plain(value) for name, value in values.items()}

    def title(self) -> str:
        """Return one line: the model, and the treatment of its norms."""
        raise NotImplementedError

    def advice(self) -> list[str]:
        """Return the recommendations, each a few sentences."""
        raise NotImplementedError

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        raise NotImplementedError

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
        write_text(path, rendered(self._template, report=self))

    def __str__(self) -> str:
        """Return the report as text: the title, the findings, the table and the advice."""
        advice = [wrapped(sentences) for sentences in self.advice()]
        parts = [self.title(), *self._findings(), str(self.table()), *advice]
        return "\n\n".join(part for part in parts if part)

    def _findings(self) -> list[str]:
        """Return the paragraphs between the title and the table."""
        return []

    def __repr__(self) -> str:
        """Return the report in a few words."""
        sites = count_of(len(self.sites), "site")
        return f"<{type(self).__name__} of {self.name}: {sites}, {self.batches} batches>"

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it."""
        return f"<p>{escape(self.title())}</p>{table_html(self.table())}"

    @property
    def name(self) -> str:
        """Return the model's name, or its class if it has none."""
        return str(self.meta.get("model", self.model))


@dataclass(frozen=True)
class Continuation:
    """A held-out text as both models continue it, with the likeliest token at each step."""

    prompt: str
    original: str  # the continuation of the original
    now: str  # that of the converted model
    same: float  # the share of places with the same token


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelReport(Report):
    """The findings of ``measure``.

    Args:
        model: the class of the model.
        sites: the replaced norms, in call order; empty if all were folded.
        output: the model's output, compared with the original's.
        batches: how many batches were measured.
        kept: paths of the norms that the model still has.
        continuations: held-out texts, continued by a language model and its original; only
            ``dynorm convert`` has them.
        unreached: paths of the layers that no batch reached.
        left: paths of the layers that cannot be compared with a norm, because they were folded, or
            the original has them too: they have no row.
        meta: facts to show with the figures: recipe, texts, seeds, versions, and the ``output``
            after some ``stages``.
    """

    _template = "conversion.html"
    sites: list[SiteReport]
    output: OutputReport
    kept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the report from its values, which :meth:`to_dict` made; it has no pictures."""
        arguments = dict(values)
        arguments["output"] = OutputReport(**values["output"])
        arguments["continuations"] = [Continuation(**row) for row in values["continuations"]]
        arguments["sites"] = []
        for row in values["sites"]:
            site = dict(row, picture=_NO_PICTURE)
            for name in ("core", "outliers"):
                site[name] = CurveFit(**row[name])
            for name in ("witnesses", "gains"):
                site[name] = tuple(row[name])
            arguments["sites"].append(SiteReport(**site))
        return cls(**arguments)

    @property
    def same(self) -> float | None:
        """Return the mean of ``Continuation.same``; None if there is none."""
        if not self.continuations:
            return None
        return fmean(continuation.same for continuation in self.continuations)

    def title(self) -> str:
        """Return one line: the norms that were replaced, and the channels that a value depends on."""
        if not self.sites:
            return f"{self.name}: only the output is compared, because no norm is known"
        norms = count_of(len(self.sites), "norm")
        return (
            f"{self.name}: {norms} replaced by {' and '.join(self.layers())}, {len(self.kept)} "
            f"kept; {words.dependence(self.sites)}"
        )

    def verdict(self) -> str:
        """Return a few sentences: the channels that a value depends on, the loss, and the next step."""
        return words.verdict(self)

    def advice(self) -> list[str]:
        """Return the recommendation: which norms to keep, and whether more steps would help."""
        errors = {site.path: site.error_now for site in self.sites if site.error_now is not None}
        training = self.meta.get("stages", {}).get("distill", {})
        sentences = [words.about_sites(errors), words.about_steps(training)]
        return [sentence for sentence in sentences if sentence]

    def stages(self) -> Table | None:
        """Return the figures without training and distilled side by side, if they are known."""
        return words.stage_table(self)

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        columns = ["site", "norm", "layer", "error", "β", "named channels", "outlier", "σ spread"]
        rows = []
        for site in self.sites:
            rows.append(
                [
                    site.path,
                    _KINDS.get(site.kind, site.kind),
                    site.layer,
                    digits(site.error_now),
                    site.beta,
                    " ".join(map(str, site.witnesses)) or "–",
                    f"{site.outlier:,.1f}",
                    f"{site.sigma_spread:.2f}",
                ]
            )
        notes = [f"{path}: not reached" for path in self.unreached]
        notes += [f"{path}: kept" for path in self.kept]
        notes += [f"{path}: not compared, its norm is not known" for path in self.left]
        meaning = "error: distance of the layer's output from the norm's; 1 is as bad as a constant"
        return Table(columns, rows, [*notes, meaning, _OUTLIER, _SPREAD])

    def _findings(self) -> list[str]:
        stages = self.stages()
        return [wrapped(self.verdict()), str(stages or "")]

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

    def advice(self) -> list[str]:
        """Return sentences about large tokens, about outliers, and about strict layers."""
        return [
            words.about_massive(self),
            words.about_outliers(self),
            words.about_strictness(self),
        ]

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
                    _KINDS.get(site.kind, site.kind),
                    f"{site.outlier:,.1f}",
                    f"{site.sigma_spread:.2f}",
                    *errors,
                    f"{site.ratio:.2f}",
                    f"{site.sizes.explained[1]:.0%}",
                    f"{site.sizes.explained[4]:.0%}",
                ]
            )
        notes = [f"{path}: not reached" for path in self.unreached]
        notes += [f"{path}: left out, {reason}" for path, reason in self.refused.items()]
        meanings = [
            _OUTLIER,
            _SPREAD,
            f"{', '.join(titles)}: error |y − f| / |y| of the function on outliers",
            "ratio: DyT's error over DyISRU's; the paper claims that it is above 1",
            "by 1, by 4: share of the variation of the tokens' sums that one channel and four channels explain",
        ]
        return Table(columns, rows, notes + meanings)
