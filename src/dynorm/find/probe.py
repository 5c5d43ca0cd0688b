"""Which modules of a model are norms: found by their behaviour, not by their names."""

import math
import re
from collections import UserDict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dynorm.batches import arguments, call_hint, copied_tensors, site_tokens
from dynorm.dtypes import DtypeRule
from dynorm.errors import DataError
from dynorm.find.recover import (
    HALF_TOLERANCE,
    NotANormError,
    affine_of,
    candidate_axes,
    channel_axes,
    core,
    depends_on_sign,
    recover,
)
from dynorm.find.tokens import named_tensors, plain_arithmetic
from dynorm.guard import require_plain_model, undisturbed, writes_of
from dynorm.site import UNIT_LENGTH, NormSite

ANOTHER_TENSOR = "takes another tensor along: gated or adaptive"
_IN_PLACE = (
    "modifies its input in place: a model that uses the input again, as a residual, would change; "
    "let it compute on a copy, x.clone(), since x.float() copies only other dtypes than float32"
)
_PATCHED = (
    "another forward was set on this instance, as Liger-Kernel does, and a replacement would drop "
    "it: undo the patch, or convert first and patch the other modules then"
)

_FUNCTIONS = {
    functional.layer_norm,
    functional.rms_norm,
    torch.layer_norm,
    torch.native_layer_norm,
    torch.rms_norm,
}


@dataclass
class Observation:
    """One module, as a run showed it."""

    module: nn.Module
    paths: list[str]  # all of them, the first one found first
    calls: int = 0
    without_tokens: int = 0  # how many more calls had an input without elements
    problem: str | None = None  # why its calls cannot be those of a replaceable norm
    modifies_input: bool = False  # a call wrote into its argument
    shapes: list[tuple[int, ...]] = field(
        default_factory=list
    )  # the distinct ones of its input, in order
    dtype: torch.dtype = torch.float32  # of its input at the first call
    output_dtype: torch.dtype = (
        torch.float32
    )  # of its output, where autocast does not choose that dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: bool = False  # which may have chosen the dtype of the output
    rounded: bool = False  # input, output or autocast were of half precision
    output_at: int = (
        0  # the address of its last output, to see which module's output another one passes on
    )
    # Some tokens of the first call, in and out, for each group of axes that may be the channels.
    samples: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    functions: list[str] = field(
        default_factory=list
    )  # norm functions that its own forward called, one per call

    def is_light(self, shape: tuple[int, ...]) -> bool:
        """Return whether every parameter could be the scale or the shift of a norm: no matrices."""

        def fits(p: Tensor) -> bool:
            tail = zip(p.shape, shape[-p.ndim :], strict=False)
            return p.numel() <= max(shape) or (
                p.ndim <= len(shape) and all(own in (1, size) for own, size in tail)
            )

        return all(fits(p) for p in self.module.parameters())

    def input_of(self, args: tuple[Any, ...]) -> "_Input | None":
        """Return the input of a call that begins, if it may be that of a norm."""
        if not args or not _is_plain(args[0]) or not self.is_light(tuple(args[0].shape)):
            return None
        return _Input(args[0].detach().clone(), writes_of(args[0]))

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        before: "_Input | None",
    ) -> None:
        """Take down one call; ``before`` is its input as it was when the call began."""
        # An expert that no token was sent to.
        if args and isinstance(args[0], Tensor) and args[0].numel() == 0:
            self.without_tokens += 1
            return
        self.calls += 1
        self.output_at = output.data_ptr() if _is_plain(output) else 0
        self.problem = self.problem or _problem(args, kwargs, output)
        if self.problem is not None:
            return
        given = args[0]
        modified = before is not None and before.differs_from(given)
        self.modifies_input = self.modifies_input or modified
        if tuple(given.shape) not in self.shapes:
            self.shapes.append(tuple(given.shape))
        if self.calls > 1 or before is None or (output is given and not modified):
            return
        self.dtype, self.device = given.dtype, given.device
        halves = {torch.float16, torch.bfloat16} & {given.dtype, output.dtype}
        self.autocast = torch.is_autocast_enabled(given.device.type)
        self.output_dtype = given.dtype if self.autocast else output.dtype
        self.rounded = bool(halves) or self.autocast
        for axes in candidate_axes(self.module, tuple(given.shape)):
            # Two of every axis but the channels' will do for the last check.
            part = tuple(slice(None) if axis in axes else slice(2) for axis in range(given.ndim))
            # Cloned at once: later parts of the model may write into it.
            self.samples[axes] = (before.value[part].clone(), output[part].detach().clone())


