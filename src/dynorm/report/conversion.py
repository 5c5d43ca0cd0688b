"""Measure what a converted model lost, site by site and as a whole, on held-out data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import call, iterate, site_tokens, token_masks
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
from dynorm.report.output import OutputComparison, OutputReport
from dynorm.report.records import ModelReport, SiteReport
from dynorm.report.stats import Reservoir, SiteStats, parted, reached
from dynorm.theory import token_moment

# So many tokens are drawn in the picture of their sums.
_DRAWN = 400


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

    Each batch is run through the original and through the converted model, once each; a batch of
    ``fit_on`` through the original alone. Everything is summed as it goes by, so memory is that of
    one batch, plus histograms of 0.3 MB per site; of an encoder the sentence embeddings are kept.
    Padding is left out as in :func:`calibrate_`. The models are run in eval mode, without gradient;
    they, their buffers and random states are afterwards as they were. The report is that of this
    process: in a group of processes nothing is sent, and each may call it or not.

    Args:
        model: a model that :func:`convert_` converted, with its final constants.
        batches: held-out tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        output: finds the tensor to compare in the model's output. None takes its ``logits``, else
            its ``last_hidden_state``, else its first tensor. A ``last_hidden_state`` (B, T, D), or
            any such tensor with a mask in the batch, is compared as sentence embeddings, or where
            the batch has ``pixel_values`` by its class token, pooled or first; logits of each of
            ``input_ids``, where no token changes the logits before it, as a language model's; all
            else as one vector a sample.
        original: the untouched model, where training has changed other weights too; None takes the
            same model with its original norms.
        fit_on: batches to fit the functions of :class:`SiteReport` on, before their errors are
            measured on ``batches``. None fits them on the first half of each batch's tokens and
            measures on the second.
        seed: of the sampled points.
        points: how many points to sample for the picture of a site.
        meta: facts to show beside the figures, such as recipe and seeds.

    Returns:
        A report with one row per site.

    Raises:
        ArgumentError: ``points`` is not positive.
        ModelError: the model has no point-wise layer, or none whose norm is known (a loaded model),
            or ``original`` lacks its norms.
        DataError: there is no batch, one is of the wrong kind, the models cannot run it, no layer
            is reached, or an activation or output is not finite (the message names the site).

    Warns:
        CalibrationWarning: layers have default constants.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> _ = dynorm.calibrate_(model, [torch.randn(64, 8)])
        >>> report = dynorm.measure(model, [torch.randn(64, 8) for _ in range(4)])
        >>> report.sites[0].path, report.sites[0].tokens, report.output.kind
        ('1', 256, 'tensor')
    """
    require_plain_model(model)
    warn_of_defaults(model)
    if original is not None:
        require_plain_model(original)
    found = _Measurement(model, original, OutputComparison(output), seed, points)
    with undisturbed(nn.ModuleList([model, found.original]), evaluate=True):
        for batch, share in parted(iterate(batches), fit_on):
            found.add(batch, share)
    return found.report(meta)


def compare(model: nn.Module, original: nn.Module, batches: Iterable[Any]) -> OutputReport:
    """Return a model's output beside its original's, over all batches; both are left as they were."""
    found = OutputComparison()
    with undisturbed(model, evaluate=True), undisturbed(original, evaluate=True):
        for batch in iterate(batches):
            before = call(original, batch)
            found.add(
                batch,
                before,
                call(model, batch),
                lambda changed: call(original, changed),
            )
    return found.report()


class _Measurement:
    """The original and the converted model, run one after the other with their norms and layers watched."""

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module | None,
        comparison: OutputComparison,
        seed: int,
        points: int,
    ) -> None:
        layers = require_layers(model, with_norms=True)
        self.model, self.original, self.comparison = (
            model,
            model if original is None else original,
            comparison,
        )
        self.sites = {layer: _Site(path, layer, seed, points) for path, layer in layers.items()}
        # Without the original each layer runs its own norm.
        norms = (
            {each: each for each in self.sites}
            if original is None
            else norms_of(original, layers, "original")
        )
        self.norms = {norm: layer for layer, norm in norms.items()}

    def add(self, batch: Any, share: float) -> None:
        """Add a batch; one that the functions are fitted on as a whole is run through the original alone."""
        wanted: dict[nn.Module, list[Tensor]] = {layer: [] for layer in self.sites}

        def see_norm(norm: nn.Module, x: Tensor, y: Tensor) -> None:
            site = self.sites[self.norms[norm]]
            tokens = site.see(x, batch, share)
            if share < 1:
                if len(tokens):
                    site.add_sums(tokens)
                # A copy: the model may go on to write into its own.
                wanted[site.layer].append(site.tokens_of(y, batch).clone())

        def see_layer(layer: PointwiseNorm, args: tuple[Any, ...], y: Tensor) -> None:
            site, now = self.sites[layer], site_tokens(layer, y, token_masks(batch))
            site.tokens_of(args[0], batch)
            # The share of no outputs would be NaN.
            if len(now):
                site.saturated += float(saturated_share(layer, now)) * len(now)
            site.seen += len(now)
            norms = wanted[layer].pop(0) if wanted[layer] else None
            if norms is not None and norms.shape == now.shape:
                site.compare(now, norms)

        first = run_norms(self.original, self.norms, batch, see_norm)
        if share < 1:
            with hooked(self.sites, see_layer):
                second = call(self.model, batch)
            again = partial(run_norms, self.original, self.norms, see=lambda *_: None)
            self.comparison.add(batch, first, second, again)

    def report(self, meta: Mapping[str, Any] | None) -> ModelReport:
        """Return the report; sites in call order."""
        rows = [site.report() for site in reached(self.sites.values(), "converted norm")]
        return ModelReport(
            model=type(self.model).__name__,
            sites=rows,
            output=self.comparison.report(),
            batches=self.comparison.batches,
            left=layers_without_norms(self.model),
            unreached=[site.site.path for site in self.sites.values() if not site.tokens],
            meta=dict(meta or {}),
        )


