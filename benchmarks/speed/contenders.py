"""The contenders of a pass: forward without a gradient, backward alone, and both through autograd."""

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
from benchmarks.speed.cases import EAGER, EPS, Case, witnesses_of
from dynorm import kernels
from dynorm.kernels import _cpu, _triton
from dynorm.kernels._form import Form, Parameters

PASSES = ("forward", "backward", "both")
FAMILY = {"dyisru": "DyISRU", "dyt": "DyT", "derf": "Derf", "linear": "linear"}
GIVEN, ALONE, TOLD = ", output given", ", no autograd", ", four witnesses"
# The contender that the others are compared with.
ALWAYS = (f"copy{GIVEN}", "copy", "F.layer_norm", "nn.LayerNorm")
NAMES = (
    *ALWAYS,
    f"LayerNorm{ALONE}",
    "LayerNorm compiled",
    "F.rms_norm",
    "nn.RMSNorm",
    *(FAMILY[f] + kind for f in FAMILY for kind in ("", TOLD, GIVEN, ALONE, " eager", " compiled")),
    "Liger DyT",
)
_LAYERS = {
    "dyisru": dynorm.DyISRU,
    "dyt": dynorm.DyT,
    "derf": dynorm.Derf,
    "linear": dynorm.LinearControl,
}
# The kernel's number, and which of the case's parameters is its constant.
_KERNELS = {
    "dyisru": (kernels.FunctionCode.DYISRU, "log_beta"),
    "dyt": (kernels.FunctionCode.DYT, "alpha"),
    "derf": (kernels.FunctionCode.DERF, "alpha"),
    "linear": (kernels.FunctionCode.LINEAR, "log_beta"),
}


@dataclass(frozen=True)
class Contender:
    """One way to compute a function of :data:`benchmarks.speed.cases.REFERENCES`; ``call`` is timed."""

    name: str
    function: str
    call: Callable[[], Any]
    # To be checked: "y", the gradient "x", and gradients of parameters by our names.
    results: Callable[[], dict[str, Tensor]]

    @property
    def output(self) -> str:
        """Whether the output was there before the call, "given", or is "allocated" by it."""
        return "given" if self.name.endswith(GIVEN) else "allocated"


@dataclass(frozen=True)
class Entry:
    """A module that competes: ``call`` is the module or its compiled form, ``leaves`` its parameters by our names."""

    name: str
    function: str
    call: Callable[[Tensor], Tensor]
    leaves: dict[str, Tensor]


def wanted(name: str, only: Sequence[str]) -> bool:
    """Say whether a contender takes part: all do without globs, and what others are compared with always does."""
    return not only or name in ALWAYS or any(fnmatchcase(name, glob) for glob in only)


def enter_modules(case: Case, only: Sequence[str], compiled: bool) -> list[Entry]:
    """Return the modules that compete in a case, with its parameters; compiled ones compile at their first call."""
    entries = []
    for name, function, make, renamed in _module_table(case.channels, compiled):
        if not wanted(name, only):
            continue
        module = make().to(case.x.device, case.x.dtype)
        leaves = {renamed.get(own, own): p for own, p in module.named_parameters()}
        with torch.no_grad():
            for ours, p in leaves.items():
                p.copy_(case.parameters[ours])
        call: Callable[[Tensor], Tensor] = module
        if name.endswith(" compiled"):
            call = torch.compile(module, dynamic=False, fullgraph=True)
        entries.append(Entry(name, function, call, leaves))
    return entries


def _module_table(
    channels: int, compiled: bool
) -> Iterator[tuple[str, str, Callable[[], nn.Module], dict[str, str]]]:
    """Name, function, how it is made, and our names of its parameters where its own differ."""
    norm = partial(nn.LayerNorm, channels, eps=EPS)
    yield "nn.LayerNorm", "layer_norm", norm, {}
    if compiled:
        yield "LayerNorm compiled", "layer_norm", norm, {}
    yield "nn.RMSNorm", "rms_norm", partial(nn.RMSNorm, channels, eps=EPS), {}
    for function, name in FAMILY.items():
        layer = partial(_LAYERS[function], channels)
        yield name, function, layer, {}
        if function == "dyisru":
            yield (
                f"{name}{TOLD}",
                "dyisru_witnesses",
                partial(layer, witnesses=witnesses_of(channels)),
                {},
            )
        if function not in EAGER:
            continue
        yield f"{name} eager", function, partial(EAGER[function], channels), {}
        if compiled:
            # Ours is compiled as users have it; of DyT and Derf, their own definitions.
            made = layer if function == "dyisru" else partial(EAGER[function], channels)
            yield f"{name} compiled", function, made, {}
    if importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available():
        from liger_kernel.transformers.dyt import LigerDyT

        yield "Liger DyT", "dyt", partial(LigerDyT, channels), {"gamma": "weight", "beta": "bias"}


