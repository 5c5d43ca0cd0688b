"""The sentences of reports: the channels that a value depends on, and the loss."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dynorm.errors import listed
from dynorm.report.output import OutputReport
from dynorm.report.records import InspectedSite, SiteReport
from dynorm.table import Table

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
# With a spread of the tokens' sizes below this, a layer without witnesses loses little.
_ALIKE = 0.2

STAGES = {"calibrate": "without training", "distill": "distilled", "fold": "folded"}
"""How a model is called after each stage of a conversion, in their order."""

FIGURES = {
    "language": {"loss_now": "loss", "kl": "divergence", "agreement": "same likeliest token"},
    "encoder": {
        "cosine_mean": "mean cosine",
        "spearman": "rank correlation",
        "neighbours": "same nearest neighbour",
    },
    "tensor": {"cosine_mean": "mean cosine", "error": "output error"},
}
"""The main figures of each kind of output: fields of OutputReport, and their names."""


def digits(value: float | None) -> str:
    """Return a number with three digits behind the point; None is a dash."""
    if value is None:
        return "–"
    return f"{value:.3f}".replace("-", "−")


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if there is not one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def dependence(sites: Sequence[SiteReport]) -> str:
    """Return the channels that an output of the layers depends on."""
    if any(site.annealing for site in sites):
        return "each value still depends on its whole token, until the annealing ends"
    most = max(len(site.witnesses) for site in sites)
    if most:
        named = "1 named one" if most == 1 else f"{most} named ones"
        return f"each value depends on its own channel and on at most {named}"
    if all(site.layer == "linear" for site in sites):
        return "a line: the layer depends on nothing of the token"
    return "each value depends on its own channel"


def lost_quality(output: OutputReport) -> int:
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
    words = _LOST[lost_quality(output)]
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


def ways_on(is_distilled: bool, has_witnesses: bool) -> str:
    """Return how to lose less."""
    ways = ["distil it (dynorm.distill_, or --steps in the command)"]
    if is_distilled:
        ways = ["distil it longer"]
    if not has_witnesses:
        ways.append("give the layers a few named channels (witnesses=4, at most 16)")
    ways.append("keep the norms of the largest layer errors")
    return ", or ".join(ways)


def about_fold(fold: Mapping[str, Any]) -> str:
    """Return sentences about lines that were to be folded away, or "" without a fold."""
    if not fold:
        return ""
    left = []
    for site in fold["sites"]:
        if site["kind"] == "linearcontrol" and not site["becomes"]:
            left.append(site["path"])
    words = "All lines are folded away into the weights."
    if left:
        words = f"Folded away into the weights, except {listed(left)}, which no fold can remove."
    attribution = fold.get("attribution")
    if attribution:
        words += (
            f" Each logit is the sum of {attribution['parts']} parts of the residual stream, with a "
            f"relative error of {attribution['error']:.0e}."
        )
    return words


def about_worst(output: OutputReport, text: str | None) -> str:
    """Return a sentence about the sample that lost most, with its text if that is known."""
    if output.cosine_min is None:
        return ""
    samples = count_of(output.samples, "sample")
    words = f"The worst of {samples} has a cosine of {digits(output.cosine_min)}"
    return f'{words}: "{text:.90}".' if text else f"{words}."


def stage_table(stages: Mapping[str, Any], kind: str) -> Table | None:
    """Return the figures after each stage of a conversion side by side, or None without them."""
    names = FIGURES[kind]
    rows = []
    for name, title in STAGES.items():
        stage = stages.get(name, {})
        output = stage.get("output")
        if output:
            kept = "" if stage.get("kept", True) else ", not kept"
            rows.append([title + kept, *(digits(output.get(figure)) for figure in names)])
    return Table(["stage", *names.values()], rows) if rows else None


def about_sites(errors: Mapping[str, float]) -> str:
    """Return a sentence about the sites whose errors stand out, or "" if there are none."""
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
        f"({digits(middle)}): {figures}. A norm is kept with to={{path: None}}, or --to PATH=keep."
    )


def about_massive(sites: Sequence[InspectedSite]) -> str:
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


def about_outliers(sites: Sequence[InspectedSite]) -> str:
    """Return a sentence: at how many norms the paper's claim holds, and by how much."""
    ratios = [site.ratio for site in sites]
    holds = sum(ratio > 1 for ratio in ratios)
    return (
        "The paper claims that DyISRU fits outliers better than DyT. Here its error is smaller at "
        f"{holds} of {count_of(len(ratios), 'norm')}. The ratio of DyT's error to DyISRU's is "
        f"{min(ratios):.2f} to {max(ratios):.2f}, with a median of {median(ratios):.2f}."
    )


def about_strictness(sites: Sequence[InspectedSite]) -> str:
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
