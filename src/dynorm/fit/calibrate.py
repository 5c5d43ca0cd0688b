"""Set the constants of a converted model from real activations, layer after layer, in one pass over the batches."""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import MOST_CHOSEN, check_not_negative, check_share
from dynorm.batches import Batch, iterate, require_finite, site_tokens, token_masks
from dynorm.errors import CalibrationWarning
from dynorm.family import NAMES
from dynorm.fit.lockstep import LayerCall, PausedRun, can_share, stopping_at
from dynorm.fit.site_fit import SiteChoice
from dynorm.fit.witnesses import GOLDEN, Witnesses
from dynorm.guard import require_plain_model, require_trainable, unchanged_on_error, undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.plain import Plain
from dynorm.ranks import BATCH, OVER, Ranks
from dynorm.recipe import Recipe
from dynorm.replace.converted import (
    dynorm_layers,
    layers_without_norms,
    replaced_by,
    require_layers,
)
from dynorm.replace.original import Outputs
from dynorm.replace.swap import swap_
from dynorm.table import Column, Table

Fits = dict[PointwiseNorm, SiteChoice]
# At most this many batches go through the model side by side, and no further one is started once
# they have this many tokens. The inputs of a layer for all of them are in memory at a time.
_TOKENS_AT_ONCE = 1 << 15
_RUNS_AT_ONCE = 64
# If errors add up, each layer with few witnesses multiplies its output for this part of the tokens
# by exp(sigma n), with n normal and this sigma.
_WRONG_SIZES = 0.25
_SIZE_ERROR = 0.2
# With fewer tokens the reported error is too small: the error on other tokens is some tenths larger
# (measured with a LayerNorm and an RMSNorm of 64 channels).
FEW_TOKENS = 64
FEW_WITH_WITNESSES = 256


@dataclass(frozen=True)
class SiteCalibration:
    """How one layer was fitted."""

    path: str
    tokens: int  # the number of tokens that it was fitted to, without padding
    beta: float  # its constant; the median, if there is one per channel
    error: float  # root of the residual over the spread of the target, in the calibration data
    # How well a token's size follows from its witnesses; None for a layer that may not have any.
    witnesses: Witnesses | None = None
    layer: str = ""  # its name, such as "dyisru"
    # With ``to="auto"``: the errors on held-out tokens of all layers that could be chosen, the
    # simplest one first.
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> str:
        """Return the layer with the number of its witnesses, such as "linear +4"."""
        if self.witnesses is None:
            return self.layer
        return f"{self.layer} +{len(self.witnesses.channels)}"

    @property
    def is_few(self) -> bool:
        """Return whether it saw so few tokens that its error on other tokens will be larger."""
        least = FEW_TOKENS if self.witnesses is None else FEW_WITH_WITNESSES
        return self.tokens < least


