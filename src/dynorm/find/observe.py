"""One watched run of a model: who was called, with what, and what came out; nothing of the run stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynorm.errors import DataError
from dynorm.find.recover import candidate_axes
from dynorm.watch import tensors_in, undisturbed

ANOTHER_TENSOR = "takes another tensor along: gated or adaptive"
OTHER_ARGUMENTS = "other arguments: a point-wise layer takes one tensor, by position"
NOT_ONE_TENSOR = "not tensor to tensor: it does not take and return one floating-point tensor"
OTHER_SHAPE = "another shape: its output is not shaped as its input"

# How much is kept of every axis but the channels', for the last check.
_KEPT = 2


@dataclass
class Observation:
    """What a run showed of one module.

    Args:
        module: The module itself.
        paths: All its dotted paths, the first one found first.
        calls: How often it was called.
        first: How many other modules had returned before it did for the first time; -1 when never called.
        problem: Why its calls cannot be those of a replaceable norm, or None.
        shapes: The distinct shapes of its input, in order.
        dtype: Element type of its input at the first call.
        device: Device of its input at the first call.
        rounded: Whether input, output or autocast were of half precision.
        output_at: Address of its last output, to see which module's output another one passes on.
        samples: Some tokens of the first call, in and out, for each group of axes that may be the channels.
    """

    module: nn.Module
    paths: list[str]
    calls: int = 0
    first: int = -1
    problem: str | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rounded: bool = False
    output_at: int = 0
    samples: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def is_light(self) -> bool:
        """Whether every parameter could be the scale or the shift of a norm: no matrices."""
        return all(_is_vector(p, shape) for p in self.module.parameters() for shape in self.shapes[:1])


def _is_vector(parameter: Tensor, shape: tuple[int, ...]) -> bool:
    if parameter.numel() <= max(shape, default=0):
        return True
    rank = parameter.ndim
    return rank <= len(shape) and all(p in (1, s) for p, s in zip(parameter.shape, shape[-rank:], strict=True))


def observe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Observation]:
    """Runs the model once and tells what it did with each of its modules.

    Random state, buffers and hooks are afterwards as they were before, also when the model raises. Layers of
    dynorm, and what is in them, are left out. The eval fast path of `torch.nn.TransformerEncoder` is off for
    the run: it would compute the norms without calling them.

    Args:
        model: The model, in train or eval mode; the mode is kept.
        args: Positional arguments of one call.
        kwargs: Keyword arguments of this call.

    Returns:
        An observation for every module, in the order in which they stand in the model.

    Raises:
        DataError: If the model raises on this input.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> [(seen.paths[0], seen.calls) for seen in observe(model, (torch.ones(2, 4),), {})]
        [('', 1), ('0', 1), ('1', 1)]
    """
    observations = _modules_to_watch(model)
    handles = _watch(observations)
    try:
        with undisturbed(model, (args, kwargs)):
            model(*args, **kwargs)
    except Exception as error:
        raise DataError(
            "the model could not be run on the example, which must be what its forward takes: "
            f"it raised {type(error).__name__}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return observations


def _modules_to_watch(model: nn.Module) -> list[Observation]:
    ours = {id(part) for m in model.modules() if getattr(m, "_dynorm_layer", False) for part in m.modules()}
    found: dict[int, Observation] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in ours:
            found.setdefault(id(module), Observation(module, [])).paths.append(path)
    return list(found.values())


def _watch(observations: list[Observation]) -> list[RemovableHandle]:
    returned = 0

    def hook_of(observation: Observation) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal returned
            if observation.calls == 0:
                observation.first = returned
                returned += 1
            _record(observation, args, kwargs, output)

        return hook

    return [o.module.register_forward_hook(hook_of(o), with_kwargs=True) for o in observations]


def _record(seen: Observation, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    seen.calls += 1
    seen.output_at = output.data_ptr() if _is_plain(output) else 0
    seen.problem = seen.problem or _problem(args, kwargs, output)
    if seen.problem is not None:
        return
    shape = tuple(args[0].shape)
    if shape not in seen.shapes:
        seen.shapes.append(shape)
    if seen.calls == 1 and output is not args[0]:
        _keep(seen, args[0], output)


def _problem(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str | None:
    extras = (*args[1:], *kwargs.values())
    if args and any(True for _ in tensors_in(extras)):
        return ANOTHER_TENSOR
    if extras or not args:
        return OTHER_ARGUMENTS
    if not (_is_plain(args[0]) and _is_plain(output)):
        return NOT_ONE_TENSOR
    return None if args[0].shape == output.shape else OTHER_SHAPE


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return False
    return value.is_floating_point() and value.ndim > 0 and value.numel() > 0


def _keep(seen: Observation, given: Tensor, output: Tensor) -> None:
    seen.dtype, seen.device = given.dtype, given.device
    halves = {torch.float16, torch.bfloat16} & {given.dtype, output.dtype}
    seen.rounded = bool(halves) or torch.is_autocast_enabled(given.device.type)
    if not seen.is_light():
        return
    for axes in candidate_axes(seen.module, tuple(given.shape)):
        part = tuple(slice(None) if axis in axes else slice(_KEPT) for axis in range(given.ndim))
        # Cloned at once: what follows in the model may write into either of them.
        seen.samples[axes] = (given[part].detach().clone(), output[part].detach().clone())
