"""The report: what a converted model lost, site by site and as a whole, on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.family import NAMES
from dynorm.guard import require_plain_model
from dynorm.layers import PointwiseNorm
from dynorm.replace.specs import dynorm_layers, original_forward, replaced_by, require_layers
from dynorm.report.output import OutputComparison, OutputReport
from dynorm.report.stats import CoreFit, Picture, SiteStats
from dynorm.watch import call, hooked, iterate, require_finite, site_tokens, token_masks, undisturbed

# A value is saturated when the function gives more than this share of its bound: beyond 3 sqrt(beta) for DyISRU.
SATURATION = 0.95

See = Callable[[PointwiseNorm, Tensor, Tensor], None]


@dataclass(frozen=True)
class SiteReport:
    """One replaced norm. The core is the norm without its weight and bias, ``(x - mean) / sigma`` or ``x / rms``.

    Args:
        path: where it stands.
        kind: the norm that stood there: "layernorm" or "rmsnorm".
        layer: what stands there now: "dyisru", "dyt", "derf" or "linear".
        channels: C.
        tokens: how many tokens the original norm saw, padding not counted.
        outlier: the largest value of the core: ``|x - mean|`` in sigmas of its own token, sqrt(C - 1) at most (for
            an RMSNorm ``|x|`` in the token's rms, sqrt(C) at most).
        outlier_site: the largest ``|x - mean|`` in typical sigmas, the geometric mean over the site's tokens; no bound.
        sigma_spread: standard deviation of the natural logarithm of the tokens' sigma (an RMSNorm's rms): 0 if all are
            alike, and then a constant serves as well as the norm; 0.5 if they commonly differ by a factor of 1.6.
        sigma_range: the 99th percentile of sigma over the 1st.
        error_linear: what ``scale / sqrt(beta) (x - c)`` leaves of the core, ``|y - f| / |y|`` over all held-out tokens
            and channels, with one beta and the centre c fitted on other tokens.
        error_dyt: the same of ``scale tanh((x - c) / sqrt(beta))``.
        error_dyisru: the same of ``scale (x - c) / sqrt(beta + (x - c)^2)``.
        error_now: how far what the converted layer gives, fed by the converted model, lies from what the norm gave in
            the original one: root of the squared distance over that of the norm's outputs from their channel's mean,
            1 being as bad as a constant. None where the two cannot be paired.
        beta: the layer's constant, as the inverse square of its slope (the channels' median where there are many).
        center: its centre (the median likewise), or None.
        saturated: share of the values that the converted layer takes beyond 95 % of its bound; of the linear control,
            which has none, beyond 95 % of the norm's.
        fit: the constants that the three errors of the core belong to.
        picture: what its picture is drawn from.
    """

    path: str
    kind: str
    layer: str
    channels: int
    tokens: int
    outlier: float
    outlier_site: float
    sigma_spread: float
    sigma_range: float
    error_linear: float
    error_dyt: float
    error_dyisru: float
    error_now: float | None
    beta: float
    center: float | None
    saturated: float | None
    fit: CoreFit = field(repr=False)
    picture: Picture = field(repr=False)


@dataclass(frozen=True)
class ModelReport:
    """What ``measure`` found.

    Args:
        model: the class of the model.
        sites: the replaced norms, in call order.
        output: the model's output beside the original's.
        batches: how many batches were measured.
        unreached: paths of the layers that no batch reached.
        meta: whatever should stand beside the figures: recipe, texts, seeds, versions.
    """

    model: str
    sites: list[SiteReport]
    output: OutputReport
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows, without the sampled points; no NaN, but None."""
        from dynorm.report.text import plain

        values = asdict(self)
        for site in values["sites"]:
            site["bins"] = site.pop("picture")["bins"]
        return {name: plain(value) for name, value in values.items()}

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file; see :func:`save_html`."""
        from dynorm.report.html import save_html

        save_html(self, path)

    def __str__(self) -> str:
        """Return the report as a table, at most 120 columns wide."""
        from dynorm.report.text import table

        return table(self)


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    output: Callable[[Any], Tensor] | None = None,
    original: nn.Module | None = None,
    fit_on: Iterable[Any] | None = None,
    seed: int = 0,
    points: int = 1500,
    meta: Mapping[str, Any] | None = None,
) -> ModelReport:
    """Measure what a converted model lost, on batches that its constants were not fitted on.

    Each batch is run through the original and through the converted model, once each; a batch of ``fit_on`` through the
    original alone. Everything is summed as it goes by, so memory is that of one batch, plus histograms of
    0.3 MB a site; of an encoder the sentence embeddings are kept. Padding is left out as in :func:`calibrate_`. The
    models are run in eval mode, without gradient; they, their buffers and random states are afterwards as they were.

    Args:
        model: a model that :func:`convert_` converted, with its final constants.
        batches: held-out tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        output: finds the tensor to compare in the model's output. None takes its ``logits``, else its
            ``last_hidden_state``, else its first tensor. A ``last_hidden_state`` (B, T, D), or any such tensor with a
            mask in the batch, is compared as sentence embeddings; logits of each of ``input_ids``, where no token
            changes the logits before it, as a language model's; all else as one vector a sample.
        original: the untouched model, where training has changed other weights too; None takes the same model with
            its original norms.
        fit_on: batches to fit the functions of :class:`SiteReport` on, before their errors are measured on
            ``batches``. None fits them on the first half of each batch's tokens and measures on the second.
        seed: of the sampled points.
        points: how many points to sample a site, for its picture.
        meta: what should stand beside the figures.

    Returns:
        A report with a row a site.

    Raises:
        ArgumentError: ``points`` is not positive.
        ModelError: the model has no point-wise layer, one that replaced nothing (a loaded model), or ``original`` lacks
            its norms.
        DataError: there is no batch, one is of the wrong kind, the models cannot run it, no layer is reached, or
            an activation or output is not finite (the message names the site).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> report = dynorm.measure(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].path, report.sites[0].tokens, report.output.kind
        ('1', 256, 'tensor')
    """
    if points < 1:
        raise ArgumentError(f"points must be at least 1, got {points}")
    require_plain_model(model)
    pair = _Pair(model, original)
    sites = {layer: _Site(path, layer, seed, points) for path, layer in require_layers(model, with_norms=True).items()}
    comparison = OutputComparison(output)
    with ExitStack() as stack:
        for each in pair.models:
            stack.enter_context(undisturbed(each, evaluate=True))
        for batch in () if fit_on is None else iterate(fit_on, "fit_on"):
            _fit_batch(pair, sites, batch)
        for batch in iterate(batches):
            _measure_batch(pair, sites, batch, comparison, halve=fit_on is None)
    return _report(type(model).__name__, sites, comparison, meta)


class _Pair:
    """The original and the converted model, each run with its norms or layers watched."""

    def __init__(self, model: nn.Module, original: nn.Module | None) -> None:
        self.model = model
        self.original = original
        self.layers: dict[nn.Module, PointwiseNorm] = {layer: layer for layer in dynorm_layers(model).values()}
        self.norms = self.layers if original is None else _norms_of(original, model)
        self.models = [model] if original is None else [model, original]

    def run_original(self, batch: Any, see: See) -> Any:
        """Return the original's output; ``see`` gets each layer with its norm's input and output."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            layer = self.norms[module]
            output = original_forward(layer, *args) if self.original is None else output
            see(layer, args[0], output)
            return output

        # Random states come back, so that a model which draws numbers draws the same ones when converted.
        with undisturbed(self.models[-1], batch), hooked(self.norms, hook):
            return call(self.model if self.original is None else self.original, batch)

    def run_converted(self, batch: Any, see: See) -> Any:
        """Return the converted model's output; ``see`` gets each layer with its input and output."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            see(self.layers[module], args[0], output)

        with hooked(self.layers.values(), hook):
            return call(self.model, batch)


def _norms_of(original: nn.Module, model: nn.Module) -> dict[nn.Module, PointwiseNorm]:
    require_plain_model(original)
    norms: dict[nn.Module, PointwiseNorm] = {}
    for path, layer in dynorm_layers(model).items():
        try:
            norm = original.get_submodule(path)
        except AttributeError as error:
            raise ModelError(
                f"original must be the model before convert_, but has no {path!r}: pass a model of the same class"
            ) from error
        if isinstance(norm, PointwiseNorm):
            raise ModelError(f"original must be the model before convert_, but its {path!r} is converted already")
        norms[norm] = layer
    return norms


class _Site:
    """A layer with the sums of what its norm sees in the original, and of what it makes of it itself."""

    def __init__(self, path: str, layer: PointwiseNorm, seed: int, points: int) -> None:
        replaced = replaced_by(layer)
        assert replaced is not None
        self.path = path
        self.layer = layer
        self.stats = SiteStats(replaced.site, seed + replaced.site.order, points)
        self._twin = _without_affine(layer)
        self._values = self._saturated = 0
        self._compared, self._residual = 0, 0.0
        self._sums = torch.zeros(2, layer.channels, dtype=torch.float64, device=next(layer.parameters()).device)

    def tokens(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        """Return the tokens of x, (tokens, C), without padding, after a look at them."""
        tokens = site_tokens(self.layer, x, masks)
        require_finite(self.path, tokens)
        return tokens

    def compare(self, now: Tensor, wanted: Tensor) -> None:
        """Add what the layer gives, and what the norm gave there; (tokens, C)."""
        wanted, now = wanted.double().to(now.device), now.double()
        self._compared += len(now)
        self._residual += float((now - wanted).square().sum())
        self._sums = self._sums + torch.stack([wanted.sum(0), wanted.square().sum(0)])

    def add_saturation(self, x: Tensor) -> None:
        """Count the tokens' values near the bound."""
        self._saturated += int((self._twin(x).abs() > SATURATION * abs(self.layer.scale)).sum())
        self._values += x.numel()

    def report(self) -> SiteReport:
        """Return the row."""
        stats, layer = self.stats, self.layer
        fit = stats.fit()
        outlier, outlier_site = stats.outliers()
        sigma_spread, sigma_range = stats.spread()
        return SiteReport(
            path=self.path,
            kind=stats.site.kind,
            layer=NAMES.get(type(layer), type(layer).__name__),
            channels=layer.channels,
            tokens=stats.tokens,
            outlier=outlier,
            outlier_site=outlier_site,
            sigma_spread=sigma_spread,
            sigma_range=sigma_range,
            error_linear=fit.errors["linear"],
            error_dyt=fit.errors["dyt"],
            error_dyisru=fit.errors["dyisru"],
            error_now=self._error(),
            beta=float(layer.beta().detach().median()),
            center=None if layer.center is None else float(layer.center.detach().median()),
            saturated=self._saturated / self._values if self._values else None,
            fit=fit,
            picture=stats.picture(),
        )

    def _error(self) -> float | None:
        if not self._compared:
            return None
        y, yy = self._sums / self._compared
        spread = float((yy - y * y).sum()) * self._compared
        return math.sqrt(self._residual / spread) if spread > 0 else None


