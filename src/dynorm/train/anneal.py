"""Annealing: move a model step by step from its norms to point-wise functions."""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from torch import nn

from dynorm.arguments import check_count, check_share, require_gathered
from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import AnnealedNorm
from dynorm.replace.converted import dynorm_layers, replaced_by
from dynorm.replace.swap import swap_, take_over_
from dynorm.site import any_match, as_strings
from dynorm.wrappers import torch_classes


def annealed_layers(model: nn.Module) -> dict[str, AnnealedNorm]:
    """Return the annealed layers of a model by their first path.

    Raises:
        ModelError: there is none.
    """
    layers = {}
    for path, layer in dynorm_layers(model).items():
        if isinstance(layer, AnnealedNorm):
            layers[path] = layer
    if not layers:
        raise ModelError(
            "the model must have annealed layers, but has none: call dynorm.convert_(model, sites, "
            "to='annealed') first"
        )
    return layers


def set_anneal_(
    model: nn.Module,
    t: float,
    *,
    only: str | Iterable[str] | None = None,
) -> None:
    """Move the annealed layers of a model between norm and point-wise function, in place.

    Args:
        model: a model converted with ``to="annealed"`` or ``to="annealed_linear"``; wrapped or
            compiled is fine.
        t: 0 is the norm each layer replaced, exactly, 1 the point-wise function.
        only: globs of the paths of the layers to move; None means all.

    Raises:
        ArgumentError: ``t`` is outside [0, 1], or a glob matches no annealed layer.
        ModelError: the model has no annealed layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> x = torch.randn(4, 8)
        >>> before = model(x)
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, x), to="annealed")
        >>> torch.equal(model(x), before)
        True
        >>> dynorm.set_anneal_(model, 0.3)
        >>> model[1].position
        0.3

    Reference:
        Closed form 4: DyISRU with the right constants for each token is the norm; with learned
        constants it needs no statistics.
    """
    layers = annealed_layers(model)
    check_share("t", t)
    globs = ["*"] if only is None else as_strings(only)
    for glob in globs:
        if not any_match(layers, [glob]):
            raise ArgumentError(
                f"the glob {glob!r} must match the path of an annealed layer, but matches none of "
                f"{', '.join(layers)}"
            )
    for path, layer in layers.items():
        if any_match([path], globs):
            layer.set_t_(t)


def finalize_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """Replace annealed layers at t = 1 by plain point-wise ones, in place.

    The new layers hold the same parameters as the old ones, so an optimizer need not change.

    Args:
        model: a model converted with ``to="annealed"`` or ``to="annealed_linear"``.
        force: do it at any t. The rest of the norms is then lost at once: the outputs change as
            much as with :func:`set_anneal_` to 1.

    Returns:
        The same model.

    Raises:
        ModelError: the model has no annealed layer, is one itself, or is sharded by FSDP2; or a
            layer is not at t = 1 and ``force`` is not set.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)), to="annealed")
        >>> dynorm.set_anneal_(model, 1.0)
        >>> type(dynorm.finalize_(model)[1]).__name__
        'DyISRU'
    """
    layers = annealed_layers(model)
    require_gathered(model)
    early = {path: layer.position for path, layer in layers.items() if layer.position < 1}
    if early and not force:
        path, t = next(iter(early.items()))
        raise ModelError(
            f"every layer must be at t = 1 to be finalized, but {len(early)} of {len(layers)} are "
            f"not ({path!r} is at {t:g}): train on to the end of the annealing, or pass "
            "force=True, which removes the rest of the norms at once and changes the outputs as "
            "dynorm.set_anneal_(model, 1.0) does"
        )
    if "" in layers:
        raise ModelError(
            "a layer must have a parent to be replaced in, but the model is the layer: call its "
            "end()"
        )
    if any("FSDPModule" in torch_classes(module) for module in model.modules()):
        raise ModelError(
            "the model must not be sharded by FSDP2, which would lose track of the new layers: it "
            "is point-wise already; gather its state dict, load it into an unsharded copy, and "
            "finalize that"
        )
    ends = {layer: layer.end() for layer in layers.values()}
    for layer, end in ends.items():
        take_over_(end, layer, replaced_by(layer))
    swap_(model, ends)
    return model


@dataclass(frozen=True)
class AnnealSchedule:
    """The t of the annealed layers at each step of training: from 0 to 1 in a straight line.

    Args:
        start: the last step at t = 0, whose activations set the constants; a float is a share of
            the run, up to 1.
        length: how many steps t takes from 0 to 1; a float is a share of the run. t = 1 from
            ``start + length`` on.

    Raises:
        ArgumentError: ``start`` or ``length`` is not a number, negative, or a share above 1; or
            ``length`` is 0.

    Example:
        >>> schedule = AnnealSchedule(start=0.6, length=0.3)
        >>> [round(schedule.at(step, 100), 2) for step in (0, 60, 75, 90, 99)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """

    start: float = 0.6
    length: float = 0.3

    def __post_init__(self) -> None:
        if not (_is_steps(self.start) and _is_steps(self.length) and self.length > 0):
            raise ArgumentError(
                "start and length must be steps (integers) or shares of the run (floats from 0 to "
                f"1), and length positive, got {self.start!r} and {self.length!r}"
            )

    def steps(self, total: int) -> tuple[int, int]:
        """Return start and length in steps of a run that has ``total`` steps.

        Raises:
            ArgumentError: ``total`` is not a number of steps; or t would not reach 1 before the
                last step.
        """
        if not (_is_steps(total) and isinstance(total, Integral)):
            raise ArgumentError(
                f"a run must have a number of steps, got {total!r}: pass their total number"
            )
        start = _in_steps(self.start, total)
        length = max(_in_steps(self.length, total), 1)
        if start + length >= total:
            raise ArgumentError(
                f"the annealing must end before the run does, but step {start} + {length} steps >= "
                f"{total}: start earlier, make it shorter, or train longer"
            )
        return start, length

    def at(self, step: int, total: int) -> float:
        """Return t at a step of ``total``, counted from 0."""
        start, length = self.steps(total)
        check_count("step", step, 0)
        progress = (step - start) / length
        return min(max(progress, 0.0), 1.0)

    def apply_(self, model: nn.Module, step: int, total: int) -> None:
        """Set the t of a model's annealed layers for a step; call it in your training loop.

        Raises:
            ArgumentError: the schedule does not fit the run, or ``step`` is not a number of steps.
            ModelError: the model has no annealed layer.
        """
        layers = annealed_layers(model)
        t = self.at(step, total)
        for layer in layers.values():
            layer.set_t_(t)


def _is_steps(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    if isinstance(value, Integral):
        return int(value) >= 0
    return 0 <= float(value) <= 1


def _in_steps(value: float, total: int) -> int:
    if isinstance(value, Integral):
        return int(value)
    return round(value * total)