class _Input(NamedTuple):
    """The input of a call, as it was before."""

    value: Tensor
    writes: int | None

    def differs_from(self, now: Tensor) -> bool:
        """Return whether the call wrote into the tensor that it was given."""
        if writes_of(now) != self.writes:
            return True
        # Through .data, or by a kernel, a write goes unnoticed. NaN is not equal to itself.
        return not torch.equal(now.nan_to_num(), self.value.nan_to_num())


@dataclass
class _Call:
    """A call that is running: whose, and of a candidate its input."""

    seen: Observation | None
    before: _Input | None


def _problem(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str | None:
    extras = (*args[1:], *kwargs.values())
    if args and any(isinstance(leaf, Tensor) for leaf in tree_leaves(extras)):
        return ANOTHER_TENSOR
    if extras or not args:
        return "other arguments: a point-wise layer takes one tensor, by position"
    if not (_is_plain(args[0]) and _is_plain(output)):
        return "not tensor to tensor: it does not take and return one floating-point tensor"
    return (
        None
        if args[0].shape == output.shape
        else "another shape: its output is not shaped as its input"
    )


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return False
    return value.is_floating_point() and value.ndim > 0 and value.numel() > 0


class _NormFunctions(TorchFunctionMode):
    """Note which module's forward calls a norm as a function."""

    def __init__(self, running: list[_Call]) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = self.running[-1].seen if self.running else None
        if func in _FUNCTIONS and seen is not None:
            seen.functions.append(
                ("F." if func.__module__ == functional.__name__ else "torch.") + func.__name__
            )
        return func(*args, **(kwargs or {}))


def observe(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Observation], ...]:
    """Run the model once and watch each of its modules; return all, and those called, in the order they returned.

    Nothing of the run stays. DataError is raised if the model raises on this input. Layers of
    dynorm and parametrizations of weights, and the modules in them, are left out.
    """
    ours = {
        id(part)
        for m in model.modules()
        if getattr(m, "_dynorm_layer", False) or isinstance(m, ParametrizationList)
        for part in m.modules()
    }
    found: dict[int, Observation] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in ours:
            found.setdefault(id(module), Observation(module, [])).paths.append(path)
    called: dict[int, Observation] = {}
    running: list[_Call] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen = found.get(id(module))
        running.append(_Call(seen, seen.input_of(args) if seen is not None else None))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = found[id(module)]
        seen.record(args, kwargs, output, running[-1].before)
        if seen.calls:
            called.setdefault(id(module), seen)

    args, kwargs = copied_tensors((args, kwargs))
    try:
        with undisturbed(model, (args, kwargs)), _NormFunctions(running), ExitStack() as hooks:
            for seen in found.values():
                hooks.enter_context(seen.module.register_forward_hook(hook, with_kwargs=True))
            for part in model.modules():
                hooks.enter_context(part.register_forward_pre_hook(enter))
                # A parent may catch what its child raises, and go on.
                hooks.enter_context(
                    part.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
                )
            model(*args, **kwargs)
    except Exception as error:
        raise DataError(
            "the model could not be run on the example, which must be what its forward takes: "
            f"it raised {type(error).__name__}: {error}{call_hint(args)}"
        ) from error
    return list(found.values()), list(called.values())


_OTHER_NORMS: tuple[tuple[type[nn.Module], str, str], ...] = (
    (
        nn.modules.batchnorm._BatchNorm,
        "batchnorm",
        "batch norm: its statistics are the batch's, or fixed",
    ),
    (
        nn.modules.instancenorm._InstanceNorm,
        "instancenorm",
        "instance norm: its statistics span positions",
    ),
    (nn.GroupNorm, "groupnorm", "group norm: its statistics span positions and groups of channels"),
    (
        nn.LocalResponseNorm,
        "responsenorm",
        "local response norm: it looks at neighbouring channels only",
    ),
)
# Class names that end in norm, apart from the marks of variants: RMSNormGated does, NormedEmbedding
# not. A norm of weights does not normalize activations.
_NORM_NAME = re.compile(
    r"(?<!weight)(?<!spectral)norm(alization)?(layer|activation|perhead|gated|zero|single|final|1p|\dd|_)*$|adaln(zero|single|_)*$"
)