@dataclass(frozen=True)
class CalibrationReport(Plain):
    """The result of ``calibrate_``, one row per site.

    Args:
        sites: the fitted layers, in call order.
        batches: how many batches were used, by all ranks.
        unreached: paths of the layers that kept their constants. No batch reached them, or all
            their inputs were the same in every channel, and nothing can be fitted to those.
        tolerance: by how much the error of a layer that ``to="auto"`` chose may exceed the best
            one.
        left: paths of the layers that were left as they are, because their norms are not known: the
            model was loaded with them.
    """

    sites: list[SiteCalibration]
    batches: int
    unreached: list[str]
    tolerance: float = Recipe.tolerance
    left: list[str] = field(default_factory=list)

    @property
    def few(self) -> list[str]:
        """Return the paths of the sites that saw fewer than 64 tokens, or 256 with witnesses.

        Their errors on other tokens will be larger than those reported.
        """
        return [site.path for site in self.sites if site.is_few]

    def __str__(self) -> str:
        """Return the report as a table."""
        notes = [f"{path}: not reached, or by constant inputs only" for path in self.unreached]
        notes += [f"{path}: left as it is, its norm is not known" for path in self.left]
        if self.few:
            notes.append(
                f"few tokens, so that errors on others will be larger: {', '.join(self.few)}"
            )
        sites = "site" if len(self.sites) == 1 else "sites"
        batches = "batch" if self.batches == 1 else "batches"
        title = f"{len(self.sites)} {sites} calibrated on {self.batches} {batches}"
        if any(site.errors for site in self.sites):
            columns, rows = self._choices()
        else:
            columns, rows = self._fits()
        return str(Table(columns, rows, notes, title))

    def _fits(self) -> tuple[list[str | Column], list[list[object]]]:
        """Return columns and rows of how each layer was fitted."""
        columns: list[str | Column] = [
            "site",
            "tokens",
            Column("beta", ".4g"),
            Column("error", ".3f"),
        ]
        rows: list[list[object]] = []
        for site in self.sites:
            rows.append([site.path, site.tokens, site.beta, site.error])
        if any(site.witnesses for site in self.sites):
            columns += ["witnesses", Column("explained", ".0%")]
            for row, site in zip(rows, self.sites, strict=True):
                channels = ""
                explained = 0.0
                if site.witnesses:
                    channels = " ".join(map(str, site.witnesses.channels))
                    if len(site.witnesses.channels) > MOST_CHOSEN:
                        channels = f"{len(site.witnesses.channels)} channels"
                    explained = site.witnesses.explained_by_all
                row += [channels or "none", explained]
        return columns, rows

    def _choices(self) -> tuple[list[str | Column], list[list[Any]]]:
        """Return columns and rows of the layers that each site's was chosen from."""
        names = next(list(site.errors) for site in self.sites if site.errors)
        group = f"held-out errors; chosen: the first within {self.tolerance:g} of the least"
        columns: list[str | Column] = ["site", "layer"]
        for name in names:
            # "linear with witnesses" follows "linear", which need not be said again.
            columns.append(Column(name.split(" ", 1)[-1], ".3f", group=group))
        rows = []
        for site in self.sites:
            rows.append([site.path, site.chosen, *map(site.errors.get, names)])
        return columns, rows


