"""Annealing: move a model step by step from its norms to point-wise functions."""

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.arguments import check_count, check_share, require_gathered
from dynorm.batches import site_tokens, token_masks
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.guard import require_plain_model
from dynorm.layers import AnnealedNorm
from dynorm.replace.converted import dynorm_layers, replaced_by, warn_of_defaults
from dynorm.replace.swap import swap_, take_over_
from dynorm.theory import exact_beta


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


def set_anneal_(model: nn.Module, t: float) -> None:
    """Move the annealed layers of a model between norm and point-wise function, in place.

    Args:
        model: a model converted with ``to="annealed"``, or towards another layer, such as
            ``to="annealed_dyt"``; wrapped or compiled is fine.
        t: 0 is the norm each layer replaced, exactly, 1 the point-wise function.

    Raises:
        ArgumentError: ``t`` is outside [0, 1].
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
        Closed forms 2 and 3: DyISRU with the right constants for each token is the norm, so the ends
        differ only in the constants.
    """
    layers = annealed_layers(model)
    check_share("t", t)
    for layer in layers.values():
        layer.set_t_(t)


def finalize_(model: nn.Module) -> nn.Module:
    """Replace annealed layers at t = 1 by plain point-wise ones, in place.

    The new layers hold the same parameters as the old ones, so an optimizer need not change.

    Args:
        model: a model converted with ``to="annealed"``, or towards another layer.

    Returns:
        The same model.

    Raises:
        ModelError: the model has no annealed layer, is one itself, or is wrapped, compiled,
            sharded or offloaded; or a layer is not at t = 1.

    Warns:
        CalibrationWarning: layers have default constants: :class:`AnnealStart` sets them.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)), to="annealed")
        >>> with AnnealStart(model):
        ...     _ = model(torch.randn(4, 8))
        >>> dynorm.set_anneal_(model, 1.0)
        >>> type(dynorm.finalize_(model)[1]).__name__
        'DyISRU'
    """
    layers = annealed_layers(model)
    require_plain_model(model)
    require_gathered(model)
    early = {path: layer.position for path, layer in layers.items() if layer.position < 1}
    if early:
        path, t = next(iter(early.items()))
        raise ModelError(
            f"every layer must be at t = 1 to be finalized, but {len(early)} of {len(layers)} are "
            f"not ({path!r} is at {t:g}): train on to the end of the annealing, or call "
            "dynorm.set_anneal_(model, 1.0) first, which removes the rest of the norms at once and "
            "changes the outputs"
        )
    if "" in layers:
        raise ModelError(
            "a layer must have a parent to be replaced in, but the model is the layer: call its "
            "end()"
        )
    for path, layer in layers.items():
        layer.require_stored(path)
    ends = {layer: layer.end() for layer in layers.values()}
    for layer, end in ends.items():
        take_over_(end, layer, replaced_by(layer))
    swap_(model, ends)
    warn_of_defaults(model)
    return model


@dataclass(frozen=True)
class AnnealSchedule:
    """The t of the annealed layers at each step of training: from 0 to 1 in a straight line.

    Args:
        start: the share of the run at t = 0; the activations of the last of these steps set the
            constants.
        length: the share of the run in which t rises to 1. t = 1 from ``start + length`` on.

    Raises:
        ArgumentError: ``start`` or ``length`` is not a number from 0 to 1.

    Example:
        >>> schedule = AnnealSchedule(start=0.6, length=0.3)
        >>> [round(schedule.at(step, 100), 2) for step in (0, 60, 75, 90, 99)]
        [0.0, 0.0, 0.5, 1.0, 1.0]
    """

    start: float = 0.6
    length: float = 0.3

    def __post_init__(self) -> None:
        check_share("start", self.start)
        check_share("length", self.length)

    def steps(self, total: int) -> tuple[int, int]:
        """Return start and length in steps of a run that has ``total`` steps.

        Raises:
            ArgumentError: ``total`` is not a number of steps; or t would not reach 1 before the
                last step.
        """
        check_count("total", total)
        start = round(self.start * total)
        length = max(round(self.length * total), 1)
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