def contenders(
    case: Case, entries: Sequence[Entry], stage: str, only: Sequence[str] = ()
) -> list[Contender]:
    """Return the contenders of a pass; those of "forward" are to be called under ``torch.no_grad()``."""
    made = {"forward": _forward, "backward": _backward, "both": _both}[stage](case, entries)
    return [contender for contender in made if wanted(contender.name, only)]


def _forward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    x, shape, weight, bias = (
        case.x,
        (case.channels,),
        case.parameters["weight"],
        case.parameters["bias"],
    )

    def allocated(name: str, function: str, call: Callable[[], Tensor]) -> Contender:
        return Contender(name, function, call, lambda: {"y": call()})

    yield _copy(case)
    yield allocated("copy", "copy", x.clone)
    yield allocated("F.layer_norm", "layer_norm", partial(layer_norm, x, shape, weight, bias, EPS))
    yield allocated("F.rms_norm", "rms_norm", partial(rms_norm, x, shape, weight, EPS))
    for entry in entries:
        yield allocated(entry.name, entry.function, partial(entry.call, x))
    if kernels.backend(x.device) != "torch":
        kernel = _cpu.forward if x.is_cpu else _triton.forward
        for function, name in FAMILY.items():
            form, parameters = _kernel_arguments(case, function)
            call = partial(kernel, form, x, parameters, out=case.out)
            yield Contender(f"{name}{GIVEN}", function, call, partial(_given, case, call))


def _backward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **entry.leaves}
        y = entry.call(case.leaf)
        call = partial(torch.autograd.grad, y, tuple(leaves.values()), case.grad, True)
        results = partial(_by_name, tuple(leaves), call)
        yield Contender(entry.name, entry.function, call, results)
    kernel = _layer_norm_backward(case)
    yield Contender(f"LayerNorm{ALONE}", "layer_norm", kernel, kernel)
    # On a GPU our kernel's sums are per channel: a layer still has to add them.
    if case.x.is_cpu and kernels.backend(case.x.device) != "torch":
        for function, name in FAMILY.items():
            own = _kernel_backward(case, function)
            yield Contender(f"{name}{ALONE}", function, own, own)


def _both(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **entry.leaves}
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


def _by_name(names: tuple[str, ...], call: Callable[[], Sequence[Tensor]]) -> dict[str, Tensor]:
    return dict(zip(names, call(), strict=True))


def _step(
    call: Callable[[Tensor], Tensor], x: Tensor, leaves: tuple[Tensor, ...], grad: Tensor
) -> Tensor:
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


def _kernel_arguments(case: Case, function: str) -> tuple[Form, Parameters]:
    number, name = _KERNELS[function]
    p, logarithmic = case.parameters, name == "log_beta"
    form = Form(number, logarithmic, case.channels**0.5 if logarithmic else 1.0, case.channels, 1)
    parameters = Parameters(p[name], weight=p["weight"], bias=p["bias"])
    if function == "derf":
        parameters = parameters._replace(shift=p["shift"])
    return form, parameters


def _kernel_backward(case: Case, function: str) -> Callable[[], dict[str, Tensor]]:
    """Return the call of the backward kernel for all gradients, without layer and autograd."""
    form, parameters = _kernel_arguments(case, function)
    inputs = (case.x, *parameters)
    needed = tuple(t is not None for t in inputs)
    roles = ("x", _KERNELS[function][1], "shift", "center", "weight", "bias", "log_gain")

    def call() -> dict[str, Tensor]:
        # As autograd does: by the C++ side's own checks, where this torch lets it look at tensors.
        with torch.no_grad():
            served = _cpu.serve_gradients(form, case.grad, inputs, (False, *needed))
        found = (
            served[1:]
            if served is not None
            else _cpu.gradients(form, case.grad, case.x, parameters, needed)
        )
        return {role: g for role, g in zip(roles, found, strict=True) if g is not None}

    return call


def _layer_norm_backward(case: Case) -> Callable[[], dict[str, Tensor]]:
    """Return the call of LayerNorm's own backward kernel, with the statistics that its forward pass saved."""
    weight, bias, shape = case.parameters["weight"], case.parameters["bias"], [case.channels]
    _, mean, rstd = torch.native_layer_norm(case.x, shape, weight, bias, EPS)
    backward = torch.ops.aten.native_layer_norm_backward.default

    call = partial(backward, case.grad, case.x, shape, mean, rstd, weight, bias, [True, True, True])
    return partial(_by_name, ("x", "weight", "bias"), call)
