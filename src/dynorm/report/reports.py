"""The reports on a model: each prints itself as a table, and writes itself as a page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from dynorm.family import FAMILY
from dynorm.files import write_text
from dynorm.plain import JsonObject, NotTheModel, plain
from dynorm.report import words
from dynorm.report.output import OutputReport
from dynorm.report.records import InspectedSite, SiteReport
from dynorm.report.rendering import rendered
from dynorm.report.words import count_of, digits
from dynorm.table import Table, wrapped

_KINDS = {"layernorm": "LN", "rmsnorm": "RMS"}
_OUTLIER = "outlier: the largest |x − mean| in the σ of its token; √(C−1) at most"
_SPREAD = "σ spread: standard deviation of ln σ over the tokens; 0 if all have one size"


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(NotTheModel):
    """A report on a model, which prints itself as a table and writes itself as a page."""

    _template: ClassVar[str]
    model: str
    sites: Sequence[SiteReport] | Sequence[InspectedSite]
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, without the sampled points; None for NaN."""
        values: JsonObject = plain(asdict(self))
        for site in values["sites"]:
            site.pop("picture", None)
        return values

    def title(self) -> str:
        """Return one line: the model, and the treatment of its norms."""
        raise NotImplementedError

    def findings(self) -> list[str]:
        """Return the paragraphs between the title and the table."""
        return []

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        raise NotImplementedError

    def advice(self) -> list[str]:
        """Return the recommendations, each a few sentences or nothing."""
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
        parts = [self.title(), *self.findings(), str(self.table()), *map(wrapped, self.advice())]
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        """Return the report in a few words."""
        sites = count_of(len(self.sites), "site")
        return f"<{type(self).__name__} of {self.name}: {sites}, {self.batches} batches>"

    @property
    def name(self) -> str:
        """Return the model's name, or its class if it has none."""
        return str(self.meta.get("model", self.model))


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelReport(Report):
    """The findings of ``measure``.

    Args:
        model: the class of the model.
        sites: the replaced norms, in call order; empty if all were folded.
        output: the model's output, compared with the original's.
        batches: how many batches were measured.
        kept: paths of the norms that the model still has.
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

    def title(self) -> str:
        """Return one line: the norms that were replaced, and by which layers."""
        if not self.sites:
            return f"{self.name}: only the output is compared, because no norm is known"
        layers = set()
        for site in self.sites:
            layers.add(FAMILY[site.layer].title if site.layer in FAMILY else site.layer)
        norms = count_of(len(self.sites), "norm")
        return f"{self.name}: {norms} replaced by {' and '.join(sorted(layers))}, {len(self.kept)} kept"

    def verdict(self) -> str:
        """Return a few sentences: the channels that a value depends on, the loss, and the next step."""
        sentences = []
        if self.sites:
            depends = words.dependence(self.sites)
            sentences.append(f"{depends[0].upper()}{depends[1:]}.")
        stages = self.meta.get("stages", {})
        sentences.append(words.about_fold(stages.get("fold", {})))
        sentences.append(words.about_loss(self.output))
        sentences.append(words.about_worst(self.output, self.meta.get("worst_sample")))
        sentences.append(f"Next: {self._next_step()}.")
        return " ".join(sentence for sentence in sentences if sentence)

    def _next_step(self) -> str:
        if self.meta.get("default_constants"):
            return (
                "call dynorm.calibrate_(model, batches), because layers with default constants say "
                "little"
            )
        if not words.lost_quality(self.output):
            return "try it on your own task"
        is_distilled = "distill" in self.meta.get("stages", {})
        return words.ways_on(is_distilled, any(site.witnesses for site in self.sites))

    def findings(self) -> list[str]:
        """Return the verdict and the figures of the stages."""
        return [wrapped(self.verdict()), str(self.stages() or "")]

    def stages(self) -> Table | None:
        """Return the figures without training and distilled side by side, if they are known."""
        return words.stage_table(self.meta.get("stages", {}), self.output.kind)

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        columns = ["site", "norm", "layer", "layer error", "β", "named channels"]
        rows = []
        for site in self.sites:
            rows.append(
                [
                    site.path,
                    _KINDS[site.kind],
                    site.layer,
                    digits(site.error_now),
                    site.beta,
                    " ".join(map(str, site.witnesses)) or "–",
                ]
            )
        notes = [f"{path}: not reached" for path in self.unreached]
        notes += [f"{path}: kept" for path in self.kept]
        notes += [f"{path}: not compared, its norm is not known" for path in self.left]
        meaning = (
            "layer error: distance of the layer's outputs from the norm's over their spread; 1 is as "
            "bad as a constant"
        )
        return Table(columns, rows, [*notes, meaning])

    def advice(self) -> list[str]:
        """Return the recommendation: which norms to keep, if some stand out."""
        errors = {site.path: site.error_now for site in self.sites if site.error_now is not None}
        return [words.about_sites(errors)]


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
                    _KINDS[site.kind],
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
            words.about_massive(self.sites),
            words.about_outliers(self.sites),
            words.about_strictness(self.sites),
        ]