def calibrate_(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    lean: float = Recipe.lean,
    tolerance: float = Recipe.tolerance,
) -> CalibrationReport:
    """Set the constants, witnesses, weight and bias of every point-wise layer from batches of real inputs, in place.

    Up to 32,768 tokens go through the model side by side. They wait at each layer until all of them
    have arrived. The layer is then fitted to all of them by least squares, and they go on with its
    new output. So every layer is fitted to the inputs that the converted layers before it produce,
    and the order of the batches does not matter. If there is more text, the next tokens go through
    the model in the same way and are added to the sums. They count more, because better constants
    produced their inputs.

    The cost is one forward pass over the data (two if ``lean`` is above 0), three more over one batch
    to try the model, and about 17 point-wise functions per site. The activations of 32,768 tokens at
    one site are in memory, plus O(C) per site. A model that keeps something of a batch, on its
    modules or elsewhere, runs batch after batch; each layer is then fitted to one batch more at a
    time.

    A layer that :func:`convert_` allowed N witnesses gets at most N, with their gains, and the
    centre 0. Up to 16 are chosen one by one, and more are a sample of all channels
    (:class:`dynorm.fit.witnesses.Sample`). Each call chooses them again (see
    :class:`dynorm.fit.witnesses.TokenScales`, which keeps four matrices of 66 x 66 per site, or of
    N + 2 for a sample). ``log_gain`` is then a new parameter: make the optimizer afterwards.
    Witnesses that were named stay, and get their gains.

    With ``to="auto"`` there are four candidates, from the simplest: linear, linear with witnesses,
    DyISRU, and DyISRU with witnesses. Each site gets the first whose error on held-out tokens is at
    most ``tolerance`` above the best one's. (:func:`fold_` removes linear layers without
    witnesses.) All candidates are fitted side by side, in about twice the time. Each half of the
    batches that run together measures them before it is fitted to. The chosen layers are new
    modules: make the optimizer afterwards.

    Of an annealed layer only the constants are set. Its weight and bias are the norm's, and must
    stay so until the annealing begins.

    A layer whose norm is not known, because the model was loaded with it, is left as it is.

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
            errors of the layers before. In a pre-norm model errors add up in the residual stream,
            where a layer that repairs too much spoils the later ones. 0.7 is better only for a
            post-norm encoder with few witnesses or none.
        tolerance: how much larger than the smallest error that of a simpler layer may be, with
            ``to="auto"``. An error is the root of the squared one over the target's spread.

    Returns:
        A report with one row per site.

    Raises:
        ArgumentError: ``lean`` is not from 0 to 1, or ``tolerance`` negative.
        ModelError: the model has no point-wise layer, or none whose norm is known (a loaded model),
            or another rank's layers differ.
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
    with ranks.sharing_errors():
        require_plain_model(model)
        layers = require_layers(model, with_norms=True)
        for path, layer in layers.items():
            require_trainable(layer, path)
        ranks.require_alike(dynorm_layers(model).items())
        known = []
        for path, layer in layers.items():
            norm = replaced_by(layer)
            if norm:
                known.append((norm.site.order, path, layer, norm))
        # Without a lean errors add up from layer to layer: too small is safer than too large.
        errors_add_up = lean == 0
        fits: Fits = {}
        for _, path, layer, norm in sorted(known, key=itemgetter(0)):
            fits[layer] = SiteChoice(
                layer,
                norm,
                ranks,
                path,
                len(fits),
                errors_add_up=errors_add_up,
                tolerance=tolerance,
            )
        with unchanged_on_error(fits), undisturbed(model, evaluate=True):
            used = _fit_groups(model, fits, batches, ranks, lean)
    swap_(model, {layer: choice.settle_() for layer, choice in fits.items()})
    unreached = [choice.path for choice in fits.values() if not choice.fit.tokens]
    if unreached:
        warnings.warn(
            f"kept the constants of {', '.join(unreached)}: no batch reached them, or only with "
            "inputs that are the same in every channel; give batches that use them",
            CalibrationWarning,
            stacklevel=2,
        )
    sites = [_report(choice) for choice in fits.values() if choice.fit.tokens]
    return CalibrationReport(sites, used, unreached, tolerance, layers_without_norms(model))


def _report(choice: SiteChoice) -> SiteCalibration:
    fit = choice.fit
    return SiteCalibration(
        path=choice.path,
        tokens=fit.tokens,
        beta=float(fit.layer.beta().detach().median()),
        error=fit.error,
        witnesses=fit.witnesses,
        layer=NAMES.get(type(fit.layer), ""),
        errors=choice.errors if choice.chooses else {},
    )


def _fit_groups(
    model: nn.Module,
    fits: Fits,
    batches: Iterable[Batch],
    ranks: Ranks,
    lean: float,
) -> int:
    """Fit the layers to group after group of batches; return how many batches all ranks had."""
    remaining = iterate(batches)
    looked_at = list(islice(remaining, 2))
    side_by_side = bool(looked_at) and can_share(model, fits, looked_at[0], looked_at[-1])
    remaining = chain(looked_at, remaining)
    group_number = 0
    used = 0
    last_batch = None
    with stopping_at(fits):
        while True:
            group = _Group(model, fits, lean, side_by_side)
            try:
                group.fill(remaining, used)
                anybody_goes_on = BATCH in ranks.exchange(BATCH if group.runs else OVER)
                if not anybody_goes_on:
                    break
                group_number += 1
                used += len(group.runs)
                if group.runs:
                    last_batch = group.runs[-1].batch
                else:
                    # The other ranks wait for this one at each layer: it runs its last batch once
                    # more, and adds nothing to their sums.
                    assert last_batch is not None
                    group.add(last_batch, used, counts=False)
                # The later a group, the better the constants that fed it: its tokens count more.
                group.fit(ranks, group_number)
            finally:
                group.close()
    return sum(ranks.exchange(used))


class _Run:
    """The run of a batch through the layers, and the same through the norms if the fit needs it."""

    def __init__(
        self,
        model: nn.Module,
        fits: Fits,
        batch: Batch,
        number: int,
        lean: float,
        *,
        counts: bool,
        side_by_side: bool,
    ) -> None:
        self.batch = batch
        self.counts = counts
        self._masks = token_masks(batch)
        self._where = f" in batch {number}"
        self._lean = lean
        self._fits = fits
        self._wrong_sizes = _WrongSizes()
        self._first_outputs: Outputs = defaultdict(list)
        self._original: PausedRun | None = None
        if lean > 0:
            self._original = PausedRun(model, batch)
        try:
            if not side_by_side:
                # Two runs of a model that keeps something must not overlap.
                while self._advance_original():
                    pass
            self._converted = PausedRun(model, batch, self._answer)
        except BaseException:
            self.close()
            raise

    @property
    def call(self) -> LayerCall | None:
        """The call of a layer that the run has come to, or None at its end."""
        return self._converted.call

    def resume(self) -> None:
        """Go on to the next layer."""
        self._converted.resume()

    def close(self) -> None:
        """End both runs."""
        for run in (self._original, getattr(self, "_converted", None)):
            if run is not None:
                run.close()

    def tokens(self, path: str) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs and the outputs that it should have, both (tokens, C)."""
        assert self.call is not None
        layer = self.call.layer
        x = site_tokens(layer, self.call.x, self._masks)
        y = site_tokens(layer, self._target(self.call), self._masks)
        require_finite(path, x, y, where=self._where)
        if not self.counts:
            return x[:0], y[:0]
        return x, y

    def outputs(self, layer: PointwiseNorm) -> Tensor:
        """Return the outputs of a candidate for the layer on the layer's inputs, (tokens, C)."""
        assert self.call is not None
        y = site_tokens(self.call.layer, layer.forward(self.call.x), self._masks)
        return y if self.counts else y[:0]

    def _answer(self, layer: PointwiseNorm, x: Tensor) -> Tensor:
        """Return the output of the fitted layer; for some tokens in a wrong size, if errors add up."""
        choice = self._fits[layer]
        y = choice.fit.layer.forward(x)
        if self._lean > 0 or choice.fit.witnesses is None or choice.fit.is_sampled:
            return y
        return y * self._wrong_sizes.factor(layer, x, choice.place).to(y.dtype)

    def _target(self, call: LayerCall) -> Tensor:
        outputs = self._first_outputs[call.layer]
        while not outputs and self._advance_original():
            pass
        # An expert of a mixture may get other tokens here than in the original.
        original = outputs.pop(0) if outputs else None
        if original is None or original.shape != call.norm_output.shape:
            return call.norm_output
        return torch.lerp(call.norm_output, original, self._lean)

    def _advance_original(self) -> bool:
        """Keep the norm's output where the original model waits, and let it go on; False at its end."""
        if self._original is None or self._original.call is None:
            return False
        call = self._original.call
        self._first_outputs[call.layer].append(call.norm_output)
        self._original.resume()
        return True


