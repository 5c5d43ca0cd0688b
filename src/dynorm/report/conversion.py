"""Measure the loss of a converted model on held-out data: of each site, and of its output."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, call, iterate
from dynorm.errors import ModelError
from dynorm.family import NAMES
from dynorm.guard import hooked, require_plain_model, undisturbed
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.replace.converted import require_layers, warn_of_defaults
from dynorm.replace.original import run_norms
from dynorm.report.output import OutputComparison, OutputReport
from dynorm.report.records import ModelReport, SiteReport
from dynorm.report.values import NormStats, reached_sites, with_sites
from dynorm.site import NormSite
from dynorm.wrappers import plain_modules, without_wrappers


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    original: nn.Module,
    sites: Sequence[NormSite] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    meta: Mapping[str, object] | None = None,
) -> ModelReport:
    """Measure the loss of a converted model, on batches that its constants were not fitted on.

    Each batch is run once through the original and once through the converted model. Memory is that
    of one batch and a fixed sample per site; for an encoder the sentence embeddings are kept.
    Padding is left out as in :func:`calibrate_`. The models are run in eval mode, without gradient;
    they, their buffers and random states are afterwards as they were. The report covers this
    process only.

    Args:
        model: a model that :func:`convert_` converted, with its final constants; it may be loaded.
        batches: held-out tensors, tuples or dicts, as for :func:`calibrate_`; read once.
        original: the model before :func:`convert_`: a copy such as ``copy.deepcopy(model)``, or
            loaded again.
        sites: the norms of the original that :func:`find_norms` returned; None finds them with the
            first batch.
        output: a function that takes the model's output and returns the tensor to compare. If
            None, the ``logits`` are compared, else the ``last_hidden_state``, else the first
            tensor. A ``last_hidden_state`` (B, T, D), or any tensor of that shape if the batch has
            a mask, is compared as sentence embeddings; if the batch has ``pixel_values``, by its
            class token, pooled or first. Logits of each of ``input_ids`` are compared as a language
            model's if no token changes the logits before it. Everything else is compared as one
            vector per sample.
        seed: seed of the samples of values.
        meta: facts to show with the figures, such as recipe and seeds.

    Returns:
        A report with one row per replaced norm.

    Raises:
        ModelError: the model has no point-wise layer, or ``original`` lacks its norms.
        DataError: ``batches`` is empty, one is of the wrong kind, the models cannot run it, no batch
            reaches a layer, or an activation or output is not finite (the message names the site).

    Warns:
        CalibrationWarning: layers have default constants.

    Example:
        >>> import copy
        >>> original = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> model = copy.deepcopy(original)
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> _ = dynorm.calibrate_(model, [torch.randn(64, 8)])
        >>> batches = [torch.randn(64, 8) for _ in range(4)]
        >>> report = dynorm.measure(model, batches, original=original)
        >>> report.sites[0].path, report.sites[0].tokens, report.output.kind
        ('1', 256, 'tensor')
    """
    require_plain_model(model)
    require_plain_model(original)
    require_layers(model)
    default = warn_of_defaults(model)
    sites, remaining = with_sites(original, iterate(batches), sites)
    measurement = _Measurement(model, original, sites, OutputComparison(output), seed)
    with undisturbed(nn.ModuleList([model, original]), evaluate=True):
        for batch in remaining:
            measurement.add(batch)
    facts = dict(meta or {})
    if default:
        facts["default_constants"] = len(default)
    return measurement.report(facts)


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
        original: nn.Module,
        sites: Sequence[NormSite],
        comparison: OutputComparison,
        seed: int,
    ) -> None:
        self.model = model
        self.original = original
        self.sites = sites
        self.comparison = comparison
        self.stats: dict[nn.Module, _LayerStats] = {}  # by the norm of the original
        self.left: list[str] = []
        self._pair_layers(seed)

    def _pair_layers(self, seed: int) -> None:
        """Find the norm of each layer at the same path of the original."""
        modules = plain_modules(self.original, remove_duplicate=False)
        site_at = {path: site for site in self.sites for path in (site.path, *site.aliases)}
        converted = []
        layers = require_layers(self.model)
        for full_path, layer in layers.items():
            path = without_wrappers(full_path)
            if path not in modules:
                raise ModelError(
                    f"original must be the model before convert_, but has no {path!r}: pass a "
                    "model of the same class"
                )
            norm = modules[path]
            site = site_at.get(path)
            is_folded = layer.weight is None and any(True for _ in norm.parameters())
            if isinstance(norm, PointwiseNorm):
                converted.append(path)
            if site is None or site.refused is not None or is_folded:
                self.left.append(path)
            else:
                self.stats[norm] = _LayerStats(site, layer, seed + 2 * site.order)
        if len(converted) == len(layers):
            raise ModelError(
                f"original must be the model before convert_, but its {converted[0]!r} is "
                "converted already: pass a copy that was made before, or load it again"
            )

    def add(self, batch: Batch) -> None:
        """Add a batch."""
        stats_of = {stats.layer: stats for stats in self.stats.values()}
        # The norms' outputs that no layer's output was compared with yet, in call order.
        pending: dict[nn.Module, list[Tensor]] = defaultdict(list)

        def see_norm(norm: nn.Module, x: Tensor, y: Tensor) -> None:
            stats = self.stats[norm]
            stats.see(x, batch)
            # A copy, because the model may later write into its own tensor.
            pending[stats.layer].append(stats.tokens_of(y, batch).clone())

        def see_layer(layer: PointwiseNorm, _: object, y: Tensor) -> None:
            stats = stats_of[layer]
            outputs = stats.tokens_of(y, batch)
            if pending[layer]:
                targets = pending[layer].pop(0)
                if targets.shape == outputs.shape:
                    stats.compare(outputs, targets)

        def run_original(changed: Batch) -> object:
            return run_norms(self.original, (), changed, see_norm)

        before = run_norms(self.original, self.stats, batch, see_norm)
        with hooked(stats_of, see_layer):
            after = call(self.model, batch)
        self.comparison.add(batch, before, after, run_original)

    def report(self, meta: dict[str, object]) -> ModelReport:
        """Return the report, with the sites in call order."""
        all_stats = self.stats.values()
        # A folded model has no site to compare, but an output.
        reached = reached_sites(all_stats, "converted norm") if all_stats else []
        return ModelReport(
            model=type(self.model).__name__,
            sites=[stats.report() for stats in reached],
            output=self.comparison.report(),
            batches=self.comparison.batches,
            kept=self._kept(),
            left=self.left,
            unreached=[stats.site.path for stats in all_stats if not stats.tokens],
            meta=meta,
        )

    def _kept(self) -> list[str]:
        """Return the paths of the original's norms that the model still has."""
        modules = plain_modules(self.model, remove_duplicate=False)
        kept = []
        for site in self.sites:
            module = modules.get(site.path)
            if module is not None and not isinstance(module, (PointwiseNorm, nn.Identity)):
                kept.append(site.path)
        return kept


