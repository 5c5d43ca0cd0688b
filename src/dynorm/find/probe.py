"""Decide which modules of a model are norms, by their behaviour and not by their names."""

import re
from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch
from torch import nn

from dynorm.batches import copied_tensors, example_arguments, site_tokens
from dynorm.find.affine import affine_parts
from dynorm.find.recover import (
    ANOTHER_DTYPE,
    HALF_TOLERANCE,
    NotANormError,
    candidate_axes,
    core,
    recover,
)
from dynorm.find.tokens import named_tensors, plain_arithmetic
from dynorm.find.trial import with_uses
from dynorm.find.watch import Observation, observe
from dynorm.guard import require_plain_model, undisturbed
from dynorm.site import NormSite

_PATCHED = (
    "another forward was set on this instance, as Liger-Kernel does, and a replacement would drop "
    "it: undo the patch, or convert first and patch the other modules then"
)

# By class, and by the name of the class.
_OTHER_NORMS: dict[type[nn.Module], str] = {
    nn.modules.batchnorm._BatchNorm: "batch norm: its statistics are the batch's, or fixed",
    nn.modules.instancenorm._InstanceNorm: "instance norm: its statistics span positions",
    nn.GroupNorm: "group norm: its statistics span positions and groups of channels",
    nn.LocalResponseNorm: "local response norm: it looks only at neighbouring channels",
}
# Class names that end in norm or in norm and the mark of a variant: RMSNormGated, but not
# NormedEmbedding. A norm of weights does not normalize activations.
_NORM_NAME = re.compile(
    r"(?<!weight)(?<!spectral)norm(alization)?"
    r"(layer|activation|perhead|gated|zero|single|final|1p|\dd|_)*$"
    r"|adaln(zero|single|_)*$"
)

_MODULE_TABLES = frozenset(nn.Module().__dict__)


def find_norms(
    model: nn.Module,
    *args: object,
    **kwargs: object,
) -> list[NormSite]:
    """Find the LayerNorms and RMSNorms of a model by behaviour, with two runs of it.

    The model is called under ``torch.no_grad()``. Each module that took one tensor, returned one
    of the same shape and holds no matrices is then copied, and the copy is tried on random tokens.
    It is a norm if ``y = core(x) * weight + bias`` holds for each token separately, with ``core(x)
    = (x - mean) / sqrt(var + eps)`` or ``x / sqrt(mean(x^2) + eps)``. The second run has other
    modules in the place of the norms, and shows whether the model only calls them. Mode, hooks,
    buffers and random states of the model stay as they are. So does the example: the model gets
    copies.

    Args:
        model: Any module of plain torch; train or eval mode is kept.
        *args: The arguments of one call of the model, or one batch, a tuple or dict of them, as the
            other functions take. A short input is enough.
        **kwargs: The same, by keyword.

    Returns:
        The norms in call order. Modules that are named norms, or are norms of torch, but cannot be
        replaced are among them, and their ``refused`` is the reason; those never called come last.
        Empty for a model without norms.

    Raises:
        ArgumentError: If the model is not a module.
        ModelError: If it is compiled, wrapped, scripted, sharded or on the meta device.
        DataError: If the model raises on the example.

    Example:
        >>> model = nn.Sequential(
        ...     nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8, eps=1e-6)
        ... )
        >>> for site in find_norms(model, torch.randn(2, 6)):
        ...     print(site.path, site.kind, site.dim, site.normalized_shape, site.eps)
        1 layernorm -1 (8,) 1e-05
        3 rmsnorm -1 (8,) 1e-06
    """
    require_plain_model(model)
    example = example_arguments(model, args, kwargs)
    with undisturbed(model, example, attributes=True):
        observations, output = observe(model, copied_tensors(example))
    with undisturbed(model, example):
        sites = NormSearch(observations).norms()
    return with_uses(model, example, sites, output)


