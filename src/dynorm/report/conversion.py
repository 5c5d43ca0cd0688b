"""Measure the loss of a converted model on held-out data: of each site, and of its output."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, call, iterate, site_tokens, token_masks
from dynorm.errors import CalibrationWarning
from dynorm.family import NAMES
from dynorm.guard import hooked, require_plain_model, undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.layers.saturation import saturated_share
from dynorm.replace.converted import (
    layers_without_norms,
    norms_of,
    replaced_by,
    require_layers,
    warn_of_defaults,
)
from dynorm.replace.original import run_norms
from dynorm.replace.weights import require_same_weights
from dynorm.report.output import OutputComparison, OutputReport
from dynorm.report.records import ModelReport, SiteReport
from dynorm.report.stats import (
    LogSums,
    Reservoir,
    SiteStats,
    batches_with_shares,
    reached_sites,
)
from dynorm.theory import token_moment

# The number of tokens in the picture of the sums.
_DRAWN = 400
# Warn if the size error is above both of these: a multiple of the fit's, and a minimum.
_UNLIKE = 2.0
_LEAST_UNLIKE = 0.1


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    output: Callable[[Any], Tensor] | None = None,
    original: nn.Module | None = None,
    fit_on: Iterable[Batch] | None = None,
    seed: int = 0,
    meta: Mapping[str, object] | None = None,
) -> ModelReport:
    """Measure the loss of a converted model, on batches that its constants were not fitted on.

    Each batch is run once through the original and once through the converted model; a batch of
    ``fit_on`` only through the original. Everything is summed on the way, so memory is that of one
    batch, plus histograms of 0.3 MB per site; for an encoder the sentence embeddings are kept.
    Padding is left out as in :func:`calibrate_`. The models are run in eval mode, without gradient;
    they, their buffers and random states are afterwards as they were. The report covers this
    process only: in a group of processes nothing is sent, and each may call it or not.

    Layers whose norm is not known, because the model was loaded or folded with them, have no row.
    If all are such, only the outputs are compared, and ``original`` must be given.

    Args:
        model: a model that :func:`convert_` converted, with its final constants.
        batches: held-out tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        output: a function that takes the model's output and returns the tensor to compare. If
            None, the ``logits`` are compared, else the ``last_hidden_state``, else the first
            tensor. A ``last_hidden_state`` (B, T, D), or any tensor of that shape if the batch has
            a mask, is compared as sentence embeddings; if the batch has ``pixel_values``, by its
            class token, pooled or first. Logits of each of ``input_ids`` are compared as a language
            model's if no token changes the logits before it. Everything else is compared as one
            vector per sample.
        original: a copy of the model that was made before :func:`convert_`, or the original loaded
            again. It must be given after training and for a loaded model. None takes the same
            model with its original norms, which is the original only while all other weights are
            those of the conversion.
        fit_on: batches to fit the functions of :class:`SiteReport` on, before their errors are
            measured on ``batches``. If None, they are fitted on the first half of each batch's
            tokens and measured on the second.
        seed: seed of the sampled points.
        meta: facts to show with the figures, such as recipe and seeds.

    Returns:
        A report with one row per site.

    Raises:
        ModelError: the model has no point-wise layer, or ``original`` lacks its norms; or without
            ``original`` no norm is known (a loaded model), or other weights have changed since the
            conversion.
        DataError: there is no batch, one is of the wrong kind, the models cannot run it, no batch
            reaches a layer, or an activation or output is not finite (the message names the site).

    Warns:
        CalibrationWarning: layers have default constants; or with ``fit_on``, the layers misjudge
            the sizes of these tokens much more than of those that they were fitted to.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> _ = dynorm.calibrate_(model, [torch.randn(64, 8)])
        >>> report = dynorm.measure(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].path, report.sites[0].tokens, report.output.kind
        ('1', 256, 'tensor')
    """
    require_plain_model(model)
    default = warn_of_defaults(model)
    if original is not None:
        require_plain_model(original)
    measurement = _Measurement(model, original, OutputComparison(output), seed)
    with undisturbed(nn.ModuleList([model, measurement.original]), evaluate=True):
        for batch, share in batches_with_shares(iterate(batches), fit_on):
            measurement.add(batch, share)
    facts = dict(meta or {})
    if default:
        facts["default_constants"] = len(default)
    report = measurement.report(facts)
    _warn_of_unlike_inputs(report.sites)
    return report


def _warn_of_unlike_inputs(sites: Sequence[SiteReport]) -> None:
    """Warn if witnesses misjudge the sizes of held-out tokens much more than those of the fit."""
    unlike = []
    for site in sites:
        fitted = site.size_error_fit
        if not site.witnesses or fitted is None:
            continue
        if site.size_error > max(_UNLIKE * fitted, _LEAST_UNLIKE):
            unlike.append(site)
    if not unlike:
        return
    worst = max(unlike, key=lambda site: site.size_error)
    warnings.warn(
        f"the measured inputs must be like those of the fit, but at {len(unlike)} of {len(sites)} "
        f"sites the layers misjudge the sizes of tokens more than {_UNLIKE:g} times as much, at "
        f"{worst.path} by {worst.size_error:.0%} instead of {worst.size_error_fit:.0%}: calibrate "
        "on inputs of this kind too, or with more witnesses",
        CalibrationWarning,
        stacklevel=3,
    )


def compare(
    model: nn.Module,
    original: nn.Module,
    batches: Iterable[Batch],
) -> OutputReport:
    """Compare the outputs of a model and its original on all batches; neither is changed."""
    comparison = OutputComparison()

    def run_original(batch: Batch) -> object:
        return call(original, batch)

    with undisturbed(model, evaluate=True), undisturbed(original, evaluate=True):
        for batch in iterate(batches):
            before = run_original(batch)
            comparison.add(batch, before, call(model, batch), run_original)
    return comparison.report()


class _Measurement:
    """Runs the original and the converted model on each batch, and watches norms and layers."""

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module | None,
        comparison: OutputComparison,
        seed: int,
    ) -> None:
        self.model = model
        self.comparison = comparison
        # The layer that took the place of each norm.
        self.layer_of: dict[nn.Module, PointwiseNorm] = {}
        if original is None:
            layers = require_layers(model, with_norms=True)
            require_same_weights(
                model,
                "pass original=, a copy of the model that was made before convert_, such as "
                "copy.deepcopy(model)",
            )
            # Each layer can still run as the norm that it replaced.
            self.original = model
            self.layer_of = {layer: layer for layer in layers.values()}
        else:
            layers = _layers_to_compare(model)
            self.original = original
            for layer, norm in norms_of(original, layers, "original").items():
                if replaced_by(layer) is not None:
                    self.layer_of[norm] = layer
        compared = set(self.layer_of.values())
        self.stats: dict[PointwiseNorm, _LayerStats] = {}
        for path, layer in layers.items():
            if layer in compared:
                self.stats[layer] = _LayerStats(path, layer, seed)

    def add(self, batch: Batch, share: float) -> None:
        """Add a batch, with the share of its tokens to fit on; with 1 only the original is run."""
        fit_only = share == 1
        # The norms' outputs that no layer's output was compared with yet, in call order.
        pending: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.stats}

        def see_norm(norm: nn.Module, x: Tensor, y: Tensor) -> None:
            stats = self.stats[self.layer_of[norm]]
            tokens = stats.see(x, batch, share)
            if len(tokens):
                stats.add_sums(tokens, fit_only)
            if fit_only:
                return
            # A copy, because the model may later write into its own tensor.
            pending[stats.layer].append(stats.tokens_of(y, batch).clone())

        def see_layer(layer: PointwiseNorm, args: tuple[Tensor, ...], y: Tensor) -> None:
            stats = self.stats[layer]
            # Only to refuse inputs that are not finite.
            stats.tokens_of(args[0], batch)
            outputs = site_tokens(layer, y, token_masks(batch))
            stats.add_saturation(outputs)
            if pending[layer]:
                targets = pending[layer].pop(0)
                if targets.shape == outputs.shape:
                    stats.compare(outputs, targets)

        def run_original(changed: Batch) -> object:
            return run_norms(self.original, self.layer_of, changed, lambda *_: None)

        before = run_norms(self.original, self.layer_of, batch, see_norm)
        if not fit_only:
            with hooked(self.stats, see_layer):
                after = call(self.model, batch)
            self.comparison.add(batch, before, after, run_original)

    def report(self, meta: Mapping[str, object] | None) -> ModelReport:
        """Return the report, with the sites in call order."""
        all_stats = self.stats.values()
        # A loaded model has no site to compare, but an output.
        reached = reached_sites(all_stats, "converted norm") if all_stats else []
        return ModelReport(
            model=type(self.model).__name__,
            sites=[stats.report() for stats in reached],
            output=self.comparison.report(),
            batches=self.comparison.batches,
            left=layers_without_norms(self.model),
            unreached=[stats.site.path for stats in all_stats if not stats.tokens],
            meta=dict(meta or {}),
        )


def _layers_to_compare(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the layers whose paths must be norms in the original: all that are not folded."""
    layers = require_layers(model)
    to_compare = {}
    for path, layer in layers.items():
        if layer.weight is not None or replaced_by(layer) is not None:
            to_compare[path] = layer
    return to_compare