_MODULE_TABLES = frozenset(nn.Module().__dict__)


def find_norms(model: nn.Module, *args: Any, **kwargs: Any) -> list[NormSite]:
    """Find the LayerNorms and RMSNorms of a model by behaviour, with one run of it.

    The model is called once under `torch.no_grad()`. Each module that took one tensor, returned one
    of the same shape and holds no matrices is then tried as a copy on tokens of our own. It is a
    norm if, for every token alone, y = core(x) * weight + bias with core(x) = (x - mean) / sqrt(var
    + eps) or x / sqrt(mean(x^2) + eps). Mode, hooks, buffers and random states of the model stay as
    they are, and so do the tensors of the example: the model gets copies.

    Args:
        model: Any module of plain torch; train or eval mode is kept.
        *args: The arguments of one call of the model, or one batch, a tuple or dict of them, as the
            other functions take; a short input will do.
        **kwargs: The same, by keyword. A cache among them grows, as in any call.

    Returns:
        The norms in call order. Modules that are named norms, or are norms of torch, but cannot be
        replaced are among them, with `refused` saying why; those never called come last. Empty for
        a model without norms.

    Raises:
        ArgumentError: If the model is no module.
        ModelError: If it is compiled, wrapped, scripted, sharded or on the meta device.
        DataError: If the model raises on the example.

    Example:
        >>> model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8, eps=1e-6))
        >>> for site in find_norms(model, torch.randn(2, 6)):
        ...     print(site.path, site.kind, site.dim, site.normalized_shape, site.eps)
        1 layernorm -1 (8,) 1e-05
        3 rmsnorm -1 (8,) 1e-06
    """
    require_plain_model(model)
    # A tokenizer returns a UserDict. A class of the user's own is one argument.
    if (
        len(args) == 1
        and not kwargs
        and (type(args[0]) in (tuple, dict) or isinstance(args[0], UserDict))
    ):
        given = arguments(model, args[0])
        # A model may take the dict or tuple itself.
        with suppress(TypeError):
            signature(model.forward).bind(*given[0], **given[1])
            args, kwargs = given
    observations, called = observe(model, args, kwargs)
    search = _Search()
    with plain_arithmetic(model):
        for seen in called:
            search.consider(seen)
    search.add_uncalled(observations)
    search.add_functions(observations)
    return [replace(site, order=order) for order, site in enumerate(search.found.values())]


