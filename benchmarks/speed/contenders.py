"""Make the contenders of a pass: forward without a gradient, backward only, and both through autograd."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
OUTPUT_GIVEN = ", output given"
NO_AUTOGRAD = ", no autograd"
WITNESSES = ", four witnesses"
KINDS = ("", WITNESSES, OUTPUT_GIVEN, NO_AUTOGRAD, " eager", " compiled")
# The others are compared with these, which take part in every run.
ALWAYS = (f"copy{OUTPUT_GIVEN}", "copy", "F.layer_norm", "nn.LayerNorm")
NAMES = (
    *ALWAYS,
    f"LayerNorm{NO_AUTOGRAD}",
    "LayerNorm compiled",
    "F.rms_norm",
    "nn.RMSNorm",
    *(FAMILY["dyisru"] + kind for kind in KINDS),
    *(FAMILY["dyt"] + kind for kind in KINDS),
    *(FAMILY["derf"] + kind for kind in KINDS),
    *(FAMILY["linear"] + kind for kind in KINDS),
    "Liger DyT",
)
_LAYERS = {
    "dyisru": dynorm.DyISRU,
    "dyt": dynorm.DyT,
    "derf": dynorm.Derf,
    "linear": dynorm.LinearControl,
}
# The kernel's code, and the name of its constant among the case's parameters.
_KERNELS = {
    "dyisru": (kernels.FunctionCode.DYISRU, "log_beta"),
    "dyt": (kernels.FunctionCode.DYT, "alpha"),
    "derf": (kernels.FunctionCode.DERF, "alpha"),
    "linear": (kernels.FunctionCode.LINEAR, "log_beta"),
}
# Tensors to check: the output "y", the gradient "x", and gradients of parameters by their names.
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to compute a function of :data:`benchmarks.speed.cases.REFERENCES`.

    Args:
        name: one of :data:`NAMES`.
        function: the function's name.
        call: computes it; this is timed.
        results: computes it, and returns the tensors to check.
    """

    name: str
    function: str
    call: Callable[[], Any]
    results: Callable[[], Results]

    @property
    def output(self) -> str:
        """Whether the output is "given" to the call, or "allocated" by it."""
        return "given" if self.name.endswith(OUTPUT_GIVEN) else "allocated"


@dataclass(frozen=True)
class Entry:
    """A module that competes.

    Args:
        name: one of :data:`NAMES`.
        function: the function's name.
        call: the module or its compiled form.
        leaves: the module's parameters by the case's names.
    """

    name: str
    function: str
    call: Callable[[Tensor], Tensor]
    leaves: dict[str, Tensor]


def wanted(name: str, only: Sequence[str]) -> bool:
    """Return whether a contender takes part: all do without globs, and :data:`ALWAYS` always do."""
    if not only or name in ALWAYS:
        return True
    return any(fnmatchcase(name, glob) for glob in only)


@dataclass(frozen=True)
class ModuleSpec:
    """A module that could compete, and the function that makes it.

    ``renamed`` has the case's names of those parameters whose names differ in the module.
    """

    name: str
    function: str
    make: Callable[[], nn.Module]
    renamed: dict[str, str] = field(default_factory=dict)


def enter_modules(case: Case, only: Sequence[str], compiled: bool) -> list[Entry]:
    """Return the modules that compete in a case, with its parameters; compiled ones compile at their first call."""
    entries = []
    for spec in _modules(case.channels, compiled):
        if not wanted(spec.name, only):
            continue
        module = spec.make().to(case.x.device, case.x.dtype)
        leaves = {}
        for name, parameter in module.named_parameters():
            name_in_case = spec.renamed.get(name, name)
            leaves[name_in_case] = parameter
            with torch.no_grad():
                parameter.copy_(case.parameters[name_in_case])
        call: Callable[[Tensor], Tensor] = module
        if spec.name.endswith(" compiled"):
            call = torch.compile(module, dynamic=False, fullgraph=True)
        entries.append(Entry(spec.name, spec.function, call, leaves))
    return entries


def _modules(channels: int, compiled: bool) -> Iterator[ModuleSpec]:
    """Yield all modules that could compete."""
    layer_norm_module = partial(nn.LayerNorm, channels, eps=EPS)
    yield ModuleSpec("nn.LayerNorm", "layer_norm", layer_norm_module)
    if compiled:
        yield ModuleSpec("LayerNorm compiled", "layer_norm", layer_norm_module)
    yield ModuleSpec("nn.RMSNorm", "rms_norm", partial(nn.RMSNorm, channels, eps=EPS))
    for function, name in FAMILY.items():
        layer = partial(_LAYERS[function], channels)
        yield ModuleSpec(name, function, layer)
        if function == "dyisru":
            with_witnesses = partial(layer, witnesses=witnesses_of(channels))
            yield ModuleSpec(f"{name}{WITNESSES}", "dyisru_witnesses", with_witnesses)
        if function not in EAGER:
            continue
        eager = partial(EAGER[function], channels)
        yield ModuleSpec(f"{name} eager", function, eager)
        if compiled:
            # DyISRU is compiled as users have it, and DyT and Derf are as in their papers.
            to_compile = layer if function == "dyisru" else eager
            yield ModuleSpec(f"{name} compiled", function, to_compile)
    if importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available():
        from liger_kernel.transformers.dyt import LigerDyT

        renamed = {"gamma": "weight", "beta": "bias"}
        yield ModuleSpec("Liger DyT", "dyt", partial(LigerDyT, channels), renamed)


