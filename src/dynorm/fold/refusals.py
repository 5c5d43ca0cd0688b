"""Where a fold is refused: the checks of a model, a site, its readers and the writers of its stream."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.find.recover import core
from dynorm.find.tokens import CannotProbeError, Packing, TokenFunction, plain_arithmetic, plain_copy
from dynorm.fold.check import Wide, relative_error
from dynorm.fold.graph import Graph, Leaf, Slot, paths_of, width
from dynorm.fold.site_fold import Read, SiteFold, Stream
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.site import NormSite
from dynorm.watch import require_plain_model

Uses = dict[Leaf, tuple[SiteFold, Read]]
"""The reads of all sites by their use of a weight."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_EXACT = 1e-11
# Small tokens show whether eps stands beside the variance, and where.
_SCALES = (1e-3, 1.0, 1e3)


class RefusedError(Exception):
    """Why something cannot be folded; the report says it."""


def require_model(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used."""
    require_plain_model(model)
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        place = f"{training!r} is" if training else "it is"
        raise ModelError(f"the model must be in eval mode, but {place} in training mode: call model.eval()")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ModelError("the model's weights must be plain numbers, but it is quantized: fold it first, then quantize")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN and not tensor.is_quantized
        if not whole or (tensor.is_floating_point() and tensor.element_size() < 2):
            inner = type(tensor.data).__name__
            kind = f"of {tensor.dtype}" if inner in ("Tensor", "Parameter") else f"a {inner}"
            raise ModelError(
                f"the model's weights must be plain numbers, but {name!r} is {kind}: fold the model before it "
                "is quantized or sharded"
            )
    for path, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise ModelError(f"the model's weights must be plain numbers, but {path!r} is quantized: fold it before")


def refused(site: NormSite, module: nn.Module) -> str | None:
    """Return why nothing of a norm can be folded, whatever stands beside it, or None."""
    if isinstance(module, AnnealedNorm):
        return "on its way from a norm to a point-wise function: call dynorm.finalize_(model) first"
    if not site.path:
        return "the model is the norm itself: nothing reads it"
    if not isinstance(site.dim, int):
        return f"it normalizes several axes together, {site.dim}"
    if site.normalized_shape[0] < 2:
        return "it has a single channel"
    for has, name, what in ((site.has_weight, site.weight_name, "weight"), (site.has_bias, site.bias_name, "bias")):
        if has and name is None:
            return f"no tensor of it holds its {what}"
    if "forward" in module.__dict__:
        return "an instance attribute stands for its forward"
    return None


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
        require_own(graph, fold)
    for found in fold.reads if fold.shift is not None else ():
        _require_bias(graph, fold, found, uses, add_bias)
    if not isinstance(fold.module, PointwiseNorm) and not is_exact(fold):
        raise RefusedError("it is no norm times its weight plus its bias to the last digits")


def require_free(graph: Graph, reads: Sequence[Read], uses: Mapping[Leaf, Read]) -> None:
    """Check that the weights of some reads are saved, and used for nothing but ``uses``, in the same way."""
    for found in reads:
        slot = found.weight
        if slot.fixed is not None or not slot.is_saved:
            raise RefusedError(slot.fixed or f"{slot.name}, which reads it, is no parameter of floating point")
        for leaf in slot.leaves:
            if leaf not in uses or (uses[leaf].axis, uses[leaf].groups) != (found.axis, found.groups):
                raise RefusedError(f"{slot.name}, which reads it, is also used by {graph.where(leaf[0])}{slot.hint}")


def require_own(graph: Graph, fold: SiteFold) -> None:
    """Check that a norm's weight and bias are saved, and its own alone."""
    for _, tensor, _ in fold.own():
        slots = [slot for slot in graph.all_slots if slot.tensor is tensor]
        if not slots[0].is_saved:
            raise RefusedError(f"{slots[0].name} is not saved with the model: it would come back when it is loaded")
        if len(slots) > 1 or len(slots[0].owners) > 1 or slots[0].leaves or slots[0].is_shared:
            raise RefusedError(f"{slots[0].name} is used elsewhere too")


def _require_bias(graph: Graph, fold: SiteFold, found: Read, uses: Uses, add_bias: bool) -> None:
    """Check that a reader can take a norm's bias into its own, or can be given one."""
    slot = found.weight
    # A bias added to the layer would reach the use that has one of its own too.
    if any((uses[leaf][1].bias is None) != (found.bias is None) for leaf in slot.leaves):
        raise RefusedError(f"{slot.name}, which reads it, has a bias in one use and none in another")
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
    mine = {other.bias[0] for other in fold.reads if other.bias is not None and other.weight is slot}
    for leaf in bias.leaves - mine:
        raise RefusedError(f"{bias.name} is also used by {graph.where(leaf[0])}")


def require_new_bias(graph: Graph, slot: Slot, node: Node) -> None:
    """Check that a weight is that of one linear layer, which can be given a bias."""
    owner = slot.owners[0].module
    # Code that takes the weight without calling the layer would not add its bias.
    called = len(slot.owners) == 1 and owner in map(graph.modules.get, paths_of(node))
    if not called or not _takes_bias(owner):
        raise RefusedError(f"no bias can be added to {slot.name}: it is not the weight of one linear layer")


def _takes_bias(module: nn.Module) -> bool:
    """Tell whether a module lacks a bias, and would add one: a convolution of torch's own, or a linear layer."""
    if module._parameters.get("bias", 0) is not None or "forward" in module.__dict__:
        return False
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(module, kind) and type(module).forward is kind.forward for kind in known):
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


