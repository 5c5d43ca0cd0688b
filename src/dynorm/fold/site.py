"""One norm or point-wise layer of a fold: its formula, and where each part of it goes."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dynorm.arguments import check_items
from dynorm.errors import ArgumentError, ModelError
from dynorm.find.affine import AffinePart, affine_parts
from dynorm.find.recover import core
from dynorm.find.tokens import (
    CannotProbeError,
    TokenFunction,
    named_tensors,
    plain_arithmetic,
    plain_copy,
)
from dynorm.fold.check import WideCasts
from dynorm.fold.graph import Slot, double
from dynorm.fold.operators import Reader
from dynorm.fold.report import FOLDED, NOT_WANTED, FoldedSite, Rewrite
from dynorm.layers import AnnealedNorm, LinearControl, PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.outputs import relative_error
from dynorm.site import NormSite, check_sites

_EXACT = 1e-11
# Small tokens show whether eps is added to the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


@dataclass(eq=False)
class SiteFold:
    """One norm or point-wise layer, and the fold there.

    It computes ``weight * core(x) + bias``; the fixed scale of a point-wise layer is in ``weight``.
    The core of a linear layer is ``x`` itself, and the layer can be removed.
    """

    site: NormSite
    module: nn.Module
    chosen: bool  # the caller wants it folded
    refused: str | None  # why nothing of it can be folded
    weight: Tensor | None = None  # in float64; None for 1
    bias: Tensor | None = None  # in float64; None for 0
    affine_parts: dict[str, AffinePart] = field(default_factory=dict)
    is_exact: bool = False  # it is its neutral form times weight plus bias, to the last digits
    # It is (x - mean) / sqrt(var + eps) * weight + bias, to the last digits. For inputs without a
    # mean that is an RMSNorm with the same eps.
    is_plain_layernorm: bool = False

    affine: Rewrite = NOT_WANTED  # weight and bias, into the readers
    readers: dict[Slot, Reader] = field(default_factory=dict)  # by their weights, if they take both
    center: Rewrite = NOT_WANTED  # the mean of a LayerNorm, out of its streams

    @property
    def path(self) -> str:
        """Return the path in the model."""
        return self.site.path

    @property
    def is_pointwise(self) -> bool:
        """Return whether it is a layer of dynorm and not a norm."""
        return isinstance(self.module, PointwiseNorm)

    @property
    def is_line(self) -> bool:
        """Return whether it is a line in each channel, and nothing else."""
        return type(self.module) is LinearControl

    @property
    def is_absorbed(self) -> bool:
        """Return whether its weight and bias go into the readers."""
        return self.affine.state == FOLDED

    @property
    def is_gone(self) -> bool:
        """Return whether nothing of it stays."""
        return self.is_line and self.is_absorbed

    @property
    def becomes_rms(self) -> bool:
        """Return whether it is a LayerNorm that becomes an RMSNorm."""
        return self.center.state == FOLDED

    def site_after(self) -> NormSite | None:
        """Return the site of the norm as it is after the fold; None for a layer, or if it is gone."""
        if self.is_pointwise or self.is_gone:
            return None
        if not self.becomes_rms:
            return self.site
        names = () if self.is_absorbed else self.affine_parts
        return replace(
            self.site,
            kind="rmsnorm",
            class_name=RMSNorm.__name__,
            weight_name="weight" if "weight" in names else None,
            bias_name="bias" if "bias" in names else None,
            weight_offset=0.0,
        )

    def row(self) -> FoldedSite:
        """Return its row of the report."""
        becomes = ""
        if self.is_gone:
            becomes = "Identity"
        elif self.becomes_rms:
            becomes = RMSNorm.__name__
        kind = self.site.kind or self.site.class_name
        channels = math.prod(self.site.normalized_shape)
        return FoldedSite(self.path, kind, channels, self.affine, self.center, becomes)


def site_folds(
    norms: Sequence[NormSite],
    modules: Mapping[str, nn.Module],
    paths: Collection[str] | None,
) -> list[SiteFold]:
    """Return the records of all norms of a model, in call order, and then of all point-wise layers.

    ``modules`` are the modules of the model by their paths; ``paths`` are those to fold.
    """
    check_sites(norms)
    if paths is not None:
        check_items("paths", paths, str, "give those of sites that find_norms returned")
    sites = list(norms)
    for path, layer in modules.items():
        if path and isinstance(layer, PointwiseNorm):
            sites.append(_layer_site(path, layer))
    if not sites:
        raise ModelError(
            "the model must have norms or point-wise layers, but none was found: nothing can be "
            "folded"
        )
    known = {site.path for site in sites}
    for path in (*known, *(paths or ())):
        if path not in known or path not in modules:
            raise ArgumentError(
                f"sites and paths must be of norms of this model, got {path!r}: call "
                "dynorm.find_norms on it again"
            )
    folds = []
    for site in sites:
        chosen = paths is None or site.path in paths
        folds.append(_site_fold(site, modules[site.path], chosen))
    return folds


def _layer_site(path: str, layer: PointwiseNorm) -> NormSite:
    return NormSite(
        path,
        kind=type(layer).__name__.lower(),
        dim=layer.dim,
        normalized_shape=(layer.channels,),
        weight_offset=layer.weight_offset,
        weight_name=None if layer.weight is None else "weight",
        bias_name=None if layer.bias is None else "bias",
    )


def _site_fold(site: NormSite, module: nn.Module, chosen: bool) -> SiteFold:
    """Return the record of a norm or layer, its weight and bias read and its formula tested."""
    fold = SiteFold(site, module, chosen, site.refused)
    if isinstance(module, AnnealedNorm):
        fold.refused = (
            "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first"
        )
    if fold.refused is not None:
        return fold
    fold.affine_parts = affine_parts(module, site)
    values = {name: part.value for name, part in fold.affine_parts.items()}
    fold.weight = values.get("weight")
    fold.bias = values.get("bias")
    if isinstance(module, PointwiseNorm):
        fold.is_exact = True
        _include_constants_(fold, module)
    else:
        fold.is_exact = is_exact(fold)
        if site.kind == "layernorm":
            fold.is_plain_layernorm = is_exact(fold, as_layernorm=True)
    return fold


def _include_constants_(fold: SiteFold, layer: PointwiseNorm) -> None:
    """Put the scale of a layer into the weight, and of a line also its slope."""
    if layer.scale == 1 and not fold.is_line:
        return
    factor = torch.tensor(layer.scale, dtype=torch.float64, device="cpu")
    if fold.is_line:
        log_beta = double(layer.get_parameter("log_beta"))
        factor = factor * (-0.5 * log_beta).exp()
    factor = factor.expand(fold.site.normalized_shape)
    fold.weight = factor if fold.weight is None else factor * fold.weight


def is_exact(fold: SiteFold, *, as_layernorm: bool = False) -> bool:
    """Return whether a norm is a neutral norm times weight plus bias, to the last digits.

    The neutral norm is a copy with weight 1 and bias 0; with ``as_layernorm``, the formula of
    LayerNorm.
    """
    rank = len(fold.site.input_shape)
    axis = fold.site.dim % rank
    sizes = [2] * rank
    sizes[axis] = fold.site.normalized_shape[0]
    device = torch.device("cpu")
    for tensor in named_tensors(fold.module).values():
        device = tensor.device
        break
    try:
        # In float64 only.
        with WideCasts(), plain_arithmetic():
            copied = plain_copy(fold.module, torch.float64)
            norm = TokenFunction(copied, tuple(sizes), axis, torch.float64, device)
            neutral = replace(norm, module=plain_copy(fold.module, torch.float64))
            for part in affine_parts(neutral.module, fold.site).values():
                part.tensor.fill_(part.neutral)
            for scale in _SCALES:
                tokens = norm.sample(scale, seed=0)
                if as_layernorm:
                    expected = core(tokens, "layernorm", fold.site.eps)
                else:
                    expected = neutral(tokens)
                if fold.weight is not None:
                    expected = expected * fold.weight
                if fold.bias is not None:
                    expected = expected + fold.bias
                # A comparison with NaN is False.
                if not relative_error([norm(tokens)], [expected]) <= _EXACT:
                    return False
    # The norm has no copy in float64, or the copy raises.
    except (CannotProbeError, RuntimeError, TypeError):
        return False
    return True
