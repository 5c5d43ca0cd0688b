"""Set the constants of a converted model from real activations, layer after layer, in one pass over the batches."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count, islice

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, has_length, iterate, require_finite, site_tokens, token_masks
from dynorm.broadcast import layers_from_first_rank_
from dynorm.errors import CalibrationWarning, ModelError
from dynorm.fit.lockstep import LayerCall, PausedRun, can_share, stopping_at
from dynorm.fit.site_fit import SiteFit
from dynorm.fit.witnesses import Witnesses
from dynorm.guard import require_plain_model, require_trainable, unchanged_on_error, undisturbed
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.plain import Plain
from dynorm.replace.converted import replaced_by, require_layers
from dynorm.replace.original import Outputs
from dynorm.table import Table, count_of

Fits = dict[PointwiseNorm, SiteFit]
# At most this many batches go through the model side by side, and no further one is started once
# they have this many tokens. The inputs of a layer for all of them are in memory at a time.
_TOKENS_AT_ONCE = 1 << 15
_RUNS_AT_ONCE = 64
# Where a layer's target lies between the norm's output on the layer's own inputs, at 0, and the norm's
# output in the original model, at 1, which undoes errors of the layers before. Measured without
# training, with 0 and with this: an encoder with norms after the sums, no witnesses, has a cosine
# of .76 and .87; one of images with norms before them .83 and .86, and with 8 witnesses .93 and
# .91; a decoder with 8 witnesses a divergence of .41 and .30.
_LEAN = 0.7


@dataclass(frozen=True)
class SiteCalibration:
    """How one layer was fitted."""

    path: str
    tokens: int  # the number of tokens that it was fitted to, without padding
    beta: float  # its constant
    error: float  # root of the residual over the spread of the target, in the calibration data
    # How well a token's size follows from its witnesses; None for a layer that may not have any.
    witnesses: Witnesses | None = None


@dataclass(frozen=True)
class CalibrationReport(Plain):
    """The result of ``calibrate_``, one row per site.

    Args:
        sites: the fitted layers, in call order.
        batches: how many batches were used.
        unreached: paths of the layers that kept their constants. No batch reached them, or all
            their inputs were the same in every channel, and nothing can be fitted to those.
    """

    sites: list[SiteCalibration]
    batches: int
    unreached: list[str]

    def __str__(self) -> str:
        """Return the report as a table."""
        columns = ["site", "tokens", "beta", "error"]
        with_witnesses = any(site.witnesses for site in self.sites)
        if with_witnesses:
            columns += ["witnesses", "explained"]
        rows = []
        for site in self.sites:
            row: list[object] = [site.path, site.tokens, site.beta, f"{site.error:.3f}"]
            if with_witnesses and site.witnesses:
                channels = " ".join(map(str, site.witnesses.channels))
                row += [channels or "none", f"{site.witnesses.explained_by_all:.0%}"]
            elif with_witnesses:
                row += ["none", "0%"]
            rows.append(row)
        notes = [f"{path}: not reached, or by constant inputs only" for path in self.unreached]
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        title = f"{count_of(len(self.sites), 'site')} calibrated on {batches}"
        return str(Table(columns, rows, notes, title))


def calibrate_(model: nn.Module, batches: Iterable[Batch]) -> CalibrationReport:
    """Set the constants, witnesses, weight and bias of every point-wise layer from batches of real inputs, in place.

    Up to 32,768 tokens go through the model side by side. They wait at each layer until all of them
    have arrived. The layer is then fitted to all of them by least squares, and they go on with its
    new output. So every layer is fitted to the inputs that the converted layers before it produce,
    and the order of the batches does not matter. If there is more text, the next tokens go through
    the model in the same way and are added to the sums. They count more, because better constants
    produced their inputs.

    The cost is two forward passes over the data, three more over one batch to try the model, and
    about 17 point-wise functions per site. The activations of 32,768 tokens at one site are in
    memory, plus O(C) per site. A model that keeps something of a batch, on its modules or elsewhere,
    runs batch after batch; each layer is then fitted to one batch more at a time.

    A layer that :func:`convert_` allowed N witnesses gets at most N, with their gains, chosen one by
    one. Each call chooses them again (see :class:`dynorm.fit.witnesses.TokenScales`, which keeps a
    matrix of 66 x 66 per site). ``log_gain`` is then a new parameter: make the optimizer afterwards.

    Of an annealed layer only the constants are set. Its weight and bias are the norm's, and must
    stay so until the annealing begins.

    Padding is left out where a batch is a dict with ``attention_mask`` or
    ``decoder_attention_mask`` (1 = token), ``src_key_padding_mask`` or ``tgt_key_padding_mask``
    (True = padding). The model is run in eval mode, without gradient; random states and buffers are
    afterwards as they were.

    Under torch.distributed with an initialized group, call it on every rank: rank 0 calibrates on
    its batches, and the others get its layers. A model that is too large for one device may be
    spread over several by accelerate's ``device_map``.

    Args:
        model: a model that :func:`convert_` converted; plain, not sharded: shard it afterwards.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``; any
            iterable, read once. One without a length may have at most 500, which are all read
            first. They are moved to the model's device.

    Returns:
        A report with one row per site.

    Raises:
        ModelError: the model has no point-wise layer, or one whose norm is not known (a loaded
            model); or a layer computes a parameter, or shares one with another module.
        DataError: ``batches`` is empty, one is of the wrong kind, the model cannot run it, or an
            activation is not finite (the message names the site). The constants are then as they
            were.

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
    require_plain_model(model)
    layers = require_layers(model, with_norms=True)
    for path, layer in layers.items():
        require_trainable(layer, path)
        layer.require_stored(path)
    _require_unshared(model, layers)
    report = layers_from_first_rank_(model, lambda: _calibrate(model, layers, batches))
    if report.unreached:
        warnings.warn(
            f"kept the constants of {', '.join(report.unreached)}: no batch reached them, or only "
            "with inputs that are the same in every channel; give batches that use them",
            CalibrationWarning,
            stacklevel=2,
        )
    return report


