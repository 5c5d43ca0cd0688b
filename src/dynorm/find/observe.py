"""One watched run of a model: which modules were called, with what, and with what result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.errors import DataError
from dynorm.find.recover import candidate_axes
from dynorm.watch import undisturbed

ANOTHER_TENSOR = "takes another tensor along: gated or adaptive"
OTHER_ARGUMENTS = "other arguments: a point-wise layer takes one tensor, by position"
NOT_ONE_TENSOR = "not tensor to tensor: it does not take and return one floating-point tensor"
OTHER_SHAPE = "another shape: its output is not shaped as its input"

# How much is kept of every axis but the channels', for the last check.
_KEPT = 2


@dataclass
class Observation:
    """One module, as a run showed it.

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
        """Return whether every parameter could be the scale or the shift of a norm: no matrices."""

        def fits(p: Tensor, shape: tuple[int, ...]) -> bool:
            tail = zip(p.shape, shape[-p.ndim :], strict=False)
            return p.numel() <= max(shape) or (p.ndim <= len(shape) and all(own in (1, size) for own, size in tail))

        return all(fits(p, shape) for p in self.module.parameters() for shape in self.shapes[:1])

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take down one call."""
        self.calls += 1
        self.output_at = output.data_ptr() if _is_plain(output) else 0
        self.problem = self.problem or _problem(args, kwargs, output)
        if self.problem is not None:
            return
        given = args[0]
        if tuple(given.shape) not in self.shapes:
            self.shapes.append(tuple(given.shape))
        if self.calls > 1 or output is given:
            return
        self.dtype, self.device = given.dtype, given.device
        halves = {torch.float16, torch.bfloat16} & {given.dtype, output.dtype}
        self.rounded = bool(halves) or torch.is_autocast_enabled(given.device.type)
        for axes in candidate_axes(self.module, tuple(given.shape)) if self.is_light() else []:
            part = tuple(slice(None) if axis in axes else slice(_KEPT) for axis in range(given.ndim))
            # Cloned at once: later parts of the model may write into either of them.
            self.samples[axes] = (given[part].detach().clone(), output[part].detach().clone())


def _problem(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str | None:
    extras = (*args[1:], *kwargs.values())
    if args and any(isinstance(leaf, Tensor) for leaf in tree_leaves(extras)):
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


def observe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Observation]:
    """Run the model once and watch each of its modules; nothing of the run stays, also when the model raises.

    Layers of dynorm, and the modules in them, are left out.

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
    ours = {id(part) for m in model.modules() if getattr(m, "_dynorm_layer", False) for part in m.modules()}
    found: dict[int, Observation] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) not in ours:
            found.setdefault(id(module), Observation(module, [])).paths.append(path)
    returned = itertools.count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = found[id(module)]
        seen.first = seen.first if seen.calls else next(returned)
        seen.record(args, kwargs, output)

    handles = [seen.module.register_forward_hook(hook, with_kwargs=True) for seen in found.values()]
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
    return list(found.values())