def _without_affine(layer: PointwiseNorm) -> PointwiseNorm:
    """The layer over the last axis of (tokens, C), without weight and bias."""
    plain = {"normalized_shape": layer.channels, "elementwise_affine": False, "bias": False, "dim": -1}
    device = next(layer.parameters()).device
    twin = type(layer)(**(layer.config() | plain), device=device, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(layer.get_parameter(name).reshape(parameter.shape))
    return twin


def _fit_batch(pair: _Pair, sites: dict[PointwiseNorm, _Site], batch: Any) -> None:
    masks = token_masks(batch)

    def see_norm(layer: PointwiseNorm, x: Tensor, y: Tensor) -> None:
        sites[layer].stats.add_fitted(sites[layer].tokens(x, masks))

    pair.run_original(batch, see_norm)


def _measure_batch(
    pair: _Pair, sites: dict[PointwiseNorm, _Site], batch: Any, comparison: OutputComparison, *, halve: bool
) -> None:
    masks = token_masks(batch)
    outputs: dict[PointwiseNorm, list[Tensor]] = {layer: [] for layer in sites}

    def see_norm(layer: PointwiseNorm, x: Tensor, y: Tensor) -> None:
        site, tokens = sites[layer], sites[layer].tokens(x, masks)
        # A copy: the model may go on to write into its own.
        outputs[layer].append(site.tokens(y, masks).clone())
        site.stats.add(tokens, fitted=len(tokens) // 2 if halve else 0)

    def see_layer(layer: PointwiseNorm, x: Tensor, y: Tensor) -> None:
        site, now = sites[layer], site_tokens(layer, y, masks)
        site.add_saturation(site.tokens(x, masks))
        wanted = outputs[layer].pop(0) if outputs[layer] else None
        if wanted is not None and wanted.shape == now.shape:
            site.compare(now, wanted)

    first = pair.run_original(batch, see_norm)
    second = pair.run_converted(batch, see_layer)
    comparison.add(batch, first, second, lambda changed: pair.run_original(changed, lambda *_: None))


def _report(
    name: str,
    sites: dict[PointwiseNorm, _Site],
    comparison: OutputComparison,
    meta: Mapping[str, Any] | None,
) -> ModelReport:
    reached = sorted((s for s in sites.values() if s.stats.tokens), key=lambda s: s.stats.site.order)
    if not reached:
        raise DataError("the batches must reach at least one converted norm, but reached none: give others")
    unreached = [site.path for site in sites.values() if not site.stats.tokens]
    rows = [site.report() for site in reached]
    return ModelReport(name, rows, comparison.report(), comparison.batches, unreached, dict(meta or {}))