class _Site(SiteStats):
    """A layer with the sums of its own inputs and outputs, beside those of the norm that it replaced."""

    def __init__(self, path: str, layer: PointwiseNorm, seed: int, points: int) -> None:
        replaced = replaced_by(layer)
        assert replaced is not None
        super().__init__(replace(replaced.site, path=path), seed + replaced.site.order, points)
        self.layer, self.why = layer, replaced.why
        device = next(layer.parameters()).device
        self.seen, self.saturated, self._compared, self._residual = 0, 0.0, 0, 0.0
        self._sums = torch.zeros(2, layer.channels, dtype=torch.float64, device=device)
        self._told = torch.zeros(5, dtype=torch.float64, device=device)
        self._drawn = Reservoir(_DRAWN, seed + replaced.site.order)

    def compare(self, now: Tensor, wanted: Tensor) -> None:
        """Add the layer's outputs and the norm's, both (tokens, C)."""
        wanted, now = wanted.double().to(now.device), now.double()
        self._compared += len(now)
        self._residual += float((now - wanted).square().sum())
        self._sums = self._sums + torch.stack([wanted.sum(0), wanted.square().sum(0)])

    @torch.no_grad()
    def add_sums(self, x: Tensor) -> None:
        """Compare the norm's own sum of each token (tokens, C) with the layer's, ``beta + sum gain_k u_k^2``."""
        x, channels = x.double().to(self._told.device), list(self.layer.witness_channels)
        moment = token_moment(x, self.site.kind)
        wanted = (x.shape[1] * (moment + self.site.eps)).clamp_min(torch.finfo(x.dtype).tiny)
        told = self.layer.beta().double().median().expand_as(wanted)
        if self.layer.log_gain is not None:
            far = x if self.layer.center is None else x - self.layer.center.double().flatten()
            told = told + far[:, channels].square() @ self.layer.log_gain.double().exp()
        # A large token counts by the root of its sum; the layer's weight may take any factor over.
        root, part, one = wanted.sqrt(), told / wanted, 1 / wanted
        self._told += torch.stack(
            [
                root.sum(),
                *((root * a * b).sum() for a, b in ((part, 1), (part, part), (one, 1), (one, one))),
            ]
        )
        self._drawn.add(told.cpu(), wanted.cpu(), (wanted / wanted.mean()).sqrt().cpu())

    def report(self) -> SiteReport:
        """Return the row."""
        layer, fit = self.layer, self.fit()
        whole, told, square, one, one_square = self._told.tolist()
        constant, left = (
            1 - a * a / (b * whole) if b else 1.0 for a, b in ((one, one_square), (told, square))
        )
        # Of the outputs' mean square about their channel's mean.
        y, yy = self._sums / max(self._compared, 1)
        spread = float((yy - y * y).sum()) * self._compared
        return SiteReport(
            **self.figures() | {f"error_{name}": error for name, error in fit.errors.items()},
            layer=NAMES.get(type(layer), type(layer).__name__),
            error_now=(self._residual / spread) ** 0.5 if spread > 0 else None,
            beta=float(layer.beta().detach().median()),
            center=None if layer.center is None else float(layer.center.detach().median()),
            saturated=self.saturated / self.seen if self.seen else None,
            witnesses=layer.witness_channels,
            gains=()
            if layer.log_gain is None
            else tuple(layer.log_gain.detach().double().exp().tolist()),
            told=max(1 - left / constant, 0.0) if constant > 0 else 0.0,
            why=self.why,
            sums=self._drawn.points(),
            fit=fit,
        )
