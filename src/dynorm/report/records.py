"""The reports, one record per site and one per model, with their words in a table and on a page."""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

from dynorm.errors import require_library
from dynorm.family import FAMILY
from dynorm.files import write_text
from dynorm.report.output import OutputReport
from dynorm.report.rendering import digits, environment, rendered, table_html, wins
from dynorm.report.sizes import TokenSizes
from dynorm.report.stats import FUNCTIONS, CoreFit, OutlierFit, Picture
from dynorm.table import Column, Table, plain


def _constant(value: float) -> str:
    """Return a constant as a table shows it: whole where it is large, else to three digits."""
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"


_FORMS: dict[str, Callable[[Any], str]] = {
    "constant": _constant,
    "digits": digits,
    "norm": lambda kind: {"layernorm": "LN", "rmsnorm": "RMS"}.get(kind, kind),
    # Only 0 looks like 0.
    "share": lambda value: "0" if not value else f"{value:.2%}" if value >= 1e-4 else "<0.01%",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredSite:
    """One norm of a model. Its core is the norm without weight and bias, ``(x - mean) / sigma`` or ``x / rms``.

    Args:
        path: where it stands.
        kind: the norm: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        outlier: the largest value of the core: ``|x - mean|`` in sigmas of its own token, sqrt(C -
            1) at most (for an RMSNorm ``|x|`` in the token's rms, sqrt(C) at most).
        outlier_site: the largest ``|x - mean|`` in typical sigmas, the geometric mean over the
            site's tokens; no bound.
        sigma_spread: standard deviation of the natural logarithm of the tokens' sigma (an RMSNorm's
            rms): 0 if all are alike, and then a constant serves as well as the norm; 0.5 if they
            commonly differ by a factor of 1.6.
        sigma_range: the 99th percentile of sigma over the 1st.
        sizes: the largest tokens, and how much of the sizes' variation any 0, 1, 2 and 4 channels
            could tell.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, without the sampled points."""
        drawn = ("picture", "sums", "points")
        return asdict(
            self,
            dict_factory=lambda pairs: {name: value for name, value in pairs if name not in drawn},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """A report on a model, which prints itself as a table and writes itself as a page."""

    _template: ClassVar[str]
    model: str
    sites: Sequence[MeasuredSite]
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows, without the sampled points; no NaN, but None."""
        values = asdict(self) | {"sites": [site.to_dict() for site in self.sites]}
        return {name: plain(value) for name, value in values.items()}

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        refused: Mapping[str, str] = getattr(self, "refused", {})
        notes = [f"{path}  not reached" for path in self.unreached]
        left: Sequence[str] = getattr(self, "left", ())
        notes += [f"{path}  left as it is, its norm is not known" for path in left]
        notes += [f"{path}  left out: {reason}" for path, reason in refused.items()]
        known = tomllib.loads(files(__package__).joinpath("columns.toml").read_text("utf-8"))
        kept = [
            each
            for each in known[self._template]
            if not (need := each.pop("only_with", "")) or self.has(need)
        ]
        compiled = environment().compile_expression
        values = [compiled(f"site.{each.pop('value')}", undefined_to_none=False) for each in kept]
        columns = [
            Column(**each | {"form": _FORMS.get(form := each.get("form", ""), form)})
            for each in kept
        ]
        title = rendered(f"{self._template}.txt", report=self).rstrip()
        return Table(
            columns, [[value(site=site) for value in values] for site in self.sites], notes, title
        )

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file, whole or not at all.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ArgumentError: matplotlib is not installed.
            StorageError: the file cannot be written.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8)])
            >>> report.to_html(getfixture("tmp_path") / "report.html")
        """
        write_text(path, rendered(f"{self._template}.html", report=self))

    def to_dataframe(self) -> Any:
        """Return the sites as a ``pandas.DataFrame``, one row per site; what is nested has dotted names.

        Raises:
            ArgumentError: pandas is not installed.
        """
        require_library("pandas", "a data frame", "pandas")
        from pandas import json_normalize

        return json_normalize(self.to_dict()["sites"])

    def __str__(self) -> str:
        """Return the report as a table of 80 columns."""
        return str(self.table())

    def __repr__(self) -> str:
        """Return the report in a few words."""
        sites, batches = len(self.sites), self.batches
        counted = f"{sites} site{'s' * (sites != 1)}, {batches} batch{'es' * (batches != 1)}"
        return f"<{type(self).__name__} of {self.name}: {counted}>"

    def _repr_html_(self) -> str:
        """Return the table as a notebook shows it."""
        table = self.table()
        return f'<p style="white-space: pre-line">{escape(table.title)}</p>{table_html(table)}'

    @property
    def name(self) -> str:
        """Return the model's name, or else its class."""
        return str(self.meta.get("model", self.model))

    def has(self, name: str) -> bool:
        """Return whether a site of the report has something, such as witnesses."""
        return any(getattr(site, name, ()) for site in self.sites)


@dataclass(frozen=True, kw_only=True)
class SiteReport(MeasuredSite):
    """One replaced norm, with these fields besides those of :class:`dynorm.report.records.MeasuredSite`.

    Args:
        layer: the layer there now: "dyisru", "dyt", "derf" or "linear".
        error_linear: the relative error ``|y - f| / |y|`` of ``f = scale / sqrt(beta) (x - c)``
            over all held-out tokens and channels, with one beta and the centre c fitted on other
            tokens.
        error_dyt: the same of ``scale tanh((x - c) / sqrt(beta))``.
        error_dyisru: the same of ``scale (x - c) / sqrt(beta + (x - c)^2)``.
        error_now: the error of the layer in the converted model against the norm in the original:
            root of the squared distance of their outputs over that of the norm's from their
            channel's mean. 1 is as bad as a constant. None where the two cannot be paired.
        beta: the layer's constant, as the inverse square of its slope (the channels' median where
            there are many).
        center: its centre (the median likewise), or None.
        saturated: share of the values that the converted layer takes beyond 95 % of its bound; of
            the linear control, which has none, beyond 95 % of the norm's.
        witnesses: the layer's witness channels; empty for a function of one channel.
        gains: the weight of each one's square.
        told: how much of the variation of the tokens' sums over a constant the layer's own ``beta +
            sum g u^2`` tells, up to a factor; 0 without witnesses, 1 is all.
        why: why ``to="auto"`` chose the layer; empty where it was given.
        sums: ``beta + sum g u^2`` and the norm's own sum, of some of the tokens.
        fit: the constants that the three errors of the core belong to.
    """

    layer: str
    error_linear: float
    error_dyt: float
    error_dyisru: float
    error_now: float | None
    beta: float
    center: float | None
    saturated: float | None
    witnesses: tuple[int, ...]
    gains: tuple[float, ...]
    told: float
    why: str
    sums: tuple[list[float], list[float]] = field(repr=False)
    fit: CoreFit = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, with the picture's bars but without its sampled points."""
        return super().to_dict() | {"bins": [asdict(each) for each in self.picture.bins]}

    def named_witnesses(self) -> str | None:
        """Return the witnesses with their gains in words; None where there are none."""
        pairs = zip(self.witnesses, self.gains, strict=True)
        return ", ".join(f"{channel} ({_constant(gain)})" for channel, gain in pairs) or None


@dataclass(frozen=True)
class Continuation:
    """A held-out text, as the original and the converted model go on with it, or audio, as they write it down.

    Both take the likeliest token at each step.
    """

    prompt: str  # the tokens that both were given, or the audio file
    original: str  # the original's continuation or transcript
    now: str  # the converted model's
    # the share of places with the same token; of a transcript one minus the word error rate
    same: float
    length: int = 1  # the original's words, by which transcripts count


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelReport(Report):
    """The findings of ``measure``.

    Args:
        model: the class of the model.
        sites: the replaced norms, in call order.
        output: the model's output beside the original's.
        batches: how many batches were measured.
        continuations: held-out texts, as ``dynorm convert`` has a language model and its original
            go on with them, or audio files, as both write them down.
        unreached: paths of the layers that no batch reached.
        left: paths of the layers whose norm is not known, because the model was loaded with them:
            both sides have them.
        meta: whatever should stand beside the figures: recipe, texts, seeds, versions.
    """

    _template = "conversion"
    sites: list[SiteReport]
    output: OutputReport
    left: list[str] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)

    @property
    def same(self) -> float | None:
        """Return the share of equal tokens over all continuations, or one minus the word error rate of transcripts."""
        found = self.continuations
        return (
            fmean((each.same for each in found), [each.length for each in found]) if found else None
        )

    def verdict(self) -> str:
        """Return in a few sentences what was lost, which sample lost most, and what to do next."""
        return _paragraph("verdict.txt", report=self)

    def stray(self) -> SiteReport | None:
        """Return the site whose layer is farthest from its norm."""
        known = (site for site in self.sites if site.error_now is not None)
        return max(known, key=lambda site: site.error_now or 0.0, default=None)

    def layers(self) -> list[str]:
        """Return the titles of the layers that replaced the norms."""
        return sorted({FAMILY[s.layer].title if s.layer in FAMILY else s.layer for s in self.sites})


@dataclass(frozen=True, kw_only=True)
class InspectedSite(MeasuredSite):
    """One norm and its outliers; an outlier is the channel of a token that is farthest from the mean (an RMSNorm's: 0).

    Functions are named "linear", "dyt" (scaled) and "dyisru"; each has one constant per site,
    fitted on some tokens and measured on others. These fields stand besides those of
    :class:`dynorm.report.records.MeasuredSite`.

    Args:
        outliers: how well the functions, fitted on outliers alone, describe outliers, as section
            4.2 asks.
        core: how well they describe all channels when fitted on all.
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
        """Return DyT's mean absolute residual on outliers over DyISRU's: above 1 where the paper's claim holds."""
        return self.outliers.residuals["dyt"] / max(self.outliers.residuals["dyisru"], 1e-300)

    @property
    def holds(self) -> bool:
        """Return whether the paper's claim holds: DyISRU's mean absolute residual on outliers is below DyT's."""
        return self.outliers.residuals["dyisru"] < self.outliers.residuals["dyt"]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values, without the sampled points."""
        return super().to_dict() | {"alpha": self.alpha, "beta": self.beta, "holds": self.holds}


@dataclass(frozen=True, kw_only=True, repr=False)
class InspectionReport(Report):
    """The findings of :func:`inspect_norms`.

    Args:
        model: the class of the model.
        sites: the norms, in call order.
        batches: how many batches were measured.
        refused: paths of modules that look like a norm but are none of ours, with the reason.
        unreached: paths of the norms that no batch reached.
        meta: whatever should stand beside the figures: recipe, texts, seeds, versions.
    """

    _template = "inspection"
    sites: list[InspectedSite]
    refused: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return in how many sites the paper's claim holds, and by how much."""
        ratios = [site.ratio for site in self.sites]
        core = [site.core.errors for site in self.sites]
        residuals = [site.outliers.residuals for site in self.sites]
        return {
            "sites": len(self.sites),
            "holds": sum(site.holds for site in self.sites),
            "outliers_best": wins(residuals),
            "core_best": wins(core),
            "core_holds": sum(e["dyisru"] < e["dyt"] for e in core),
            "ratio_median": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "exact": max(site.outliers.exact for site in self.sites),
            "massive": [site.path for site in self.sites if site.sizes.massive],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows, without the sampled points."""
        return super().to_dict() | {"summary": plain(self.summary())}

    def massive(self) -> str:
        """Return in sentences whether the model has massive activations, where, and on which tokens."""
        return _paragraph("massive.txt", report=self)

    def findings(self) -> str:
        """Return the sentences that follow from the figures alone."""
        span = tuple(
            math.exp(f(site.outliers.beta_spread for site in self.sites)) for f in (min, max)
        )
        titles = {name: FAMILY[name].title for name in FUNCTIONS}
        return _paragraph("findings.txt", found=self.summary(), titles=titles, span=span)


def _paragraph(template: str, **values: Any) -> str:
    """Return the text of a template as one line."""
    return " ".join(rendered(template, **values).split())
