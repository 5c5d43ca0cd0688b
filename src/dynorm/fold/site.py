"""One norm or point-wise layer of a fold: its formula, and where each part of it goes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.find.recover import core
from dynorm.find.tokens import (
    CannotProbeError,
    TokenFunction,
    named_tensors,
    plain_arithmetic,
    plain_copy,
)
from dynorm.fold.check import WideCasts, relative_error
from dynorm.layers import AnnealedNorm, LinearControl, PointwiseNorm
from dynorm.replace.convert import Globs
from dynorm.site import NormSite, select_sites
from dynorm.stream.graph import double
from dynorm.stream.operators import Reader, Write
from dynorm.stream.stream import Stream
from dynorm.stream.survey import Surroundings

NORMS = ("layernorm", "rmsnorm")
_EXACT = 1e-11
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Small tokens show whether eps is added to the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


@dataclass(frozen=True)
class AffinePart:
    """The weight or the bias of a norm or layer."""

    name: str  # "weight" or "bias"
    tensor: Tensor
    offset: float  # the number that the norm adds to it

    @property
    def value(self) -> Tensor:
        """Return the factor or the term that the norm computes with, in float64."""
        return double(self.tensor) + self.offset

    @property
    def neutral(self) -> float:
        """Return the number that makes a weight multiply by 1, or a bias add 0."""
        return (1.0 if self.name == "weight" else 0.0) - self.offset


@dataclass(eq=False)
class SiteFold:
    """One norm or point-wise layer as plain values, and the fold there; the model is not needed.

    It computes ``weight * scale * core(x - centre) + bias``. A linear layer that may be removed as a
    whole is a line: ``weight * x + bias``. A field ``..._refused`` is the reason why a part stays.
    """

    site: NormSite
    is_pointwise: bool  # it is a layer of dynorm and not a norm
    chosen: bool  # the caller wants it folded
    refused: str | None  # why nothing of it can be folded
    weight: Tensor | None = None  # in float64; None for 1
    bias: Tensor | None = None  # in float64; None for 0
    scale: float = 1.0  # the fixed factor of a point-wise layer
    affine_parts: list[AffinePart] = field(default_factory=list)  # the tensors of weight and bias
    line: tuple[Tensor, Tensor | None] | None = None  # a linear layer's weight and bias of x
    kept_dtypes: frozenset[torch.dtype] = frozenset()  # inputs of these come out as they came
    is_exact: bool = False  # it is its neutral form times weight plus bias, to the last digits
    # It is (x - mean) / sqrt(var + eps) * weight + bias, to the last digits. For inputs without a
    # mean that is an RMSNorm with the same eps.
    is_plain_layernorm: bool = False

    # On the graph; empty if it is not traced or never called.
    around: Surroundings = field(default_factory=Surroundings)
    tensors_refused: str | None = None  # why its weight and bias cannot change: others use them
    bias_before: Write | None = None  # a bias that adds to its input and to nothing else
    bias_before_refused: str = ""  # why there is none

    # Its weight and bias, into the readers.
    with_affine: bool = False  # weight and bias go too, not only the scale
    factor: Tensor | None = None  # the part of weight and scale that goes; None for 1
    shift: Tensor | None = None  # the part of the bias that goes; None for 0
    affine_refused: str | None = None

    # The mean of a LayerNorm, out of the streams that it is called on.
    streams: list[Stream] = field(default_factory=list)
    mean_refused: str | None = None
    # Those whose linear writers lose their means, although others keep theirs.
    partly_mean_free: list[Stream] = field(default_factory=list)

    # The learned centre of a point-wise layer, in float64, into a bias or a table before it.
    learned_center: Tensor | None = None
    learned_center_into: Write | None = None

    # A linear layer without witnesses may be removed as a whole.
    is_line: bool = False  # weight and bias are those of ``line``
    by_rescaling: bool = False  # removed by rescaling the stream that it reads and writes
    remaining_weight: Tensor | None = None  # the part of its weight that must stay
    remains_because: str = ""  # why that part, or the whole layer, stays

    # A norm that feeds only norms may be removed as a whole.
    followers: list["SiteFold"] = field(default_factory=list)  # these norms, if it is removed
    redundant_refused: str | None = None
    change: float = 0.0  # the largest relative change of the outputs of these norms

    @property
    def path(self) -> str:
        """Return the path in the model."""
        return self.site.path

    @property
    def dim(self) -> int:
        """Return the channel axis; a norm over several axes is refused."""
        assert isinstance(self.site.dim, int)
        return self.site.dim

    @property
    def readers(self) -> list[Reader]:
        """Return the operators that read its outputs."""
        return self.around.readers.linear

    @property
    def calls(self) -> list[Node]:
        """Return its calls in the graph."""
        return self.around.calls

    @property
    def keeps_dtype(self) -> bool:
        """Return whether every call of a point-wise layer returns the dtype of its input.

        It must do so by its rule and not only in the present dtype of the model.
        """
        dtypes = {call.all_input_nodes[0].meta["val"].dtype for call in self.calls}
        return dtypes <= self.kept_dtypes

    @property
    def is_absorbed(self) -> bool:
        """Return whether its factor or shift goes into the readers."""
        return self.affine_refused is None and (self.factor is not None or self.shift is not None)

    @property
    def is_gone(self) -> bool:
        """Return whether nothing of it stays."""
        if self.followers:
            return True
        is_removed = self.is_line and (self.by_rescaling or self.is_absorbed)
        return is_removed and self.remaining_weight is None

    @property
    def becomes_rms(self) -> bool:
        """Return whether it is a LayerNorm that becomes an RMSNorm."""
        return bool(self.chosen and self.streams and self.mean_refused is None)

    @property
    def is_changed(self) -> bool:
        """Return whether the fold changes anything here."""
        is_moved = self.is_absorbed or self.by_rescaling or self.learned_center_into is not None
        return is_moved or self.becomes_rms or self.is_gone or bool(self.partly_mean_free)


def site_folds(
    norms: Sequence[NormSite],
    modules: Mapping[str, nn.Module],
    only: Globs,
    skip: Globs,
) -> list[SiteFold]:
    """Return the records of all norms of a model, in call order, and then of all point-wise layers.

    ``modules`` are the modules of the model by their paths.
    """
    sites = list(norms)
    for path, layer in modules.items():
        if path and isinstance(layer, PointwiseNorm):
            kind = type(layer).__name__.lower()
            site = NormSite(
                path,
                kind=kind,
                dim=layer.dim,
                normalized_shape=layer.normalized_shape,
                weight_offset=layer.weight_offset,
                weight_name="weight",
                bias_name="bias",
            )
            sites.append(site)
    if not sites:
        raise ModelError(
            "the model must have norms or point-wise layers, but none was found: nothing can be "
            "folded"
        )
    chosen = {site.path for site in select_sites(sites, only, skip)}
    folds = []
    for site in sites:
        folds.append(_site_fold(site, modules[site.path], site.path in chosen))
    return folds


def _site_fold(site: NormSite, module: nn.Module, chosen: bool) -> SiteFold:
    """Return the record of a norm or layer, its weight and bias read and its formula tested."""
    reason = site.refused or _refusal(site, module)
    fold = SiteFold(site, isinstance(module, PointwiseNorm), chosen, reason)
    if reason is not None:
        return fold
    fold.affine_parts = _affine_parts(site, module)
    values = {part.name: part.value.flatten() for part in fold.affine_parts}
    fold.weight = values.get("weight")
    fold.bias = values.get("bias")
    if isinstance(module, PointwiseNorm):
        fold.scale = module.scale
        if module.center is not None:
            fold.learned_center = double(module.center).expand(site.normalized_shape)
        if type(module) is LinearControl and not module.witness_channels and chosen:
            fold.line = _line(fold, module.log_beta)
        fold.kept_dtypes = _kept_dtypes(module)
    else:
        fold.is_exact = is_exact(fold, module)
        if site.kind == "layernorm":
            fold.is_plain_layernorm = is_exact(fold, module, as_layernorm=True)
    return fold


def _refusal(site: NormSite, module: nn.Module) -> str | None:
    """Return why nothing of a norm can be folded, whatever its neighbours are, or None."""
    if isinstance(module, AnnealedNorm):
        return "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first"
    if not site.path:
        return "the model is the norm itself: nothing reads it"
    if not isinstance(site.dim, int):
        return f"it normalizes several axes together, {site.dim}"
    if math.prod(site.normalized_shape) < 2:
        return "it has a single channel"
    if site.has_weight and site.weight_name is None:
        return "no tensor of it holds its weight"
    if site.has_bias and site.bias_name is None:
        return "no tensor of it holds its bias"
    if "forward" in module.__dict__:
        return "an instance attribute replaces its forward"
    return None


def _affine_parts(site: NormSite, module: nn.Module) -> list[AffinePart]:
    """Return the weight and the bias that tensors of a norm hold."""
    tensors = named_tensors(module)
    parts = []
    if site.weight_name in tensors:
        parts.append(AffinePart("weight", tensors[site.weight_name], site.weight_offset))
    if site.bias_name in tensors:
        parts.append(AffinePart("bias", tensors[site.bias_name], 0.0))
    return parts


def _line(fold: SiteFold, log_beta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a linear layer as weight and bias of its input."""
    log_slope = -0.5 * double(log_beta)
    slope = (fold.scale * log_slope.exp()).expand(fold.site.normalized_shape)
    weight = slope if fold.weight is None else slope * fold.weight
    bias = fold.bias
    if fold.learned_center is not None:
        moved = weight * fold.learned_center
        bias = -moved if bias is None else bias - moved
    return weight, bias


def _kept_dtypes(layer: PointwiseNorm) -> frozenset[torch.dtype]:
    """Return the dtypes of inputs that a layer returns, if it would also do so in another dtype."""
    return frozenset(dtype for dtype in _DTYPES if layer.returned_dtype(dtype) == dtype)


def is_exact(fold: SiteFold, module: nn.Module, *, as_layernorm: bool = False) -> bool:
    """Return whether a norm is a neutral norm times weight plus bias, to the last digits.

    The neutral norm is a copy with weight 1 and bias 0; with ``as_layernorm``, the formula of
    LayerNorm.
    """
    rank = len(fold.site.input_shape)
    axis = fold.dim % rank
    sizes = [2] * rank
    sizes[axis] = fold.site.normalized_shape[0]
    device = torch.device("cpu")
    for tensor in named_tensors(module).values():
        device = tensor.device
        break
    try:
        # In float64 only.
        with WideCasts(), plain_arithmetic():
            copied = plain_copy(module, torch.float64)
            norm = TokenFunction(copied, tuple(sizes), (axis,), torch.float64, device)
            neutral = replace(norm, module=plain_copy(module, torch.float64))
            for part in _affine_parts(fold.site, neutral.module):
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
