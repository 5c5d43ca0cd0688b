"""Who is timed: forward without a gradient, backward alone, and both through autograd."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

import dynorm
from dynorm.bench.definitions import EAGER, EPS
from dynorm.bench.inputs import Case
from dynorm.bench.native import backward_call, forward_call, layer_norm_backward_call
from dynorm.errors import ArgumentError

__all__ = ["ALWAYS", "FAMILY", "NAMES", "PASSES", "Contender", "check_globs", "contenders", "enter_modules", "wanted"]

PASSES = ("forward", "backward", "both")
FAMILY = {"dyisru": "DyISRU", "dyt": "DyT", "derf": "Derf", "linear": "linear"}
GIVEN, ALONE = ", output given", ", no autograd"
# What the others are compared with.
ALWAYS = (f"copy{GIVEN}", "copy", "F.layer_norm", "nn.LayerNorm")
NAMES = (
    *ALWAYS,
    f"LayerNorm{ALONE}",
    "LayerNorm compiled",
    "F.rms_norm",
    "nn.RMSNorm",
    *(FAMILY[f] + kind for f in FAMILY for kind in ("", GIVEN, ALONE, " eager", " compiled")),
    "Liger DyT",
)
_LAYERS = {"dyisru": dynorm.DyISRU, "dyt": dynorm.DyT, "derf": dynorm.Derf, "linear": dynorm.LinearControl}


@dataclass(frozen=True)
class Contender:
    """One way to compute a function.

    Args:
        name: as tables show it.
        function: what it computes, a key of :data:`dynorm.bench.definitions.REFERENCES`.
        call: what is timed.
        results: computes what is checked: "y", the gradient "x", and gradients of parameters by our names.
    """

    name: str
    function: str
    call: Callable[[], Any]
    results: Callable[[], dict[str, Tensor]]

    @property
    def output(self) -> str:
        """Whether the output was there before the call, "given", or is "allocated" by it."""
        return "given" if self.name.endswith(GIVEN) else "allocated"


@dataclass(frozen=True)
class Entry:
    """A module that competes.

    Args:
        name: as tables show it.
        function: what it computes.
        module: whose parameters are trained.
        call: what is called, the module or its compiled form.
        renamed: our names of its parameters, where its own differ.
    """

    name: str
    function: str
    module: nn.Module
    call: Callable[[Tensor], Tensor]
    renamed: dict[str, str]


def wanted(name: str, only: Sequence[str]) -> bool:
    """Say whether a contender takes part: all do without globs, and what others are compared with always does.

    Example:
        >>> wanted("DyT eager", ["DyI*"]), wanted("copy", ["DyI*"])
        (False, True)
    """
    return not only or name in ALWAYS or any(fnmatchcase(name, glob) for glob in only)


def check_globs(only: Sequence[str]) -> None:
    """Refuse a glob that matches no contender.

    Raises:
        ArgumentError: one does not; the message lists the names.
    """
    for glob in only:
        if not any(fnmatchcase(name, glob) for name in NAMES):
            raise ArgumentError(f"each glob of only must match a contender, got {glob!r}: {'; '.join(NAMES)}")


def enter_modules(case: Case, only: Sequence[str], compiled: bool) -> list[Entry]:
    """Return the modules that compete in a case, with its parameters; compiled ones compile at their first call."""
    entries = []
    for name, function, make, renamed in _module_table(case.channels, compiled):
        if wanted(name, only):
            module = case.prepared(make(), renamed)
            call: Callable[[Tensor], Tensor] = module
            if name.endswith(" compiled"):
                call = torch.compile(module, dynamic=False, fullgraph=True)
            entries.append(Entry(name, function, module, call, renamed))
    return entries


def _module_table(channels: int, compiled: bool) -> Iterator[tuple[str, str, Callable[[], nn.Module], dict[str, str]]]:
    layer_norm = partial(nn.LayerNorm, channels, eps=EPS)
    yield "nn.LayerNorm", "layer_norm", layer_norm, {}
    if compiled:
        yield "LayerNorm compiled", "layer_norm", layer_norm, {}
    yield "nn.RMSNorm", "rms_norm", partial(nn.RMSNorm, channels, eps=EPS), {}
    for function, name in FAMILY.items():
        layer = partial(_LAYERS[function], channels)
        yield name, function, layer, {}
        if function not in EAGER:
            continue
        yield f"{name} eager", function, partial(EAGER[function], channels), {}
        if compiled:
            # Ours is compiled as users have it; of DyT and Derf, their own definitions.
            made = layer if function == "dyisru" else partial(EAGER[function], channels)
            yield f"{name} compiled", function, made, {}
    if importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available():
        yield "Liger DyT", "dyt", partial(_liger, channels), {"gamma": "weight", "beta": "bias"}


def _liger(channels: int) -> nn.Module:
    from liger_kernel.transformers.dyt import LigerDyT  # type: ignore[import-not-found, unused-ignore]

    module: nn.Module = LigerDyT(channels)
    return module


def contenders(case: Case, entries: Sequence[Entry], stage: str, only: Sequence[str] = ()) -> list[Contender]:
    """Return who competes in a pass.

    Args:
        case: the inputs.
        entries: the modules.
        stage: one of :data:`PASSES`: "forward" is to be called under ``torch.no_grad()``, the others are not.
        only: globs of names, as for :func:`wanted`.
    """
    made = {"forward": _forward, "backward": _backward, "both": _both}[stage](case, entries)
    return [contender for contender in made if wanted(contender.name, only)]


def _forward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    x, weight, bias = case.x, case.parameters["weight"], case.parameters["bias"]

    def allocated(name: str, function: str, call: Callable[[], Tensor]) -> Contender:
        return Contender(name, function, call, lambda: {"y": call()})

    yield _copy(case)
    yield allocated("copy", "copy", x.clone)
    shape = (case.channels,)
    yield allocated("F.layer_norm", "layer_norm", partial(layer_norm, x, shape, weight, bias, EPS))
    yield allocated("F.rms_norm", "rms_norm", partial(rms_norm, x, shape, weight, EPS))
    for entry in entries:
        yield allocated(entry.name, entry.function, partial(entry.call, x))
    for function, name in FAMILY.items():
        call = forward_call(case, function)
        if call is not None:
            yield Contender(f"{name}{GIVEN}", function, call, partial(_given, case, call))


def _backward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **_leaves(entry)}
        y = entry.call(case.leaf)
        call = partial(torch.autograd.grad, y, tuple(leaves.values()), case.grad, True)
        yield Contender(entry.name, entry.function, call, partial(_named, tuple(leaves), call))
    kernel = layer_norm_backward_call(case)
    yield Contender(f"LayerNorm{ALONE}", "layer_norm", kernel, kernel)
    for function, name in FAMILY.items():
        own = backward_call(case, function)
        if own is not None:
            yield Contender(f"{name}{ALONE}", function, own, own)


def _both(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **_leaves(entry)}
        call = partial(_step, entry.call, case.leaf, tuple(leaves.values()), case.grad)
        yield Contender(entry.name, entry.function, call, partial(_trained, call, leaves))


def _copy(case: Case) -> Contender:
    call = partial(case.out.copy_, case.x)
    return Contender(f"copy{GIVEN}", "copy", call, partial(_given, case, call))


def _given(case: Case, call: Callable[[], Tensor]) -> dict[str, Tensor]:
    # An element that is not written shows.
    case.out.fill_(torch.nan)
    call()
    return {"y": case.out.clone()}


def _leaves(entry: Entry) -> dict[str, Tensor]:
    return {entry.renamed.get(name, name): parameter for name, parameter in entry.module.named_parameters()}


def _named(names: tuple[str, ...], call: Callable[[], Sequence[Tensor]]) -> dict[str, Tensor]:
    return dict(zip(names, call(), strict=True))


def _step(call: Callable[[Tensor], Tensor], x: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> Tensor:
    """Go forward and backward; gradients are not added to older ones."""
    for leaf in leaves:
        leaf.grad = None
    y = call(x)
    torch.autograd.backward(y, grad)
    return y


def _trained(call: Callable[[], Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"y": call().detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[name], leaf.grad = leaf.grad, None
    return found