def contenders(
    case: Case,
    entries: Sequence[Entry],
    stage: str,
    only: Sequence[str] = (),
) -> list[Contender]:
    """Return the contenders of a pass; call those of "forward" under ``torch.no_grad()``."""
    passes = {"forward": _forward, "backward": _backward, "both": _both}
    candidates = passes[stage](case, entries)
    return [contender for contender in candidates if wanted(contender.name, only)]


def _forward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    x = case.x
    shape = (case.channels,)
    weight = case.parameters["weight"]
    bias = case.parameters["bias"]

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
            results = partial(_output_given, case, call)
            yield Contender(f"{name}{OUTPUT_GIVEN}", function, call, results)


def _backward(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **entry.leaves}
        tensors = tuple(leaves.values())
        y = entry.call(case.leaf)
        call = partial(torch.autograd.grad, y, tensors, case.grad, True)
        results = partial(_by_name, tuple(leaves), call)
        yield Contender(entry.name, entry.function, call, results)
    norm_kernel = _layer_norm_backward(case)
    yield Contender(f"LayerNorm{NO_AUTOGRAD}", "layer_norm", norm_kernel, norm_kernel)
    # On a GPU our kernel's sums are per channel, and a layer still has to add them.
    if case.x.is_cpu and kernels.backend(case.x.device) != "torch":
        for function, name in FAMILY.items():
            kernel = _kernel_backward(case, function)
            yield Contender(f"{name}{NO_AUTOGRAD}", function, kernel, kernel)


def _both(case: Case, entries: Sequence[Entry]) -> Iterator[Contender]:
    yield _copy(case)
    for entry in entries:
        leaves = {"x": case.leaf, **entry.leaves}
        tensors = tuple(leaves.values())
        call = partial(_step, entry.call, case.leaf, tensors, case.grad)
        yield Contender(entry.name, entry.function, call, partial(_trained, call, leaves))


def _copy(case: Case) -> Contender:
    call = partial(case.out.copy_, case.x)
    return Contender(f"copy{OUTPUT_GIVEN}", "copy", call, partial(_output_given, case, call))


def _output_given(case: Case, call: Callable[[], Tensor]) -> Results:
    # An element that the call does not write remains NaN, and the check finds it.
    case.out.fill_(torch.nan)
    call()
    return {"y": case.out.clone()}


def _by_name(names: tuple[str, ...], call: Callable[[], Sequence[Tensor]]) -> Results:
    return dict(zip(names, call(), strict=True))


def _step(
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    leaves: tuple[Tensor, ...],
    grad: Tensor,
) -> Tensor:
    """Run forward and backward, without adding to older gradients."""
    for leaf in leaves:
        leaf.grad = None
    y = call(x)
    torch.autograd.backward(y, grad)
    return y


def _trained(call: Callable[[], Tensor], leaves: dict[str, Tensor]) -> Results:
    results = {"y": call().detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        results[name] = leaf.grad
        leaf.grad = None
    return results


def _kernel_arguments(case: Case, function: str) -> tuple[Form, Parameters]:
    code, name = _KERNELS[function]
    logarithmic = name == "log_beta"
    scale = case.channels**0.5 if logarithmic else 1.0
    form = Form(code, logarithmic, scale, case.channels, 1)
    parameters = Parameters(
        case.parameters[name],
        weight=case.parameters["weight"],
        bias=case.parameters["bias"],
    )
    if function == "derf":
        parameters = parameters._replace(shift=case.parameters["shift"])
    return form, parameters


def _kernel_backward(case: Case, function: str) -> Callable[[], Results]:
    """Return the call of the backward kernel for all gradients, without layer and autograd."""
    form, parameters = _kernel_arguments(case, function)
    inputs = (case.x, *parameters)
    needed = tuple(tensor is not None for tensor in inputs)
    _, constant = _KERNELS[function]
    names = ("x", constant, "shift", "center", "weight", "bias", "log_gain")

    def call() -> Results:
        # As autograd does: the C++ side checks the tensors itself if this torch lets it read them.
        with torch.no_grad():
            served = _cpu.serve_gradients(form, case.grad, inputs, (False, *needed))
        if served is not None:
            gradients = served[1:]
        else:
            gradients = _cpu.gradients(form, case.grad, case.x, parameters, needed)
        pairs = zip(names, gradients, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    return call


def _layer_norm_backward(case: Case) -> Callable[[], Results]:
    """Return the call of LayerNorm's own backward kernel, with the statistics that its forward pass saved."""
    weight = case.parameters["weight"]
    bias = case.parameters["bias"]
    shape = [case.channels]
    _, mean, rstd = torch.native_layer_norm(case.x, shape, weight, bias, EPS)
    backward = torch.ops.aten.native_layer_norm_backward.default
    needed = [True, True, True]
    call = partial(backward, case.grad, case.x, shape, mean, rstd, weight, bias, needed)
    return partial(_by_name, ("x", "weight", "bias"), call)
