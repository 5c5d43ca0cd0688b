"""The sentences of reports: the channels that a value depends on, the loss, and the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from dynorm.errors import listed
from dynorm.table import Table

if TYPE_CHECKING:
    from dynorm.report.output import OutputReport

    # The records import this file.
    from dynorm.report.records import InspectionReport, ModelReport, SiteReport

Figures = Mapping[str, Any]

# The bounds of a little and of some lost quality: more is much.
_LOSS = (0.05, 0.3)
_COSINE = (0.99, 0.95)
_SPEARMAN = (0.9, 0.7)
_ERROR = (0.2, 0.5)
_LOST = ("Little quality was lost", "Some quality was lost", "Much of the quality was lost")
# Rank correlations of fewer samples are chance.
_LEAST_SAMPLES = 10
# A site stands out if its error is this many times the median, and at least this large.
_TIMES = 2.0
_LEAST_ERROR = 0.1
# The most sites that are named.
_NAMED = 3
# A loss curve needs this many points to be judged.
_POINTS = 8
# More steps are worth it if the second half of a training brought this share of its whole gain.
_WORTH = 0.1
# With a spread of the tokens' sizes below this, a layer without witnesses loses little.
_ALIKE = 0.2

FIGURES = {
    "language": {"loss_now": "loss", "kl": "divergence", "agreement": "same likeliest token"},
    "encoder": {
        "cosine_mean": "mean cosine",
        "spearman": "rank correlation",
        "neighbours": "same nearest neighbour",
    },
    "tensor": {"cosine_mean": "mean cosine", "error": "error"},
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
    most = max((len(site.witnesses) for site in sites), default=0)
    if most:
        named = "1 named one" if most == 1 else f"{most} named ones"
        return f"each value depends on its own channel and on at most {named}"
    if sites and all(site.layer == "linear" for site in sites):
        return "a line: the layer depends on nothing of the token"
    return "each value depends on its own channel"


def verdict(report: ModelReport) -> str:
    """Return a few sentences: the channels that a value depends on, the loss, and the next step."""
    sentences = []
    if report.sites:
        words = dependence(report.sites)
        sentences.append(f"{words[0].upper()}{words[1:]}.")
    lost = lost_quality(report.output)
    sentences += [_loss(report.output, lost), _worst(report), *_falls(report)]
    sentences.append(f"Next: {_next(report, lost)}.")
    return " ".join(sentence for sentence in sentences if sentence)


def lost_quality(output: OutputReport) -> int:
    """Return how much was lost: 0 is little, 1 some, 2 much."""
    if output.loss_difference is not None:
        far = max(output.loss_difference, output.kl or 0.0)
        # A model that was trained on can be better, and far from the original.
        return 0 if output.loss_difference <= 0 else _level(-far, [-bound for bound in _LOSS])
    if output.cosine_mean is None:
        return 0
    levels = [_level(output.cosine_mean, _COSINE)]
    # A large common part of all samples hides their differences from the cosine.
    if output.error is not None:
        levels.append(_level(-output.error, [-bound for bound in _ERROR]))
    elif output.spearman is not None and output.samples >= _LEAST_SAMPLES:
        levels.append(_level(output.spearman, _SPEARMAN))
    return max(levels)


def _level(value: float, bounds: Sequence[float]) -> int:
    """Return how many bounds a value is below."""
    return sum(value < bound for bound in bounds)


def _loss(output: OutputReport, lost: int) -> str:
    """Return the sentence of the loss."""
    words = _LOST[lost]
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
    if output.error is not None:
        figures.append(f"the error is {digits(output.error)} of the outputs' spread")
    if output.agreement is not None:
        noun = "classes" if output.kind == "tensor" else "tokens"
        figures.append(f"{output.agreement:.1%} of the likeliest {noun} are the same")
    return f"{words}: {', '.join(figures)}." if figures else ""


def _worst(report: ModelReport) -> str:
    """Return a sentence about the sample that lost most."""
    output = report.output
    if output.cosine_min is None:
        return ""
    samples = count_of(output.samples, "sample")
    words = f"The worst of {samples} has a cosine of {digits(output.cosine_min)}"
    text = report.meta.get("worst_sample")
    return f'{words}: "{text:.90}".' if text else f"{words}."


def stages(report: ModelReport) -> dict[str, Figures]:
    """Return the outputs without training and distilled, as far as both or one are known."""
    known = report.meta.get("stages", {})
    outputs = {}
    for name, title in (
        ("calibrate", "without training"),
        ("refine", "without training"),
        ("distill", "distilled"),
    ):
        stage = known.get(name, {})
        if not stage.get("output"):
            continue
        if not stage.get("kept", True):
            if name == "refine":
                continue
            title += ", not kept"
        outputs[title] = stage["output"]
    return outputs


def stage_table(report: ModelReport) -> Table | None:
    """Return the figures without training and distilled side by side, or None without them."""
    outputs = stages(report)
    if not outputs:
        return None
    names = FIGURES[report.output.kind]
    rows = []
    for title, output in outputs.items():
        rows.append([title, *(digits(output.get(name)) for name in names)])
    return Table(["stage", *names.values()], rows)


def _falls(report: ModelReport) -> list[str]:
    """Return a sentence if the distillation made the first figure worse on held-out samples."""
    outputs = stages(report)
    name, words = next(iter(FIGURES[report.output.kind].items()))
    before = outputs.get("without training", {}).get(name)
    after = outputs.get("distilled", {}).get(name)
    if before is None or after is None or digits(before) == digits(after):
        return []
    is_worse = after > before if name == "loss_now" else after < before
    if not is_worse:
        return []
    return [f"By the distillation the {words} went from {digits(before)} to {digits(after)}."]


def _next(report: ModelReport, lost: int) -> str:
    """Return what to do next."""
    default = report.meta.get("default_constants", 0)
    if default:
        return (
            f"call dynorm.calibrate_(model, batches), because {count_of(default, 'layer')} with "
            "default constants say little"
        )
    if not lost:
        return "try it on your own task"
    known = report.meta.get("stages", {})
    if "distill" not in known:
        unless = "" if known else ", unless you already have"
        few = "give the layers a few named channels (witnesses=4)"
        if any(site.witnesses for site in report.sites):
            few = "keep single norms"
        return f"distil it (dynorm.distill_, or --steps in the command){unless}, or {few}"
    stray = report.stray()
    if stray is None:
        return "distil longer"
    return (
        f"distil longer, or keep the norm at {stray.path}, whose layer has the largest error "
        f"({digits(stray.error_now)})"
    )


def about_sites(errors: Mapping[str, float]) -> str:
    """Return a sentence about the sites with the largest errors, or "" if there are too few."""
    if len(errors) < 2:
        return ""
    middle = median(errors.values())
    by_error = sorted(errors, key=lambda path: errors[path], reverse=True)
    worst = []
    for path in by_error[:_NAMED]:
        if errors[path] >= max(_TIMES * middle, _LEAST_ERROR):
            worst.append(path)
    if not worst:
        path = by_error[0]
        return (
            f"No site stands out: the largest error is {digits(errors[path])}, at {path}, and the "
            f"median {digits(middle)}. Keeping single norms would change little."
        )
    figures = listed([f"{path} ({digits(errors[path])})" for path in worst])
    kept = ", ".join(f"{path!r}: None" for path in worst)
    return (
        f"If you may keep some norms, keep those of the largest errors, more than twice the median "
        f"({digits(middle)}): {figures}. In Python: to={{{kept}, '*': 'dyisru'}}."
    )


def about_steps(stage: Figures) -> str:
    """Return a sentence about the loss curve of a distillation, or "" if it is too short."""
    losses = stage.get("losses", ())
    if len(losses) < _POINTS:
        return ""
    values = [loss for _, loss in losses]
    tenth = max(1, len(values) // 10)
    middle = len(values) // 2
    # A few batches may have a loss far from that of the others.
    first = median(values[:tenth])
    half = median(values[middle - tenth : middle + tenth])
    last = median(values[-tenth:])
    if first <= last:
        return "The loss of the distillation did not fall: try a lower rate, or more data."
    share = max(half - last, 0.0) / (first - last)
    fall = f"The second half of the distillation brought {share:.0%} of the fall of its loss"
    if share >= _WORTH:
        return f"{fall}, so more steps would probably help."
    return f"{fall}, so more steps would hardly help."


def about_massive(report: InspectionReport) -> str:
    """Return sentences: whether the model has massive activations, and on which tokens."""
    largest = max(report.sites, key=lambda site: site.sizes.largest.size)
    sites = [site for site in report.sites if site.sizes.massive]
    if not sites:
        return (
            "No massive activations: no token whose sum is mostly in one channel is more than 3 "
            f"times the usual size. The largest is {largest.sizes.largest.size:.1f} times that size."
        )
    worst = max(sites, key=lambda site: site.sizes.largest.size)
    token = worst.sizes.largest
    channels = dict.fromkeys(str(site.sizes.largest.channel) for site in sites)
    return (
        f"Massive activations at {len(sites)} of {len(report.sites)} norms, in "
        f"channel{'s' if len(channels) > 1 else ''} {', '.join(channels)}. The largest token is at "
        f"{worst.path}: {token.size:,.1f} times the usual size, with {token.share:.0%} of its "
        f"sum in channel {token.channel}. The largest tokens are {worst.sizes.places()}."
    )


def about_outliers(report: InspectionReport) -> str:
    """Return a sentence: at how many norms the paper's claim holds, and by how much."""
    ratios = [site.ratio for site in report.sites]
    holds = sum(site.holds for site in report.sites)
    return (
        "The paper claims that DyISRU fits outliers better than DyT. Here its error is smaller at "
        f"{holds} of {count_of(len(ratios), 'norm')}. The ratio of DyT's error to DyISRU's is "
        f"{min(ratios):.2f} to {max(ratios):.2f}, with a median of {median(ratios):.2f}."
    )


def about_strictness(report: InspectionReport) -> str:
    """Return advice: where a layer without witnesses is enough, and where a few would help."""
    varied = [site for site in report.sites if site.sigma_spread >= _ALIKE]
    if not varied:
        return (
            "A strict layer, of which each value depends on its own channel, loses little at every "
            f"norm: the σ spread is below {_ALIKE}."
        )
    widest = max(varied, key=lambda site: site.sigma_spread)
    helped = [site for site in varied if site.sizes.explained[4] >= 0.5]
    return (
        f"A strict layer, of which each value depends on its own channel, loses little at "
        f"{len(report.sites) - len(varied)} of {count_of(len(report.sites), 'norm')}, where the σ "
        f"spread is below {_ALIKE}. At the others the sizes of tokens vary, most at {widest.path} "
        f"({widest.sigma_spread:.2f}): distil the model after the conversion. At {len(helped)} of "
        "them four channels explain more than half of the variation, so that witnesses=4 would "
        "help without training."
    )