def require_writers(graph: Graph, stream: Stream) -> None:
    """Check that the parameters that write into a stream do nothing else."""
    of_leaf = {write.leaf: write for write in stream.writes}
    gains = {write.gain[0] for write in stream.writes if write.gain is not None}
    narrowest = min(width(value) for value in stream.values)
    for write in stream.writes:
        slot = write.slot
        if narrowest < slot.tensor.dtype.itemsize:
            raise RefusedError(f"{slot.name} writes into it, and it is rounded to fewer digits than that has")
        if slot.fixed is not None:
            raise RefusedError(f"{slot.name} writes into it: {slot.fixed}")
        if not slot.is_saved:
            raise RefusedError(f"{slot.name} writes into it, and is not saved with the model")
        # A parameter that is itself a value of the stream, as learned positions are: its uses were followed.
        for leaf in () if write.leaf[0] is write.leaf[1] else slot.leaves:
            other = of_leaf.get(leaf)
            if other is None or other.axis != write.axis:
                use = graph.where(leaf[0])
                raise RefusedError(f"{slot.name} writes into it, and is also used by {use}{slot.hint}")
            if (other.gain and other.gain[1]) is not (write.gain and write.gain[1]):
                how = f"several times, not always scaled by the same gain{slot.hint}"
                raise RefusedError(f"{slot.name} writes into it {how}")
        if write.gain is not None:
            gain = write.gain[1]
            if gain.fixed is not None or len(gain.leaves) != 1 or not gain.leaves <= gains:
                raise RefusedError(f"{gain.name} scales what is written into it, and is used elsewhere too")
            if not gain.is_saved:
                raise RefusedError(f"{gain.name} scales what is written into it, and is not saved with the model")


def is_exact(fold: SiteFold, as_rms: bool = False) -> bool:
    """Tell whether a norm is its neutral form, or an RMSNorm ``as_rms``, times weight plus bias, to the last digits."""
    channels, rank = fold.site.normalized_shape[0], len(fold.site.input_shape)
    axis = fold.axis(rank)
    packing = Packing(tuple(channels if place == axis else 2 for place in range(rank)), (axis,))
    tensors = (*fold.module.parameters(), *fold.module.buffers(), torch.empty(0))
    try:
        norm, neutral = (
            TokenFunction(plain_copy(fold.module, torch.float64), packing, torch.float64, tensors[0].device)
            for _ in range(2)
        )
        for name, tensor, offset in fold.own(neutral.module):
            tensor.detach().fill_((name == "weight") - offset)
        with plain_arithmetic(fold.module), Wide():
            for scale in _SCALES:
                tokens = norm.sample(scale, seed=0)
                expected = core(tokens, "layernorm", fold.site.eps) if as_rms else neutral(tokens)
                expected = expected if fold.weight is None else expected * fold.weight
                expected = expected if fold.bias is None else expected + fold.bias
                if not relative_error([norm(tokens)], [expected]) <= _EXACT:
                    return False
    # It has no copy in float64, or that raises.
    except (CannotProbeError, RuntimeError, TypeError):
        return False
    return True
