"""Where a fold is refused: of a model, a site, its readers."""

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.fold.site import SiteFold
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.site import NormSite
from dynorm.stream.graph import Graph, Leaf, Slot, paths_of
from dynorm.stream.operators import Read, RefusedError
from dynorm.watch import require_plain_model

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
Uses = dict[Leaf, tuple[SiteFold, Read]]
"""The reads of all sites by their use of a weight."""


def require_model(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used."""
    require_plain_model(model)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        place = f"{training!r} is" if training else "it is"
        raise ModelError(
            f"the model must be in eval mode, but {place} in training mode: call model.eval()"
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(
            "the model's weights must be plain numbers, but it is quantized: fold it first, then "
            "quantize"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN and not tensor.is_quantized
        if not whole or (tensor.is_floating_point() and tensor.element_size() < 2):
            inner = type(tensor.data).__name__
            kind = f"of {tensor.dtype}" if inner in ("Tensor", "Parameter") else f"a {inner}"
            raise ModelError(
                f"the model's weights must be plain numbers, but {name!r} is {kind}: fold the "
                "model before it "
                "is quantized or sharded"
            )
    for path, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise ModelError(
                f"the model's weights must be plain numbers, but {path!r} is quantized: fold it "
                "before"
            )


def refused(site: NormSite, module: nn.Module) -> str | None:
    """Return why nothing of a norm can be folded, whatever stands beside it, or None."""
    reasons = (
        (
            isinstance(module, AnnealedNorm),
            "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first",
        ),
        (not site.path, "the model is the norm itself: nothing reads it"),
        (not isinstance(site.dim, int), f"it normalizes several axes together, {site.dim}"),
        (math.prod(site.normalized_shape) < 2, "it has a single channel"),
        (site.has_weight and site.weight_name is None, "no tensor of it holds its weight"),
        (site.has_bias and site.bias_name is None, "no tensor of it holds its bias"),
        ("forward" in module.__dict__, "an instance attribute stands for its forward"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def require_readers(graph: Graph, fold: SiteFold, uses: Uses, add_bias: bool) -> None:
    """Check that the readers' weights and biases, and the norm's own, are used for nothing else."""
    require_free(graph, fold.reads, {leaf: found for leaf, (_, found) in uses.items()})
    for found in fold.reads:
        for other, _ in (uses[leaf] for leaf in found.weight.leaves):
            pairs = ((fold.factor, other.factor), (fold.shift, other.shift))
            if not all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs):
                what = f"also reads {other.path}, whose weight or bias differs"
                raise RefusedError(f"{found.weight.name}, which reads it, {what}")
    if not isinstance(fold.module, PointwiseNorm):
        fold.require_own(graph)
    for found in fold.reads if fold.shift is not None else ():
        _require_bias(graph, fold, found, uses, add_bias)
    if not isinstance(fold.module, PointwiseNorm) and not fold.is_exact():
        raise RefusedError("it is no norm times its weight plus its bias to the last digits")


def require_free(graph: Graph, reads: Sequence[Read], uses: Mapping[Leaf, Read]) -> None:
    """Check that the weights of some reads are saved, and used for nothing but ``uses``, in the same way."""
    for found in reads:
        slot = found.weight
        if slot.fixed is not None or not slot.is_saved:
            raise RefusedError(
                slot.fixed or f"{slot.name}, which reads it, is no parameter of floating point"
            )
        for leaf in slot.leaves:
            if leaf not in uses or (uses[leaf].axis, uses[leaf].groups) != (
                found.axis,
                found.groups,
            ):
                raise RefusedError(
                    f"{slot.name}, which reads it, is also used by "
                    f"{graph.where(leaf[0])}{slot.hint}"
                )


def _require_bias(graph: Graph, fold: SiteFold, found: Read, uses: Uses, add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = found.weight
    # A bias added to the layer would reach the use that has one of its own too.
    if any((uses[leaf][1].bias is None) != (found.bias is None) for leaf in slot.leaves):
        raise RefusedError(
            f"{slot.name}, which reads it, has a bias in one use and none in another"
        )
    if found.no_shift is not None:
        raise RefusedError(f"its bias cannot be folded: {found.no_shift}")
    if found.bias is None:
        if not add_bias:
            raise RefusedError(f"{slot.name} has no bias to take its bias: pass add_bias=True")
        require_new_bias(graph, slot, found.node)
        return
    bias = found.bias[1]
    if bias.fixed is not None or bias.tensor is slot.tensor:
        raise RefusedError(bias.fixed or f"{bias.name} is a weight too")
    mine = {
        other.bias[0] for other in fold.reads if other.bias is not None and other.weight is slot
    }
    for leaf in bias.leaves - mine:
        raise RefusedError(f"{bias.name} is also used by {graph.where(leaf[0])}")


def require_new_bias(graph: Graph, slot: Slot, node: Node) -> None:
    """Check that a weight is that of one linear layer, which can be given a bias."""
    owner = slot.owners[0].module
    # Code that takes the weight without calling the layer would not add its bias.
    called = len(slot.owners) == 1 and owner in map(graph.modules.get, paths_of(node))
    if not called or not _takes_bias(owner):
        raise RefusedError(
            f"no bias can be added to {slot.name}: it is not the weight of one linear layer"
        )


def _takes_bias(module: nn.Module) -> bool:
    """Tell whether a module lacks a bias, and would add one: a convolution of torch's own, or a linear layer."""
    if module._parameters.get("bias", 0) is not None or "forward" in module.__dict__:
        return False
    if type(module).forward in (
        nn.Linear.forward,
        nn.Conv1d.forward,
        nn.Conv2d.forward,
        nn.Conv3d.forward,
    ):
        return True
    if not isinstance(module, nn.Linear):
        return False
    # A forward of its own is tried on a copy whose weight is zero.
    weight = torch.zeros_like(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = {**module._parameters, "weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            result = tried.forward(weight.new_ones(2, weight.shape[1]))
    # Whatever it raises, it does not add the bias to the product with the weight, and nothing else.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))