class AnnealStart:
    r"""Watch the annealed layers of a model, and then set their constants in closed form.

    .. math:: \log \beta = \langle \log b_i \rangle

    with :math:`b_i = C v_i + C^2 \varepsilon / (C - 1)` for LayerNorm or
    :math:`s_i + C \varepsilon` for RMSNorm. The mean is over all channels and all tokens that the
    layer sees until :meth:`finish_`, on all ranks. K witnesses, whose gains are 1 at first, take
    their share K / C of beta.

    Padding is left out if a module of the model is called with a two-dimensional mask under its
    usual name (``attention_mask``, ``src_key_padding_mask``, ...), by keyword, by position or in a
    dict.

    Used as a context manager, it finishes at the end; if an error is raised inside, it stops
    watching and changes nothing.

    Args:
        model: a model with annealed layers.

    Raises:
        ModelError: it has none, or only the placeholders of DeepSpeed's ZeRO-3.

    Example:
        >>> model = nn.Sequential(dynorm.layers.AnnealedDyISRU(64))
        >>> with AnnealStart(model):
        ...     _ = model(3 + 2 * torch.randn(100, 64))
        >>> 3 * 64 < model[0].beta().item() < 5 * 64
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {layer: path for path, layer in annealed_layers(model).items()}
        require_gathered(model)
        # By layer how many b_i it has seen, and the sum of their logarithms.
        self._sums = {}
        for layer in self._paths:
            self._sums[layer] = torch.zeros(2, dtype=torch.float64, device=layer.t.device)
        self._model = model
        self._masks: list[Tensor] = []
        # The module that was called with these masks.
        self._owner: nn.Module | None = None
        # A graph that was compiled before does not call these hooks: the model runs eagerly until
        # they are removed.
        self._stance = torch.compiler.set_stance("force_eager")
        self._handles = []
        # Masks are looked for in all modules: the arguments of a LightningModule or a wrapper do
        # not say which module is its model.
        for module in model.modules():
            if module in self._paths:
                self._handles.append(module.register_forward_hook(self._add, prepend=True))
            else:
                self._handles.append(
                    module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
                )

    def __enter__(self) -> "AnnealStart":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if kind is None:
            self.finish_()
        else:
            self.cancel_()

    def cancel_(self) -> None:
        """Stop watching and change nothing; a second call has no effect."""
        if self._handles:
            self._stance.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish_(self) -> None:
        """Stop watching, and set the constants from the activations so far of all ranks.

        Call it on every rank.

        Raises:
            DataError: a layer was not reached, or its activations are not finite; then no constant
                is changed.
            ModelError: it was finished or cancelled before.
        """
        if not self._handles:
            raise ModelError(
                "an AnnealStart can be finished once, but this one is over: make another"
            )
        self.cancel_()
        betas = {}
        for layer, sums in self._sums.items():
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(sums)
            betas[layer] = _beta(layer, sums, self._paths[layer])
        for layer, beta in betas.items():
            layer.fill_constants_(beta)

    def _enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if module in (self._model, self._owner):
            self._masks = []
        if not self._masks:
            self._masks = token_masks(_named(module, args, kwargs))
            self._owner = module if self._masks else None

    def _add(self, layer: AnnealedNorm, args: tuple[Tensor, ...], output: Tensor) -> None:
        # Inside a backward pass, activation checkpointing runs the layer again: it was counted
        # before. torch has no public function for this.
        if torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            x = site_tokens(layer, args[0].detach(), self._masks).double()
            beta = exact_beta(x, layer.kind, layer.norm_eps)
            # It is 0 if all other channels are equal and eps is 0: any constant fits then.
            is_known = beta != 0
            logarithms = beta.where(is_known, 1.0).log()
            self._sums[layer] += torch.stack([is_known.sum(), logarithms.sum()])


def _beta(layer: AnnealedNorm, sums: Tensor, path: str) -> float:
    """Return the beta of a layer from the sums over its tokens."""
    count, log_beta = sums.tolist()
    problem = ""
    if count == 0:
        problem = "none: run a training step in it, or look for a layer that is not used"
    elif not math.isfinite(log_beta):
        problem = "NaN or inf: look for an overflow"
    if problem:
        raise DataError(
            f"AnnealStart must see finite activations at every norm, but {path!r} saw {problem}"
        )
    return math.exp(log_beta / count) * (1 - len(layer.witness_channels) / layer.channels)


def _named(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of a module by name, with the entries of those that are dicts."""
    named: dict[str, object] = {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, Mapping):
            named.update(value)
    # The forward may have no readable signature, and a wrong call fails later by itself.
    with suppress(TypeError, ValueError):
        named.update(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    return named | kwargs
