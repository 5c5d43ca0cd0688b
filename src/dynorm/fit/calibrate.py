"""Set the constants of a converted model from real activations: one pass, streamed, site after site."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynorm import watch
from dynorm.arguments import check_not_negative, check_share
from dynorm.errors import CalibrationWarning
from dynorm.family import NAMES
from dynorm.fit.ranks import BATCH, OVER, Ranks
from dynorm.fit.site_fit import TOLERANCE, SiteChoice
from dynorm.fit.witnesses import Witnesses
from dynorm.layers import PointwiseNorm
from dynorm.replace.specs import dynorm_layers, original_forward, replaced_by, require_layers, swap_
from dynorm.table import Column, Plain, Table

Outputs = dict[PointwiseNorm, list[Tensor]]
Fits = dict[PointwiseNorm, SiteChoice]
# Best on all-MiniLM-L6-v2 (post-norm), with two witnesses too. On SmolLM2-135M (pre-norm) 0 is best
# by far.
_LEAN = 0.7
# With fewer tokens the reported error is too small: on other tokens it is larger by some tenths.
# Measured with a LayerNorm and an RMSNorm of 64 channels.
FEW_TOKENS, FEW_WITH_WITNESSES = 64, 256


@dataclass(frozen=True)
class SiteCalibration:
    """How one layer was fitted."""

    path: str
    tokens: int  # that it saw, padding not counted
    beta: float  # its constant, the median of the channels' where there are many
    error: float  # root of the residual over the spread of the target, in the calibration data
    witnesses: Witnesses | None = (
        None  # how well they tell a token's scale; None for a layer that has none
    )
    layer: str = ""  # its name, such as "dyisru"
    # With ``to="auto"``: the errors on held-out tokens of all layers that it was chosen from, the
    # simplest one first.
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> str:
        """Return the layer with the number of its witnesses, such as "linear +4"."""
        return f"{self.layer} +{len(self.witnesses.channels)}" if self.witnesses else self.layer

    @property
    def is_few(self) -> bool:
        """Return whether it saw so few tokens that its error on other tokens will be larger."""
        return self.tokens < (FEW_TOKENS if self.witnesses is None else FEW_WITH_WITNESSES)


@dataclass(frozen=True)
class CalibrationReport(Plain):
    """The result of ``calibrate_``, one row per site.

    Args:
        sites: the fitted layers, in call order.
        batches: how many batches were used, by all ranks.
        unreached: paths of the layers that kept their constants: no batch reached them, or only
            with inputs that are the same in every channel, to which nothing can be fitted.
        tolerance: by how much the error of a layer that ``to="auto"`` chose may exceed the best
            one.
    """

    sites: list[SiteCalibration]
    batches: int
    unreached: list[str]
    tolerance: float = TOLERANCE

    @property
    def few(self) -> list[str]:
        """Return the paths of the sites that saw only few tokens: below 64, with witnesses below 256.

        Their errors on other tokens will be larger than those reported.
        """
        return [site.path for site in self.sites if site.is_few]

    def __str__(self) -> str:
        """Return the report as a table."""
        count = len(self.sites)
        title = f"{count} site{'s' * (count != 1)} calibrated on {self.batches} batch{'es' * (self.batches != 1)}"
        columns: list[str | Column] = [
            "site",
            "tokens",
            Column("beta", ".4g"),
            Column("error", ".3f"),
        ]
        rows = [[site.path, site.tokens, site.beta, site.error] for site in self.sites]
        if any(site.witnesses for site in self.sites):
            columns += ["witnesses", Column("told", ".0%")]
            for row, site in zip(rows, self.sites, strict=True):
                found = site.witnesses or Witnesses((), (), site.beta, (0.0,))
                told = found.explained[min(len(found.channels), len(found.explained) - 1)]
                row += [" ".join(map(str, found.channels)) or "none", told]
        if any(site.errors for site in self.sites):
            names = next(site.errors for site in self.sites if site.errors)
            group = f"held-out errors; chosen: the first within {self.tolerance:g} of the least"
            columns = [
                "site",
                "layer",
                *(Column(name.split(" ", 1)[-1], ".3f", group=group) for name in names),
            ]
            rows = [[site.path, site.chosen, *map(site.errors.get, names)] for site in self.sites]
        notes = [f"{path}: not reached, or by constant inputs only" for path in self.unreached]
        if self.few:
            notes.append(
                f"few tokens, so that errors on others will be larger: {', '.join(self.few)}"
            )
        return str(Table(columns, rows, notes, title))


def calibrate_(
    model: nn.Module, batches: Iterable[Any], *, lean: float = _LEAN, tolerance: float = TOLERANCE
) -> CalibrationReport:
    """Set the constants, witnesses, weight and bias of every point-wise layer from batches of real inputs, in place.

    Each batch is run twice: once with the original norms, whose outputs are the targets, once with
    the point-wise layers. There each layer, as it is reached, adds the batch to its running sums,
    solves its least squares anew and passes on the output of the new constants. So every site is
    fitted on the inputs that the converted part before it will feed it, and later batches, fed by
    better constants, count more. The cost is two forward passes over the data and about 17
    point-wise functions per site, whatever the number of sites. Memory is that of one batch, plus
    O(C) per site.

    A layer that :func:`convert_` allowed N witnesses gets at most N, chosen anew at each call, with
    their gains and the centre 0 (:class:`dynorm.fit.witnesses.TokenScales`; a matrix of 66 x 66
    more per site). ``log_gain`` is then a new parameter: make the optimizer afterwards. Witnesses
    that were named keep their places and get their gains.

    With ``to="auto"`` each site gets the first of linear, linear with witnesses, DyISRU, and DyISRU
    with witnesses whose error on held-out tokens is at most ``tolerance`` above the best one's: a
    linear layer :func:`fold_` removes. All are fitted side by side, in about twice the time, and
    each batch measures them before they see it. The layers are new modules then: make the optimizer
    afterwards.

    Of an annealed layer only the constants are set: its weight and bias are the norm's, and are
    needed as they are until the annealing has begun.

    Padding is left out where a batch is a dict with ``attention_mask`` or
    ``decoder_attention_mask`` (1 = token), ``src_key_padding_mask`` or ``tgt_key_padding_mask``
    (True = padding). The model is run in eval mode, without gradient; random states and buffers are
    afterwards as they were.

    Under torch.distributed with an initialized group, call it on every rank, each with its own
    share of the data. The sums are those of all ranks, so all get the same constants. A rank with
    fewer batches than another waits for it.

    Args:
        model: a model that :func:`convert_` converted; plain, not sharded: shard it afterwards.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``; any
            iterable, read once. They are moved to the model's device.
        lean: where a layer's target lies between the norm's output on the layer's own inputs, at 0,
            which is easier to fit, and the norm's output in the original model, at 1, which undoes
            errors of the layers before. Take 0 for a pre-norm decoder, whose errors add up in the
            residual stream: there a layer that repairs too much spoils the later ones.
        tolerance: how much larger than the best one the error of a simpler layer may be, of those
            that ``to="auto"`` chooses from. An error is the root of the squared one over the
            target's spread.

    Returns:
        A report with one row per site.

    Raises:
        ArgumentError: ``lean`` is not from 0 to 1, or ``tolerance`` negative.
        ModelError: the model has no point-wise layer, or one that replaced nothing (a loaded
            model), or another rank's layers differ.
        DataError: there is no batch, one is of the wrong kind, the model cannot run it, an
            activation is not finite (the message names the site), or another rank failed or reached
            other sites. The constants are then as they were, on every rank.

    Warns:
        CalibrationWarning: a layer was reached by no batch, or only by inputs that are the same in
            every channel; it keeps its constants.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> report = dynorm.calibrate_(model, [torch.randn(64, 8) for _ in range(4)])
        >>> [site.tokens for site in report.sites]
        [256]
    """
    check_share("lean", lean)
    check_not_negative("tolerance", tolerance)
    ranks = Ranks()
    with ranks.together():
        watch.require_plain_model(model)
        layers = require_layers(model, with_norms=True)
        ranks.require_alike(layers.items())
        found = [
            (path, layer, replaced)
            for path, layer in layers.items()
            if (replaced := replaced_by(layer))
        ]
        fits = {
            layer: SiteChoice(layer, norm, ranks, path, careful=lean == 0, tolerance=tolerance)
            for path, layer, norm in sorted(found, key=lambda each: each[2].site.order)
        }
        with watch.unchanged_on_error(fits), watch.undisturbed(model, evaluate=True):
            used = _stream(model, fits, batches, ranks, lean)
    swap_(model, {layer: choice.settled() for layer, choice in fits.items()})
    unreached = [choice.path for choice in fits.values() if not choice.fit.tokens]
    if unreached:
        warnings.warn(
            f"kept the constants of {', '.join(unreached)}: no batch reached them, or only with "
            "inputs that are the "
            "same in every channel; give batches that use them",
            CalibrationWarning,
            stacklevel=2,
        )
    sites = [_report(choice) for choice in fits.values() if choice.fit.tokens]
    return CalibrationReport(sites, used, unreached, tolerance)


def _report(choice: SiteChoice) -> SiteCalibration:
    fit, beta = choice.fit, float(choice.fit.layer.beta().detach().median())
    errors, name = choice.errors, NAMES.get(type(fit.layer), "")
    tried = errors if len(errors) > 1 else {}
    return SiteCalibration(choice.path, fit.tokens, beta, fit.error, fit.witnesses, name, tried)


def _stream(model: nn.Module, fits: Fits, batches: Iterable[Any], ranks: Ranks, lean: float) -> int:
    """Go through the batches, and return how many there were on all ranks."""
    given, batch, used, number = watch.iterate(batches), None, 0, 0
    while set(ranks.all_say(OVER if (new := next(given, None)) is None else BATCH)) != {OVER}:
        number += 1
        used += new is not None
        # A rank that has no batch left runs its last one again, for the others' sums, and adds
        # nothing.
        batch = batch if new is None else new
        _fit_all(model, fits, batch, number, ranks, lean, counts=new is not None)
    return sum(ranks.all_say(used))


def _fit_all(
    model: nn.Module,
    fits: Fits,
    batch: Any,
    number: int,
    ranks: Ranks,
    lean: float,
    *,
    counts: bool,
) -> None:
    """Fit each layer, as it is reached, to its norm, on the inputs that the layers before it make."""
    masks, targets = watch.token_masks(batch), norm_outputs(model, batch)

    def fit(layer: PointwiseNorm, args: tuple[Any, ...], output: Tensor) -> Tensor:
        site, own = fits[layer], original_forward(layer, *args)
        first = targets[layer].pop(0) if targets[layer] else own
        target = torch.lerp(own, first, lean) if first.shape == own.shape else own
        x, y = watch.site_tokens(layer, args[0], masks), watch.site_tokens(layer, target, masks)
        watch.require_finite(site.path, x, y, where=f" in batch {number - 1}")
        ranks.meet(site.path)
        counted = len(x) if counts else 0
        # The later a batch, the better the constants that fed it: its tokens count more.
        site.fit_(
            x[:counted],
            y[:counted],
            number,
            lambda it: watch.site_tokens(layer, it.forward(args[0]), masks)[:counted],
        )
        return site.fit.layer.forward(args[0])

    with watch.hooked(fits, fit):
        watch.call(model, batch)
    ranks.meet()


def norm_outputs(model: nn.Module, batch: Any) -> Outputs:
    """Run a batch through the original model and return its norms' outputs, a list per layer in call order."""
    outputs: Outputs = defaultdict(list)
    # A copy: the model may go on to write into its own.
    run_norms(
        model,
        dynorm_layers(model).values(),
        batch,
        lambda layer, _, y: outputs[layer].append(y.clone()),
    )
    return outputs


def run_norms(
    model: nn.Module, norms: Iterable[nn.Module], batch: Any, see: Callable[..., object]
) -> Any:
    """Run a batch, without gradient, with the norm in the place of each layer; ``see`` gets each, its input and output.

    The random state comes back, so that a model which draws numbers draws the same ones when it is
    run again.
    """

    def hook(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(norm, PointwiseNorm):
            output = original_forward(norm, *args)
        see(norm, args[0] if args else next(iter(kwargs.values())), output)
        return output

    with watch.undisturbed(model, batch), watch.hooked(norms, hook, with_kwargs=True):
        return watch.call(model, batch)
