"""The beginning of the annealing: constants from the activations of one training step, the same on every rank."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import require_gathered
from dynorm.batches import site_tokens, token_masks
from dynorm.errors import DataError, ModelError
from dynorm.fit.site_fit import LEAST
from dynorm.fit.witnesses import TokenScales
from dynorm.layers import AnnealedNorm
from dynorm.layers.base import gathered
from dynorm.ranks import Ranks
from dynorm.theory import own_betas
from dynorm.train.anneal import annealed_layers


class AnnealStart:
    r"""Watch the annealed layers of a model, and then set their constants in closed form.

    .. math:: \log \beta = \langle \log b_i \rangle, \quad c = \langle x_i \rangle

    with :math:`b_i = C v_i + C^2 \varepsilon / (C - 1)` of LayerNorm or :math:`s_i + C \varepsilon`
    of RMSNorm (whose centre is 0), over all tokens that go by until :meth:`finish_`, on all ranks.
    With one constant per channel, each channel takes its own mean. A layer with witnesses gets
    their gains, and the constant beside them, by least squares
    (:class:`dynorm.fit.witnesses.TokenScales`), and the centre 0.

    Padding is left out where a module of the model is called with a mask of two dimensions under
    its usual name (``attention_mask``, ``src_key_padding_mask``, ...), by keyword, by position or
    in a dict.

    As a context it finishes at the end; if an error is raised inside, it stops watching and changes
    nothing.

    Args:
        model: with annealed layers.

    Raises:
        ModelError: it has none, or only the placeholders of DeepSpeed's ZeRO-3.

    Example:
        >>> model = nn.Sequential(dynorm.AnnealedDyISRU(64, center=True))
        >>> with AnnealStart(model):
        ...     _ = model(3 + 2 * torch.randn(100, 64))
        >>> 3 * 64 < model[0].beta().item() < 5 * 64
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {layer: path for path, layer in annealed_layers(model).items()}
        require_gathered(model)
        self._ranks = Ranks()
        self._sums = {
            layer: torch.zeros(3, layer.channels, dtype=torch.float64, device=layer.t.device)
            for layer in self._paths
        }
        witnessed = [layer for layer in self._paths if layer.witness_channels]
        self._scales = {
            layer: TokenScales(layer.kind, layer.norm_eps, layer.witness_channels, self._ranks)
            for layer in witnessed
        }
        self._masks: list[Tensor] = []
        # The modules that are running, and the one whose masks hold for all that it calls.
        self._running: list[nn.Module] = []
        self._owner: nn.Module | None = None
        self._watching = True
        # A graph that was compiled before knows nothing of these hooks; until they are gone the
        # model runs eagerly.
        self._stance = torch.compiler.set_stance("force_eager")
        self._handles = [
            layer.register_forward_hook(self._add, prepend=True) for layer in self._paths
        ]
        # All of them: the arguments of a LightningModule or a wrapper do not say which module is
        # its model.
        for module in model.modules():
            if module not in self._paths:
                enter = module.register_forward_pre_hook(
                    self._enter, with_kwargs=True, prepend=True
                )
                self._handles += [
                    enter,
                    module.register_forward_hook(self._leave, always_call=True),
                ]

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
        """Stop watching, and change nothing; a second call does nothing."""
        if self._watching:
            self._watching = False
            self._stance.__exit__(None, None, None)
            for handle in self._handles:
                handle.remove()

    def finish_(self) -> None:
        """Set the constants from the activations so far, of all ranks, and stop watching; call it on every rank.

        Raises:
            DataError: a layer was not reached, or its activations are not finite, or another rank
                failed or has other layers; no constant is changed then.
            ModelError: it is over already, finished or cancelled.
        """
        with self._ranks.sharing_errors():
            if not self._watching:
                raise ModelError(
                    "an AnnealStart can be finished once, but this one is over: make another"
                )
            self.cancel_()
            self._set_constants_()

    def _set_constants_(self) -> None:
        found = {}
        for layer, sums in self._sums.items():
            # A rank that has failed, or has other layers, is noticed before the sums.
            self._ranks.require_same_place(self._paths[layer])
            counts, log_betas, inputs = self._ranks.summed(sums)
            if not bool(sums.isfinite().all() and counts.min() > 0):
                unused = "none: run a training step inside AnnealStart, or look for a layer that is not used"
                raise DataError(
                    "the annealing must begin with finite activations at every norm, but "
                    f"{self._paths[layer]!r} saw "
                    f"{'NaN or inf: look for an overflow' if counts.min() > 0 else unused}"
                )
            if not layer.per_channel:
                counts, log_betas, inputs = sums.sum(1, keepdim=True)
            shape = layer.normalized_shape if layer.per_channel else (1,)
            found[layer] = (
                (log_betas / counts).exp().reshape(shape),
                (inputs / counts).reshape(shape),
            )
        for layer, (beta, center) in found.items():
            if layer in self._scales:
                told = self._scales[layer].choose(0)
                beta, center = (
                    beta.new_tensor([max(told.beta, LEAST * float(beta.mean()))]),
                    torch.zeros_like(center),
                )
                layer.fill_gains_(beta.new_tensor(told.gains))
            layer.fill_constants_(
                beta, torch.zeros_like(center) if layer.kind == "rmsnorm" else center
            )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = [] if self._owner is not None else token_masks(_named(module, args, kwargs))
        if found:
            self._owner = module
        if found or not self._running:
            self._masks = found
        self._running.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # One that raised may have left others on the list.
        while self._running and self._running.pop() is not module:
            pass
        if self._owner is module:
            self._owner = None

    def _add(self, layer: AnnealedNorm, args: tuple[Any, ...], output: Tensor) -> None:
        # Run again for its gradients, as activation checkpointing lets it; it was counted. No
        # public way tells.
        if torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            x = site_tokens(layer, args[0].detach(), self._masks).double()
            beta = own_betas(x, layer.kind, layer.norm_eps)
            # Where all other channels are the same and there is no eps, every constant would do.
            counts = (beta != 0).to(x)
            sums = torch.stack(
                [counts.sum(0), beta.where(beta != 0, 1.0).log().sum(0), (x * counts).sum(0)]
            )
            self._sums[layer] += sums
            if layer in self._scales:
                self._scales[layer].update(x)


def require_same_anneal(model: nn.Module) -> None:
    """Check that every rank has the same annealed layers, t and constants; ModelError on every rank if one differs."""
    ranks = Ranks(error=ModelError)
    with ranks.sharing_errors():
        layers = annealed_layers(model)
        require_gathered(model)
        constants = {path: layer.constant_parameters() for path, layer in layers.items()}
        forms = [
            (path, type(layers[path]).__name__, [p.shape for p in own])
            for path, own in constants.items()
        ]
        # Forms first: sharded values are gathered, which only ranks of the same shapes can do.
        ranks.require_same(forms)
        # set_to and not the buffer t, which DistributedDataParallel has made the same on all ranks.
        values = (gathered(value.detach()) for own in constants.values() for value in own)
        ranks.require_same(
            [layer.set_to for layer in layers.values()], values, "t and the same constants"
        )


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a module's arguments by name: keywords, positional ones, and the entries of a dict among them."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    # A forward without a readable signature, or a call that will fail anyway.
    except (TypeError, ValueError):
        bound = dict(kwargs)
    inner = [value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)]
    return {name: value for each in (*inner, bound, kwargs) for name, value in each.items()}