class NormSearch:
    """The norms among the modules that a run has shown, and why others are none."""

    def __init__(self, observations: list[Observation]) -> None:
        self._observations = observations
        # Of the modules that were considered until now.
        self._sites: dict[nn.Module, NormSite] = {}
        # Those that are norms, replaceable or not.
        self._norms: set[nn.Module] = set()
        self._known: dict[Hashable, NormSite | NotANormError] = {}

    def norms(self) -> list[NormSite]:
        """Return the norms in the order of their calls, then those that were never called."""
        with plain_arithmetic():
            for seen in self._observations:
                if seen.calls:
                    self._consider(seen)
        self._add_uncalled()
        self._add_functions()
        return [replace(site, order=order) for order, site in enumerate(self._sites.values())]

    def _consider(self, seen: Observation) -> None:
        """Add the site of a module, unless a module inside is the norm.

        Inner modules return first, so they are considered before the modules around them.
        """
        inside = list(seen.module.modules())
        # A layer of dynorm settles the matter too: an annealed one is a norm at first.
        for part in inside:
            if part in self._norms or getattr(part, "_dynorm_layer", False):
                return
        try:
            site = self._site_of(seen)
        except NotANormError as error:
            if not _is_named_norm(seen.module):
                return
            site = _refused(seen, str(error))
        parts = [part for part in inside if part in self._sites]
        if site.refused is not None and parts:
            return
        for part in parts:
            del self._sites[part]
        self._sites[seen.module] = site

    def _add_uncalled(self) -> None:
        """Add the modules named norms, without parts, that the run did not reach."""
        covered = self._covered()
        for seen in self._observations:
            is_known = seen.calls > 0 or seen.module in covered
            if is_known or seen.module._modules or not _is_named_norm(seen.module):
                continue
            reason = (
                "never called with tokens by the example; give one that reaches it, if any does"
            )
            self._sites[seen.module] = _refused(seen, _family(seen.module) or reason)

    def _add_functions(self) -> None:
        """Add the modules that call a norm as a function: they hold no module to replace."""
        covered = self._covered()
        for seen in self._observations:
            if seen.functions and seen.module not in covered:
                names = " and ".join(sorted(seen.functions))
                reason = f"calls {names} as a function: write it as a module to have it replaced"
                self._sites[seen.module] = _refused(seen, reason)

    def _covered(self) -> set[nn.Module]:
        """Return the modules that have a site, and all modules inside them."""
        return {part for module in self._sites for part in module.modules()}

    def _site_of(self, seen: Observation) -> NormSite:
        """Return the site of a called module; NotANormError if it is not a norm."""
        reason = _family(seen.module)
        if reason is not None:
            self._norms.add(seen.module)
            raise NotANormError(reason)
        if seen.problem is not None:
            raise NotANormError(seen.problem)
        declared = getattr(seen.module, "normalized_shape", ())
        if isinstance(declared, (tuple, list)) and len(declared) > 1:
            raise NotANormError(
                f"several axes: it normalizes {tuple(declared)} together, a layer only one axis"
            )
        if seen.has_matrix:
            raise NotANormError("holds matrices, or a scale that differs between positions")
        if not seen.samples and candidate_axes(seen.module, seen.shapes[0]):
            raise NotANormError("returns its input: it computes nothing")
        # These refuse even a norm, and replace the reasons of the check but for a known family.
        obstacle = seen.obstacle
        if has_other_forward(seen.module):
            obstacle = _PATCHED
        try:
            site = self._checked_site(seen)
        except NotANormError as error:
            reason = _family(seen.module, by_name=True) or obstacle or str(error)
            raise NotANormError(reason) from error
        self._norms.add(seen.module)
        if obstacle is not None:
            return _refused(seen, obstacle)
        return site

    def _checked_site(self, seen: Observation) -> NormSite:
        """Return the site of a norm; NotANormError if the module is not one."""
        site = _placed(self._recover_once(seen), seen)
        if site.kind == "layernorm" and site.normalized_shape == (2,):
            raise NotANormError(
                "two channels: LayerNorm makes them 1 and -1, only by the sign of their difference"
            )
        _require_dtype(seen, site)
        _require_agreement(seen, site)
        return site

    def _recover_once(self, seen: Observation) -> NormSite:
        """Recover a norm, once for all modules that compute alike."""
        inputs = (seen.shapes[0], seen.dtype, seen.device)
        key = (*inputs, *_key_of(seen.module))
        if key not in self._known:
            try:
                self._known[key] = recover(seen.module, *inputs)
            except NotANormError as error:
                self._known[key] = error
        site = self._known[key]
        if isinstance(site, NotANormError):
            raise site
        return site


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
    is_bound = getattr(forward, "__self__", None) is module
    return not is_bound or forward.__func__ is not type(module).forward