class _LayerStats(NormStats):
    """The statistics of a norm, and the error of the layer that replaced it."""

    def __init__(self, site: NormSite, layer: PointwiseNorm, seed: int) -> None:
        super().__init__(site, seed)
        self.layer = layer
        self._compared = 0
        self._residual = 0.0
        self._target_sum = torch.zeros(self.channels, dtype=torch.float64, device="cpu")
        self._target_square = 0.0

    def compare(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the layer's outputs and the norm's, both (tokens, C)."""
        targets = targets.double()
        outputs = outputs.double().to(targets.device)
        self._compared += len(outputs)
        self._residual += float((outputs - targets).square().sum())
        self._target_sum += targets.sum(0).cpu()
        self._target_square += float(targets.square().sum())

    def report(self) -> SiteReport:
        """Return the row."""
        layer = self.layer
        gains: tuple[float, ...] = ()
        if layer.log_gain is not None:
            gains = tuple(layer.log_gain.detach().double().exp().tolist())
        return SiteReport(
            **self.figures(),
            layer=NAMES.get(type(layer), type(layer).__name__),
            error_now=self._error(),
            beta=float(layer.beta().detach().median()),
            center=None if layer.center is None else float(layer.center.detach().median()),
            witnesses=layer.witness_channels,
            gains=gains,
            annealing=isinstance(layer, AnnealedNorm) and layer.position < 1,
        )

    def _error(self) -> float | None:
        """Return the distance to the norm's outputs over their spread; None if nothing compares."""
        spread = self._target_square
        spread -= float(self._target_sum.square().sum()) / max(self._compared, 1)
        if not spread > 0:
            return None
        error: float = (self._residual / spread) ** 0.5
        return error
