"""Measure the loss of a converted model on held-out data: of each site, and of its output."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dynorm.arguments import check_kind
from dynorm.batches import Batch, iterate
from dynorm.errors import ModelError
from dynorm.family import NAMES
from dynorm.guard import hooked, require_plain_model, undisturbed
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.replace.converted import require_layers, warn_of_defaults
from dynorm.report.model_report import ModelReport, SiteReport
from dynorm.report.output import OutputComparison, OutputReport, both_outputs
from dynorm.report.sites import SiteStats, reached_sites, with_sites
from dynorm.site import NormSite
from dynorm.wrappers import plain_modules, plain_name


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    original: nn.Module,
    sites: Sequence[NormSite] | None = None,
    meta: Mapping[str, object] | None = None,
) -> ModelReport:
    """Measure the loss of a converted model, on batches that its constants were not fitted on.

    Each batch is run once through the original and once through the converted model. Memory is that
    of one batch; for an encoder the sentence embeddings are kept.

    Of the output the ``logits`` are compared, else the ``last_hidden_state``, else the first tensor. A
    ``last_hidden_state`` (B, T, D), or any tensor of that shape if the batch has a mask, is compared as
    sentence embeddings; if the batch has ``pixel_values``, by its class token, pooled or first. Logits of
    each of ``input_ids`` are compared as a language model's if the original generates
    (``can_generate()`` of transformers). Everything else is compared as one vector per sample.

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
    check_kind("meta", meta, Mapping | None, "a dict, or None")
    layers = require_layers(model)
    default = warn_of_defaults(model)
    sites, remaining = with_sites(original, iterate(batches), sites)
    facts = dict(meta or {})
    if default:
        facts["default_constants"] = len(default)
    paired, left = _paired(layers, original, sites)
    comparison = OutputComparison(original)
    with undisturbed(nn.ModuleList([model, original]), evaluate=True):
        for batch in remaining:
            with _watched(paired, batch):
                before, after = both_outputs(original, model, batch)
            comparison.add(batch, before, after)
    # A folded model has no site to compare, but an output.
    reached = reached_sites(paired, "converted norm") if paired else []
    return ModelReport(
        model=type(model).__name__,
        sites=[stats.report() for stats in reached],
        output=comparison.report(),
        batches=comparison.batches,
        kept=_kept(model, sites),
        left=left,
        unreached=[stats.site.path for stats in paired if not stats.tokens],
        meta=facts,
    )


def compare(model: nn.Module, original: nn.Module, batches: Iterable[Batch]) -> OutputReport:
    """Compare the outputs of a model and its original on all batches; neither is changed."""
    comparison = OutputComparison(original)
    with undisturbed(nn.ModuleList([model, original]), evaluate=True):
        for batch in iterate(batches):
            comparison.add(batch, *both_outputs(original, model, batch))
    return comparison.report()


def _paired(
    layers: Mapping[str, PointwiseNorm],
    original: nn.Module,
    sites: Sequence[NormSite],
) -> tuple[list["_LayerStats"], list[str]]:
    """Return the statistics of each layer with its norm, and the paths of the other layers."""
    modules = plain_modules(original, remove_duplicate=False)
    site_at = {path: site for site in sites for path in (site.path, *site.aliases)}
    paired = []
    left = []
    for full_path, layer in layers.items():
        path = plain_name(full_path)
        norm = modules.get(path)
        if norm is None:
            raise ModelError(
                f"original must be the model before convert_, but has no {path!r}: pass a "
                "model of the same class"
            )
        site = site_at.get(path)
        is_folded = layer.weight is None and any(True for _ in norm.parameters())
        if site is None or site.refused is not None or is_folded:
            left.append(path)
        else:
            paired.append(_LayerStats(site, norm, layer))
    if all(isinstance(modules[plain_name(path)], PointwiseNorm) for path in layers):
        raise ModelError(
            f"original must be the model before convert_, but its {left[0]!r} is "
            "converted already: pass a copy that was made before, or load it again"
        )
    return paired, left


@contextmanager
def _watched(paired: Sequence["_LayerStats"], batch: Batch) -> Iterator[None]:
    """Add the inputs and outputs of all norms and layers, while both models run on a batch."""
    by_norm = {stats.norm: stats for stats in paired}
    by_layer = {stats.layer: stats for stats in paired}
    # The norms' outputs that no layer's output was compared with yet, in call order.
    pending: dict[nn.Module, list[Tensor]] = defaultdict(list)

    def see_norm(
        norm: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], y: Tensor
    ) -> None:
        stats = by_norm[norm]
        x = next(iter([*args, *kwargs.values()]))
        stats.tokens += len(stats.tokens_of(x, batch))
        # A copy, because the model may later write into its own tensor.
        pending[stats.layer].append(stats.tokens_of(y, batch).clone())

    def see_layer(layer: PointwiseNorm, _: object, y: Tensor) -> None:
        stats = by_layer[layer]
        outputs = stats.tokens_of(y, batch)
        if pending[layer]:
            targets = pending[layer].pop(0)
            if targets.shape == outputs.shape:
                stats.compare(outputs, targets)

    with hooked(by_norm, see_norm, with_kwargs=True), hooked(by_layer, see_layer):
        yield


def _kept(model: nn.Module, sites: Sequence[NormSite]) -> list[str]:
    """Return the paths of the original's norms that the model still has."""
    modules = plain_modules(model, remove_duplicate=False)
    kept = []
    for site in sites:
        module = modules.get(site.path)
        if module is not None and not isinstance(module, (PointwiseNorm, nn.Identity)):
            kept.append(site.path)
    return kept


class _LayerStats(SiteStats):
    """A norm, and the error of the layer that replaced it."""

    def __init__(self, site: NormSite, norm: nn.Module, layer: PointwiseNorm) -> None:
        super().__init__(site)
        self.norm = norm
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
        return SiteReport(
            path=self.site.path,
            kind=self.site.kind,
            channels=self.channels,
            tokens=self.tokens,
            layer=NAMES.get(type(layer), type(layer).__name__),
            error_now=self._error(),
            beta=float(layer.beta().detach()),
            witnesses=layer.witness_channels,
            annealing=isinstance(layer, AnnealedNorm) and layer.position < 1,
        )

    def _error(self) -> float | None:
        """Return the distance to the norm's outputs over their spread; None if nothing compares."""
        spread = self._target_square
        spread -= float(self._target_sum.square().sum()) / max(self._compared, 1)
        if not spread > 0:
            return None
        return math.sqrt(self._residual / spread)