def _key_of(module: nn.Module) -> Iterator[Hashable]:
    """Yield everything that decides how a module computes, except the values of its tensors."""
    for name, tensor in named_tensors(module).items():
        yield name, tensor.shape, tensor.dtype
    for part in module.modules():
        yield type(part), part.training
        for name in sorted(vars(part).keys() - _MODULE_TABLES):
            value = vars(part)[name]
            try:
                yield name, hash(value), value
            # A list, which is equal only to itself, as it may change.
            except TypeError:
                yield name, id(value)


def _refused(seen: Observation, reason: str) -> NormSite:
    """Return the site of a module that cannot be replaced."""
    return _placed(NormSite("", refused=reason), seen)


def _placed(site: NormSite, seen: Observation) -> NormSite:
    """Return a site with a module's paths in the model, and its calls."""
    return replace(
        site,
        path=seen.paths[0],
        aliases=tuple(seen.paths[1:]),
        class_name=type(seen.module).__qualname__,
        calls=seen.calls,
        input_shape=seen.shapes[0] if seen.shapes else (),
    )


def _require_dtype(seen: Observation, site: NormSite) -> None:
    """Require the dtype that a copy showed of the output in the run too, but not under autocast."""
    expected = seen.dtype
    if site.promote:
        for tensor in named_tensors(seen.module).values():
            if tensor.is_floating_point():
                expected = torch.promote_types(expected, tensor.dtype)
    if not seen.autocast and seen.output_dtype != expected:
        raise NotANormError(ANOTHER_DTYPE)


def _require_agreement(seen: Observation, site: NormSite) -> None:
    """Require that the outputs of the run agree with the formula that a copy showed."""
    for shape in seen.shapes:
        has_axis = -len(shape) <= site.dim < len(shape)
        if not has_axis or (shape[site.dim],) != site.normalized_shape:
            raise NotANormError("several widths: it is called with different numbers of channels")
    family = _family(seen.module, by_name=True)
    if site.weight_name is None and family is not None:
        raise NotANormError(family)
    inputs, outputs = seen.samples[site.dim % len(site.input_shape)]
    x = site_tokens(site, inputs.cpu().double(), [])
    y = site_tokens(site, outputs.cpu().double(), [])
    expected = core(x, site.kind, site.eps)
    parts = affine_parts(seen.module, site)
    if "weight" in parts:
        expected = expected * parts["weight"].value
    if "bias" in parts:
        expected = expected + parts["bias"].value
    error = float((y - expected).square().sum())
    size = float(expected.square().sum())
    tolerance = 1e-3
    if seen.autocast or min(seen.dtype.itemsize, seen.output_dtype.itemsize) < 4:
        tolerance = HALF_TOLERANCE
    # NaN passes this comparison: activations that are not finite do not contradict the formula.
    if error > tolerance**2 * size:
        raise NotANormError(
            "differs in the run: the formula fits a copy, but not its output for the example"
        )


def _family(module: nn.Module, by_name: bool = False) -> str | None:
    """Return the reason that names a family of norms other than LayerNorm and RMSNorm, or None."""
    name = type(module).__name__.lower() if by_name else ""
    for cls, reason in _OTHER_NORMS.items():
        if isinstance(module, cls) or cls.__name__.strip("_").lower() in name:
            return reason
    return None


def _is_named_norm(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or _family(module) is not None:
        return True
    return _NORM_NAME.search(type(module).__name__.lower()) is not None