class _SumFit:
    r"""The error of predictions p of t, the sums C (sigma^2 + eps) of tokens, up to one factor.

    .. math:: \min_a \frac{\sum w (1 - a p / t)^2}{\sum w}
        = 1 - \frac{(\sum w p / t)^2}{\sum w (p / t)^2 \sum w}

    The factor, one for all tokens, is free because the layer's weight can make up for it. A large
    token counts more, by the root of its sum: ``w = sqrt(t)``.
    """

    def __init__(self) -> None:
        self._weights = 0.0
        self._ratios = 0.0
        self._squares = 0.0

    def add(self, prediction: Tensor | float, target: Tensor) -> None:
        """Add the sums of some tokens, as predicted and as they are."""
        weight = target.sqrt()
        ratio = prediction / target
        self._weights += float(weight.sum())
        self._ratios += float((weight * ratio).sum())
        self._squares += float((weight * ratio * ratio).sum())

    def squared_error(self) -> float:
        """Return the squared error with the best factor, between 0 and 1."""
        return 1 - self._ratios * self._ratios / (self._squares * self._weights)


class _LayerStats(SiteStats):
    """The sums of a layer's inputs and outputs, and of those of the norm that it replaced."""

    def __init__(self, path: str, layer: PointwiseNorm, seed: int) -> None:
        replaced = replaced_by(layer)
        assert replaced is not None
        super().__init__(replace(replaced.site, path=path), seed + replaced.site.order)
        self.layer = layer
        self.why = replaced.why
        self._seen_tokens = 0
        self._saturated = 0.0
        # The layer's outputs, compared with the norm's, the targets.
        self._compared_tokens = 0
        self._residual = 0.0
        device = next(layer.parameters()).device
        self._target_sum = torch.zeros(layer.channels, dtype=torch.float64, device=device)
        self._target_square = torch.zeros(layer.channels, dtype=torch.float64, device=device)
        # The errors of the sums, as the layer and as a constant predict them.
        self._by_layer = _SumFit()
        self._by_constant = _SumFit()
        # The logarithms of the predicted sizes over the norm's.
        self._size_ratios = LogSums()
        self._size_ratios_of_fit = LogSums()
        self._drawn_sums = Reservoir(_DRAWN, seed + replaced.site.order)

    def add_saturation(self, outputs: Tensor) -> None:
        """Add the layer's outputs (tokens, C)."""
        # The share of no outputs would be NaN.
        if len(outputs):
            self._saturated += float(saturated_share(self.layer, outputs)) * len(outputs)
        self._seen_tokens += len(outputs)

    def compare(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the layer's outputs and the norm's, both (tokens, C)."""
        outputs = outputs.double()
        targets = targets.double().to(outputs.device)
        self._compared_tokens += len(outputs)
        self._residual += float((outputs - targets).square().sum())
        self._target_sum += targets.sum(0)
        self._target_square += targets.square().sum(0)

    @torch.no_grad()
    def add_sums(self, x: Tensor, fit_only: bool) -> None:
        """Compare the norm's sums for x (tokens, C) with the layer's, ``beta + sum g u^2``.

        With ``fit_only`` the tokens are those of the fit, and only the ratios of sizes are kept.
        """
        layer = self.layer
        beta = layer.beta().double().median()
        x = x.double().to(beta.device)
        moment = token_moment(x, self.site.kind)
        tiny = torch.finfo(x.dtype).tiny
        norm_sum = (x.shape[1] * (moment + self.site.eps)).clamp_min(tiny)
        layer_sum = beta.expand_as(norm_sum)
        if layer.log_gain is not None:
            deviation = x
            if layer.center is not None:
                deviation = x - layer.center.double().flatten()
            witnesses = deviation[:, list(layer.witness_channels)]
            layer_sum = layer_sum + witnesses.square() @ layer.log_gain.double().exp()
        size_ratios = (layer_sum / norm_sum).log() / 2
        if fit_only:
            self._size_ratios_of_fit.add(size_ratios)
            return
        self._size_ratios.add(size_ratios)
        self._by_layer.add(layer_sum, norm_sum)
        self._by_constant.add(1.0, norm_sum)
        # Large tokens are rare, and are drawn more often.
        weight = (norm_sum / norm_sum.mean()).sqrt()
        self._drawn_sums.add(layer_sum.cpu(), norm_sum.cpu(), weight.cpu())

    def report(self) -> SiteReport:
        """Return the row."""
        layer = self.layer
        center = None
        if layer.center is not None:
            center = float(layer.center.detach().median())
        gains: tuple[float, ...] = ()
        if layer.log_gain is not None:
            gains = tuple(layer.log_gain.detach().double().exp().tolist())
        size_error_fit = None
        if self._size_ratios_of_fit.count:
            size_error_fit = self._size_ratios_of_fit.deviation()
        saturated = None
        if self._seen_tokens:
            saturated = self._saturated / self._seen_tokens
        return SiteReport(
            **self.figures(),
            layer=NAMES.get(type(layer), type(layer).__name__),
            error_now=self._output_error(),
            beta=float(layer.beta().detach().median()),
            center=center,
            saturated=saturated,
            witnesses=layer.witness_channels,
            gains=gains,
            explained=self._explained(),
            size_error=self._size_ratios.deviation(),
            size_error_fit=size_error_fit,
            why=self.why,
            sums=self._drawn_sums.points(),
            fit=self.fit(),
        )

    def _output_error(self) -> float | None:
        """Return the distance to the norm's outputs over their spread; None if nothing compares."""
        count = max(self._compared_tokens, 1)
        mean = self._target_sum / count
        mean_square = self._target_square / count
        total_spread = float((mean_square - mean * mean).sum()) * self._compared_tokens
        if not total_spread > 0:
            return None
        error: float = (self._residual / total_spread) ** 0.5
        return error

    def _explained(self) -> float:
        """Return the part of a constant's error that the layer's sum removes, from 0 to 1."""
        constant = self._by_constant.squared_error()
        if constant <= 0:
            return 0.0
        return max(1 - self._by_layer.squared_error() / constant, 0.0)