class _Search:
    """The sites found so far, by module."""

    def __init__(self) -> None:
        self.found: dict[int, NormSite] = {}
        self._known: dict[Hashable, NormSite | NotANormError] = {}
        self._outputs: dict[int, int] = {}

    def consider(self, seen: Observation) -> None:
        """Add the site of a module, unless a module inside is the norm already: inner modules return first."""
        parts = [part for part in seen.module.modules() if id(part) in self.found]
        # A part settles the matter if it is a norm, of this or another family.
        norms = [
            p
            for p in parts
            if self.found[id(p)].refused is None or _family(p, by_class=True) is not None
        ]
        if len(norms) == 1 and seen.problem == ANOTHER_TENSOR and _is_named_norm(seen.module):
            key = id(norms[0])
            # It modulates the norm inside; passing the norm's output on is no modulation.
            if seen.output_at == 0 or seen.output_at != self._outputs.get(key):
                self._refuse(
                    seen, f"{ANOTHER_TENSOR}; the norm inside stands at {self.found[key].path!r}"
                )
        # An annealed layer of ours is a norm at first, and so would be its parent.
        if norms or any(getattr(part, "_dynorm_layer", False) for part in seen.module.modules()):
            return
        site = self._site_of(seen)
        if site is None or (site.refused is not None and parts):
            return
        for part in parts:
            del self.found[id(part)]
        self.found[id(seen.module)] = site
        self._outputs[id(seen.module)] = seen.output_at

    def add_uncalled(self, observations: list[Observation]) -> None:
        """Add the modules named norms that were not reached, the innermost only."""
        known = {
            id(p)
            for seen in observations
            if id(seen.module) in self.found
            for p in seen.module.modules()
        }
        named = [
            s
            for s in observations
            if not s.calls and _is_named_norm(s.module) and id(s.module) not in known
        ]
        ids = known | {id(seen.module) for seen in named}
        for seen in named:
            if not any(
                id(part) in ids for part in seen.module.modules() if part is not seen.module
            ):
                reason = "never called by the example input"
                if seen.without_tokens:
                    reason = "not reached: the example sends it no tokens"
                reason += "; give an example that reaches it, if anything does"
                self._refuse(seen, _family(seen.module, by_class=True) or reason)

    def add_functions(self, observations: list[Observation]) -> None:
        """Add the modules that call a norm as a function and are none themselves: nothing stands there to replace."""
        inside = {
            id(p)
            for seen in observations
            if id(seen.module) in self.found
            for p in seen.module.modules()
        }
        for seen in observations:
            if seen.functions and id(seen.module) not in inside:
                names, count = " and ".join(sorted(set(seen.functions))), len(seen.functions)
                times = f"{count} times" if count > 1 else "once"
                what = f"calls {names} in its forward, {times} in the run"
                self._refuse(seen, f"{what}: write it as a module to have it replaced")

    def _refuse(self, seen: Observation, reason: str) -> None:
        self.found[id(seen.module)] = _placed(NormSite("", refused=reason), seen)

    def _site_of(self, seen: Observation) -> NormSite | None:
        """Return the site of a module that was called; None if it neither is a norm nor is named one."""
        reason = _family(seen.module, by_class=True) or seen.problem
        if reason is None and not seen.is_light(seen.shapes[0]):
            reason = "holds matrices: its parameters are more than a scale and a shift"
        # These hide any other reason, and refuse what is a norm otherwise.
        way = _PATCHED if has_other_forward(seen.module) else None
        if way is None and seen.modifies_input:
            way = _IN_PLACE
        if reason is None and not seen.samples:
            reason = "returns its input: it computes nothing"
            if not candidate_axes(seen.module, seen.shapes[0]):
                reason = self._one_channel(seen)
        if reason is None:
            try:
                site = self._recovered(seen)
                return site if way is None else _placed(NormSite("", refused=way), seen)
            except NotANormError as error:
                reason = _family(seen.module) or way or str(error)
        if not _is_named_norm(seen.module):
            return None
        return _placed(NormSite("", refused=reason), seen)

    def _recovered(self, seen: Observation) -> NormSite:
        """Return the site of a norm; NotANormError if the module is not one."""
        try:
            site = _placed(self._recover(seen), seen)
        except NotANormError:
            if seen.shapes[0][-1] == 1:
                raise NotANormError(self._one_channel(seen)) from None
            raise
        if site.kind == "layernorm" and math.prod(site.normalized_shape) == 2:
            why = "LayerNorm makes them 1 and -1, by the sign of their difference alone"
            raise NotANormError(f"two channels: {why}")
        weight, bias = affine_of(seen.module, site)
        _require_agreement(seen, site, weight, bias)
        is_unit = bias is None and weight is not None and _is_unit_length(seen.module, weight)
        return replace(site, refused=UNIT_LENGTH) if is_unit else site

    def _one_channel(self, seen: Observation) -> str:
        """Return the reason against a norm of one channel, which depends on its kind."""
        reason = "one channel: no norm over it can be recovered"
        try:
            if depends_on_sign(seen.module, seen.shapes[0], seen.dtype, seen.device):
                return "one channel: its output keeps only the sign of the input, as RMSNorm's does"
            return "one channel: its output does not depend on the input, as LayerNorm's does not"
        except NotANormError:
            return reason

    def _recover(self, seen: Observation) -> NormSite:
        """Recover a norm once for all modules of its sort: the hundred norms of a large model are of two."""
        form = (seen.shapes[0], seen.dtype, seen.device)
        sort = (*form, *_sort_of(seen.module))
        if sort not in self._known:
            try:
                self._known[sort] = recover(seen.module, *form)
            except NotANormError as error:
                self._known[sort] = error
        if isinstance(known := self._known[sort], NotANormError):
            raise known
        return known


def has_other_forward(module: nn.Module) -> bool:
    """Return whether another forward than its class's was set on a module.

    A hook of accelerate sets one that calls the forward from before. Removing the hook leaves the
    class's own forward on the instance.
    """
    forward = vars(module).get("forward")
    if "_hf_hook" in vars(module):
        forward = vars(module).get("_old_forward", forward)
    if forward is None:
        return False
    is_its_own = getattr(forward, "__self__", None) is module
    return not (is_its_own and forward.__func__ is type(module).forward)