class _WrongSizes:
    """The tokens of a batch that leave the layers too large or too small.

    On new text, a layer gets the size of some tokens wrong. The layers after it must have seen such
    tokens, so that they choose witnesses that show it. Otherwise the error grows from layer to layer.
    They are the same tokens at all layers: the others stay as they are everywhere.
    """

    def __init__(self) -> None:
        self._chosen: dict[torch.Size, Tensor] = {}

    def factor(self, layer: PointwiseNorm, x: Tensor, place: int) -> Tensor:
        """Return the factor of each token of a layer's input, of the shape of ``x`` with one channel."""
        uniform = _hash_of_tokens(layer, x, place)
        if uniform.shape not in self._chosen:
            self._chosen[uniform.shape] = uniform < _WRONG_SIZES
            # The numbers of these tokens are small at this layer, and from 0 to 1 at the others.
            uniform = uniform / _WRONG_SIZES
        normal = math.sqrt(2) * torch.erfinv((2 * uniform - 1).clamp(-1 + 1e-9, 1 - 1e-9))
        factor = (_SIZE_ERROR * normal).exp()
        return torch.where(self._chosen[uniform.shape], factor, 1.0)


class _Group:
    """Batches that go through the model side by side: a layer is fitted to all of them at once."""

    def __init__(self, model: nn.Module, fits: Fits, lean: float, side_by_side: bool) -> None:
        self.runs: list[_Run] = []
        self._model = model
        self._fits = fits
        self._lean = lean
        self._side_by_side = side_by_side

    def fill(self, batches: Iterator[Batch], number: int) -> None:
        """Start a run for each batch until there are enough tokens; ``number`` counts the batches before."""
        tokens = 0
        for batch in batches:
            run = self.add(batch, number + len(self.runs), counts=True)
            if run.call is not None:
                tokens += run.call.x.numel() // run.call.layer.channels
            if (
                not self._side_by_side
                or tokens >= _TOKENS_AT_ONCE
                or len(self.runs) == _RUNS_AT_ONCE
            ):
                return

    def add(self, batch: Batch, number: int, *, counts: bool) -> _Run:
        """Start one run."""
        run = _Run(
            self._model,
            self._fits,
            batch,
            number,
            self._lean,
            counts=counts,
            side_by_side=self._side_by_side,
        )
        self.runs.append(run)
        return run

    def fit(self, ranks: Ranks, weight: float) -> None:
        """Fit one layer after another until all runs are over: each time the first that a run waits at."""
        while True:
            waiting: dict[SiteChoice, list[_Run]] = defaultdict(list)
            for run in self.runs:
                if run.call is not None:
                    waiting[self._fits[run.call.layer]].append(run)
            if not waiting:
                ranks.require_same_place()
                return
            choice = min(waiting, key=attrgetter("place"))
            ranks.require_same_place(choice.path)
            self._fit_layer(choice, waiting[choice], weight, ranks)
            for run in waiting[choice]:
                run.resume()

    def _fit_layer(self, choice: SiteChoice, runs: list[_Run], weight: float, ranks: Ranks) -> None:
        inputs = []
        targets = []
        for run in runs:
            x, y = run.tokens(choice.path)
            inputs.append(x)
            targets.append(y)
        # The number of tokens of each batch, by rank.
        counts = ranks.exchange([len(x) for x in inputs])
        numbers = choice.fit.tokens + _numbers(counts, ranks.rank)
        numbers = numbers.to(inputs[0].device)
        x = torch.cat(inputs)
        y = torch.cat(targets)
        parts = [slice(None)]
        turns = max(len(of_rank) for of_rank in counts)
        if choice.chooses and turns > 1:
            # The second half of the batches measures the candidates that are fitted to the first.
            half = sum(counts[ranks.rank][: (turns + 1) // 2])
            parts = [slice(0, half), slice(half, None)]
        for part in parts:
            choice.fit_(x[part], y[part], weight, partial(_outputs, runs, part), numbers[part])

    def close(self) -> None:
        """End all runs."""
        for run in self.runs:
            run.close()


def _hash_of_tokens(layer: PointwiseNorm, x: Tensor, place: int) -> Tensor:
    """Return a number from 0 to 1 for each token, of the shape of ``x`` with one channel.

    It depends only on the signs of the token's channels, and on ``place``. A random number would
    also depend on the split into batches and on the number of processes.
    """
    dims = tuple(layer.dims)
    steps = torch.arange(1, layer.channels + 1, dtype=torch.float64, device=x.device)
    steps = (steps * (GOLDEN + place * math.sqrt(2))) % 1
    channels_last = torch.movedim(x, dims, tuple(range(-len(dims), 0)))
    signs = channels_last.flatten(-len(dims)) > 0
    uniform = (signs.double() @ steps) % 1
    for _ in dims:
        uniform = uniform[..., None]
    return torch.movedim(uniform, tuple(range(-len(dims), 0)), dims)


def _outputs(runs: list[_Run], part: slice, layer: PointwiseNorm) -> Tensor:
    return torch.cat([run.outputs(layer) for run in runs])[part]


def _numbers(counts: list[list[int]], rank: int) -> Tensor:
    """Number the tokens of all ranks, their batches taken in turn; return the numbers of this rank's.

    One process with all batches in this order would give the same numbers, so it holds out the same
    tokens. ``counts`` has the number of tokens in each batch, for each rank.
    """
    numbers = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    first = 0
    for turn in range(max(len(of_rank) for of_rank in counts)):
        for other, of_rank in enumerate(counts):
            if turn < len(of_rank):
                count = of_rank[turn]
                if other == rank:
                    numbers.append(
                        torch.arange(first, first + count, dtype=torch.float64, device="cpu")
                    )
                first += count
    return torch.cat(numbers)