def _require_unshared(model: nn.Module, layers: dict[str, PointwiseNorm]) -> None:
    """Refuse a weight or bias that two modules share: fitted to one, it would be wrong for the other."""
    fitted: dict[Tensor, str] = {}
    for path, layer in layers.items():
        if not isinstance(layer, AnnealedNorm):
            fitted.update(dict.fromkeys(layer.parameters(), path))
    for other, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            path = fitted.get(parameter, other)
            if path != other:
                raise ModelError(
                    f"a layer that is calibrated must not share its parameters, but {path!r} and "
                    f"{other!r} have the same {name}: give one of them a copy, as in "
                    f"module.{name} = nn.Parameter(module.{name}.detach().clone())"
                )


def _calibrate(
    model: nn.Module, layers: dict[str, PointwiseNorm], batches: Iterable[Batch]
) -> CalibrationReport:
    """Fit the layers on this process."""
    found = []
    for path, layer in layers.items():
        norm = replaced_by(layer)
        assert norm is not None
        found.append(SiteFit(layer, norm, path))
    in_call_order = sorted(found, key=lambda fit: fit.order)
    fits: Fits = {fit.layer: fit for fit in in_call_order}
    with unchanged_on_error(fits), undisturbed(model, evaluate=True):
        used = _fit_groups(model, fits, batches)
    sites = []
    unreached = []
    for layer, fit in fits.items():
        if not fit.tokens:
            unreached.append(fit.path)
            continue
        beta = float(layer.beta().detach())
        sites.append(SiteCalibration(fit.path, fit.tokens, beta, fit.error, fit.witnesses))
    return CalibrationReport(sites, used, unreached)


def _fit_groups(model: nn.Module, fits: Fits, batches: Iterable[Batch]) -> int:
    """Fit the layers to group after group of batches; return how many batches there were."""
    if not has_length(batches):
        # An iterable without an end is refused before the model runs.
        batches = list(iterate(batches))
    remaining = iterate(batches)
    looked_at = list(islice(remaining, 2))
    side_by_side = can_share(model, fits, looked_at[0], looked_at[-1])
    numbered = enumerate(chain(looked_at, remaining))
    used = 0
    with stopping_at(fits):
        for group in count(1):
            with ExitStack() as after:
                runs = []
                tokens = 0
                for number, batch in numbered:
                    run = _Run(model, batch, number, side_by_side)
                    after.callback(run.close)
                    runs.append(run)
                    if run.call is not None:
                        tokens += run.call.x.numel() // run.call.layer.channels
                    is_full = tokens >= _TOKENS_AT_ONCE or len(runs) == _RUNS_AT_ONCE
                    if is_full or not side_by_side:
                        break
                if not runs:
                    return used
                used += len(runs)
                # The later a group, the better the constants that fed it: its tokens count more.
                _fit_group(runs, fits, group)
    raise AssertionError


def _fit_group(runs: list["_Run"], fits: Fits, weight: float) -> None:
    """Fit one layer after another until all runs are over: each time the first that a run waits at."""
    order = list(fits)
    while True:
        waiting: dict[PointwiseNorm, list[_Run]] = defaultdict(list)
        for run in runs:
            if run.call is not None:
                waiting[run.call.layer].append(run)
        if not waiting:
            return
        layer = min(waiting, key=order.index)
        fit = fits[layer]
        pairs = [run.tokens(fit.path) for run in waiting[layer]]
        x = torch.cat([inputs for inputs, _ in pairs])
        y = torch.cat([targets for _, targets in pairs])
        fit.fit_(x, y, weight)
        for run in waiting[layer]:
            run.resume()


class _Run(PausedRun):
    """The run of a batch through the layers, with another one through the norms."""

    def __init__(self, model: nn.Module, batch: Batch, number: int, side_by_side: bool) -> None:
        self._masks = token_masks(batch)
        self._where = f" in batch {number}"
        self._norm_outputs: Outputs = defaultdict(list)
        self._original = PausedRun(model, batch)
        try:
            if not side_by_side:
                # Two runs of a model that keeps something must not overlap.
                while self._advance_original():
                    pass
            super().__init__(model, batch, lambda layer, x: layer.forward(x))
        except BaseException:
            self._original.close()
            raise

    def close(self) -> None:
        """End both runs."""
        self._original.close()
        super().close()

    def tokens(self, path: str) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs and the outputs that it should have, both (tokens, C)."""
        assert self.call is not None
        layer = self.call.layer
        x = site_tokens(layer, self.call.x, self._masks)
        y = site_tokens(layer, self._target(self.call), self._masks)
        require_finite(path, x, y, where=self._where)
        return x, y

    def _target(self, call: LayerCall) -> Tensor:
        outputs = self._norm_outputs[call.layer]
        while not outputs and self._advance_original():
            pass
        # An expert of a mixture may get other tokens here than in the original.
        original = outputs.pop(0) if outputs else None
        if original is None or original.shape != call.norm_output.shape:
            return call.norm_output
        return torch.lerp(call.norm_output, original, _LEAN)

    def _advance_original(self) -> bool:
        """Keep the norm's output where the original model waits, and let it go on; False at its end."""
        call = self._original.call
        if call is None:
            return False
        self._norm_outputs[call.layer].append(call.norm_output)
        self._original.resume()
        return True