def _sort_of(module: nn.Module) -> Iterator[Hashable]:
    """Yield all that decides how a module computes, except the values of its tensors."""
    for part in module.modules():
        yield type(part), part.training
        for name, tensor in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        ]:
            yield name, tensor.shape, tensor.dtype
        for name in sorted(part.__dict__.keys() - _MODULE_TABLES):
            value = part.__dict__[name]
            # Equal numbers mean the same; objects may change.
            known = (int, float, str, torch.dtype, type(None))
            is_constant = all(
                isinstance(v, known) for v in (value if isinstance(value, tuple) else (value,))
            )
            yield name, value if is_constant else id(value)


def _placed(site: NormSite, seen: Observation) -> NormSite:
    """Return a site with the place of a module in the model, and its calls."""
    observed = str(seen.output_dtype).removeprefix("torch.")
    return replace(
        site,
        path=seen.paths[0],
        aliases=tuple(seen.paths[1:]),
        class_name=type(seen.module).__qualname__,
        calls=seen.calls,
        input_shape=seen.shapes[0] if seen.shapes else (),
        output_dtype=None if seen.output_dtype == seen.dtype else observed,
        output_rule=site.output_rule if _explains(site.output_rule, site, seen) else observed,
    )


def _explains(text: str | None, site: NormSite, seen: Observation) -> bool:
    """Return whether a rule gives the dtype that the module returned in the run."""
    if seen.autocast or not seen.calls:
        return True
    if text is None:
        return seen.output_dtype == seen.dtype
    tensors = named_tensors(seen.module)
    for name in (site.weight_name, site.bias_name):
        if name is not None:
            return DtypeRule(text)(seen.dtype, tensors[name].dtype) == seen.output_dtype
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    own = floating[0] if floating else seen.dtype
    return DtypeRule(text)(seen.dtype, own) == seen.output_dtype


def _require_agreement(
    seen: Observation, site: NormSite, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Require that the whole run agrees with the formula that was recovered from a copy."""
    for shape in seen.shapes:
        if (
            tuple(shape[dim] if -len(shape) <= dim < len(shape) else 0 for dim in site.dims)
            != site.normalized_shape
        ):
            raise NotANormError("several widths: it is called with different numbers of channels")
    family = _family(seen.module)
    if site.weight_name is None and family is not None:
        raise NotANormError(family)
    samples = seen.samples[channel_axes(site)]
    given, output = (site_tokens(site, sample.cpu().double(), []) for sample in samples)
    expected = core(given, site.kind, site.eps)
    expected = expected if weight is None else expected * weight.cpu().double().flatten()
    expected = expected if bias is None else expected + bias.cpu().double().flatten()
    error, size = float((output - expected).square().sum()), float(expected.square().sum())
    # Activations that are not finite say nothing of the formula: NaN passes this comparison.
    if error > (HALF_TOLERANCE if seen.rounded else 1e-3) ** 2 * size:
        raise NotANormError(
            "differs in the run: the formula fits a copy, but not its output for the example"
        )


def _is_unit_length(module: nn.Module, weight: Tensor) -> bool:
    """Return whether a module without a scale per channel gives each token the length 1, or one that no norm gives."""
    parameters, named = list(module.parameters()), _is_named_norm(module)
    # ScaleNorm is a norm: it is named one, and learns the length.
    if any(p.numel() > 1 for p in parameters) or (parameters and named):
        return False
    if not torch.allclose(weight, weight.mean(), rtol=HALF_TOLERANCE):
        return False
    scale = abs(float(weight.double().mean()))
    unit = abs(scale * math.sqrt(weight.numel()) - 1) < HALF_TOLERANCE
    return unit or (not named and abs(scale - 1) > HALF_TOLERANCE)


def _family(module: nn.Module, by_class: bool = False) -> str | None:
    """Return the reason that names a family of norms other than LayerNorm and RMSNorm, or None."""
    name = "" if by_class else type(module).__name__.lower()
    return next(
        (reason for cls, part, reason in _OTHER_NORMS if isinstance(module, cls) or part in name),
        None,
    )


def _is_named_norm(module: nn.Module) -> bool:
    is_known = (
        isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or _family(module, by_class=True) is not None
    )
    return is_known or _NORM_NAME.search(type(module).__name__.lower()) is not None
