"""The report of ``measure``: the cost of a conversion, in figures and in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dynorm.errors import listed
from dynorm.family import FAMILY
from dynorm.report.output import OutputReport
from dynorm.report.report import KINDS, Report
from dynorm.table import Table, count_of, digits, wrapped

# The bounds of a little and of some loss: more is much. Cosines, correlations and shares lose what
# they lack of 1.
_LOSS = (0.05, 0.3)
_COSINE = (0.01, 0.05)
_SPEARMAN = (0.1, 0.3)
_NEIGHBOURS = (0.1, 0.3)
_ERROR = (0.2, 0.5)
_LOST = ("Little quality was lost", "Some quality was lost", "Much of the quality was lost")
# Rank correlations and neighbours of fewer samples are chance.
_LEAST_SAMPLES = 10
# A site stands out if its error is this many times the median, and at least this large.
_TIMES = 2.0
_LEAST_ERROR = 0.1
# The most sites that are named.
_NAMED = 3

# How a model is called after each stage of a conversion, in their order.
STAGES = {"calibrate": "without training", "distill": "distilled", "fold": "folded"}

# The main figures of each kind of output: fields of OutputReport, and their names.
_FIGURES = {
    "language": {"loss_now": "loss", "kl": "divergence", "agreement": "same likeliest token"},
    "encoder": {
        "cosine_mean": "mean cosine",
        "spearman": "rank correlation",
        "neighbours": "same nearest neighbour",
    },
    "tensor": {"cosine_mean": "mean cosine", "error": "output error"},
}


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """One replaced norm.

    Args:
        path: the path of the norm.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        layer: the layer that replaced the norm: "dyisru", "dyt", "derf" or "linear".
        error_now: the error of the layer in the converted model against the norm in the original:
            root of the squared distance of their outputs over that of the norm's outputs from their
            channel's mean. 1 is as bad as a constant. None if the two cannot be paired.
        beta: the layer's constant, as the inverse square of its slope.
        witnesses: the channels that the layer reads besides each value's own.
        annealing: whether the layer is still a norm in part.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    layer: str
    error_now: float | None
    beta: float
    witnesses: tuple[int, ...]
    annealing: bool = False


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
            depends = dependence(self.sites)
            sentences.append(f"{depends[0].upper()}{depends[1:]}.")
            if self.kept:
                norms = count_of(len(self.kept), "norm")
                sentences.append(f"Not so at {norms} that the model keeps.")
        stages = self.meta.get("stages", {})
        sentences.append(_about_fold(stages.get("fold", {})))
        sentences.append(about_loss(self.output))
        sentences.append(_about_worst(self.output, self.meta.get("worst_sample")))
        sentences.append(f"Next: {self._next_step()}.")
        return " ".join(sentence for sentence in sentences if sentence)

    def _next_step(self) -> str:
        if self.meta.get("default_constants"):
            return (
                "call dynorm.calibrate_(model, batches), because layers with default constants say "
                "little"
            )
        if not _lost_quality(self.output):
            return "try it on your own task"
        may_have_witnesses = all(
            site.layer == "dyisru" and not site.witnesses for site in self.sites
        )
        stages = self.meta.get("stages", {})
        return ways_on("distill" in stages, with_witnesses=may_have_witnesses)

    def findings(self) -> list[str]:
        """Return the verdict and the figures of the stages."""
        return [wrapped(self.verdict()), str(self.stages() or "")]

    def stages(self) -> Table | None:
        """Return the figures without training and distilled side by side, if they are known."""
        return _stage_table(self.meta.get("stages", {}), self.output.kind)

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        columns = ["site", "norm", "layer", "layer error", "β", "named channels"]
        rows = []
        for site in self.sites:
            rows.append(
                [
                    site.path,
                    KINDS[site.kind],
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
        recipe = self.meta.get("recipe")
        to = recipe.get("to") if isinstance(recipe, Mapping) else None
        if not isinstance(to, str):
            to = "..."
        return [about_sites(errors, to)]


def dependence(sites: Sequence[SiteReport]) -> str:
    """Return the channels that an output of the layers depends on."""
    if any(site.annealing for site in sites):
        return "each value still depends on its whole token, until the annealing ends"
    most = max(len(site.witnesses) for site in sites)
    if most:
        named = "1 named one" if most == 1 else f"{most} named ones"
        return f"each value depends on its own channel and on at most {named}"
    if all(site.layer == "linear" for site in sites):
        return "each value depends on its own channel, by a line that is the same for all tokens"
    return "each value depends on its own channel"


def _lost_quality(output: OutputReport) -> int:
    """Return how much was lost: 0 is little, 1 some, 2 much."""
    if output.loss_difference is not None:
        # A model that was trained on can be better, and far from the original.
        if output.loss_difference <= 0:
            return 0
        return _level(max(output.loss_difference, output.kl or 0.0), _LOSS)
    if output.cosine_mean is None:
        return 0
    level = _level(1 - output.cosine_mean, _COSINE)
    # A large common part of all samples hides their differences from the cosine.
    if output.error is not None:
        return max(level, _level(output.error, _ERROR))
    if output.samples >= _LEAST_SAMPLES:
        if output.spearman is not None:
            level = max(level, _level(1 - output.spearman, _SPEARMAN))
        if output.neighbours is not None:
            level = max(level, _level(1 - output.neighbours, _NEIGHBOURS))
    return level


def _level(loss: float, bounds: Sequence[float]) -> int:
    """Return how many bounds a loss is above."""
    return sum(loss > bound for bound in bounds)


def about_loss(output: OutputReport) -> str:
    """Return a sentence about the loss, or "" if nothing is known."""
    words = _LOST[_lost_quality(output)]
    figures = []
    if output.loss_difference is not None:
        if output.loss_difference <= 0 and (output.kl or 0.0) >= _LOSS[0]:
            words = "The model differs from the original, but its loss is not worse"
        now, before = digits(output.loss_now), digits(output.loss_original)
        figures.append(f"the loss is {now} nats per token instead of {before}")
        if output.kl is not None:
            figures.append(f"the divergence from the original is {digits(output.kl)}")
    elif output.cosine_mean is not None:
        figures.append(f"the mean cosine to the original's outputs is {digits(output.cosine_mean)}")
    if output.spearman is not None:
        figures.append(f"the rank correlation of the similarities is {digits(output.spearman)}")
    if output.neighbours is not None:
        figures.append(f"{output.neighbours:.1%} of the samples keep their nearest neighbour")
    if output.error is not None:
        figures.append(f"the output error is {digits(output.error)} of the outputs' spread")
    if output.agreement is not None:
        noun = "classes" if output.kind == "tensor" else "tokens"
        figures.append(f"{output.agreement:.1%} of the likeliest {noun} are the same")
    return f"{words}: {', '.join(figures)}." if figures else ""


def ways_on(is_distilled: bool, *, with_witnesses: bool) -> str:
    """Return how to lose less; ``with_witnesses`` if all layers are DyISRUs without any."""
    ways = ["distil it (dynorm.distill_, or --steps in the command)"]
    if is_distilled:
        ways = ["distil it longer"]
    if with_witnesses:
        ways.append("give the layers a few named channels (witnesses=4, at most 16)")
    ways.append("keep the norms of the largest layer errors")
    return ", or ".join(ways)


def _about_fold(fold: Mapping[str, Any]) -> str:
    """Return sentences about lines that were to be folded away, or "" without a fold."""
    if not fold:
        return ""
    lines = [site for site in fold["sites"] if site["kind"] == "linearcontrol"]
    left = [line["path"] for line in lines if not line["becomes"]]
    words = "All lines are folded away into the weights."
    if left:
        words = (
            f"{len(left)} lines stay, because not all that reads them is a matrix: {listed(left)}."
        )
        if len(left) < len(lines):
            words += " The others are folded away into the weights."
    attribution = fold.get("attribution")
    if attribution:
        words += (
            f" Each logit is the sum of {attribution['parts']} parts of the residual stream, with a "
            f"relative error of {attribution['error']:.0e}."
        )
    return words


def _about_worst(output: OutputReport, text: str | None) -> str:
    """Return a sentence about the sample that lost most, with its text if that is known."""
    if output.cosine_min is None:
        return ""
    samples = count_of(output.samples, "sample")
    words = f"The worst of {samples} has a cosine of {digits(output.cosine_min)}"
    if not text:
        return f"{words}."
    # In one line: a card is Markdown.
    return f'{words}: "{" ".join(text.split()):.90}".'


def _stage_table(stages: Mapping[str, Any], kind: str) -> Table | None:
    """Return the figures after each stage of a conversion side by side, or None without them."""
    names = _FIGURES[kind]
    rows = []
    for name, title in STAGES.items():
        stage = stages.get(name, {})
        output = stage.get("output")
        if output:
            kept = "" if stage.get("kept", True) else ", not kept"
            rows.append([title + kept, *(digits(output.get(figure)) for figure in names)])
    notes = ["of the first held-out samples only"]
    return Table(["stage", *names.values()], rows, notes) if rows else None


def about_sites(errors: Mapping[str, float], to: str) -> str:
    """Return sentences about the sites whose errors stand out, or "" if there are none.

    ``to`` is the layer of the run, without which the default would take its place.
    """
    middle = median(errors.values()) if errors else 0.0
    by_error = sorted(errors, key=lambda path: errors[path], reverse=True)
    worst = []
    for path in by_error[:_NAMED]:
        if errors[path] >= max(_TIMES * middle, _LEAST_ERROR):
            worst.append(path)
    if not worst:
        return ""
    figures = listed([f"{path} ({digits(errors[path])})" for path in worst])
    return (
        "If you may keep some norms, keep those of the largest layer errors, over twice the median "
        f"({digits(middle)}): {figures}. A norm is kept with to={{'PATH': 'keep', '*': {to!r}}}, "
        f"or --to PATH=keep --to {to}."
    )
