"""The start of annealing: constants from the activations of a training step, alike on all ranks."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.arguments import require_gathered
from dynorm.batches import site_tokens, token_masks
from dynorm.errors import DataError, ModelError
from dynorm.fit.site_fit import LEAST_BETA
from dynorm.fit.witnesses import TokenScales
from dynorm.layers import AnnealedNorm
from dynorm.ranks import Ranks
from dynorm.theory import own_betas
from dynorm.train.anneal import annealed_layers
from dynorm.wrappers import gathered


@dataclass
class _Sums:
    """Sums over the tokens at one layer, each of one value per channel."""

    counts: Tensor
    log_betas: Tensor
    inputs: Tensor


class AnnealStart:
    r"""Watch the annealed layers of a model, and then set their constants in closed form.

    .. math:: \log \beta = \langle \log b_i \rangle, \quad c = \langle x_i \rangle

    with :math:`b_i = C v_i + C^2 \varepsilon / (C - 1)` for LayerNorm or
    :math:`s_i + C \varepsilon` for RMSNorm (whose centre is 0). The means are over all tokens that
    the layer sees until :meth:`finish_`, on all ranks. With one constant per channel, each channel
    takes its mean over the tokens. A layer with witnesses gets their gains and its constant by
    least squares (:class:`dynorm.fit.witnesses.TokenScales`), and the centre 0.

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
        >>> model = nn.Sequential(dynorm.layers.AnnealedDyISRU(64, center=True))
        >>> with AnnealStart(model):
        ...     _ = model(3 + 2 * torch.randn(100, 64))
        >>> 3 * 64 < model[0].beta().item() < 5 * 64
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {layer: path for path, layer in annealed_layers(model).items()}
        require_gathered(model)
        self._ranks = Ranks()
        self._sums: dict[AnnealedNorm, _Sums] = {}
        self._scales: dict[AnnealedNorm, TokenScales] = {}
        for layer in self._paths:
            zeros = torch.zeros(layer.channels, dtype=torch.float64, device=layer.t.device)
            self._sums[layer] = _Sums(zeros, zeros.clone(), zeros.clone())
            if layer.witness_channels:
                self._scales[layer] = TokenScales(
                    layer.kind, layer.norm_eps, self._ranks, fixed=layer.witness_channels
                )
        self._masks: list[Tensor] = []
        # The modules that are running, and the one whose masks hold for all that it calls.
        self._running: list[nn.Module] = []
        self._owner: nn.Module | None = None
        self._watching = True
        # A graph that was compiled before does not call these hooks: the model runs eagerly until
        # they are removed.
        self._stance = torch.compiler.set_stance("force_eager")
        self._handles = []
        # Masks are looked for in all modules: the arguments of a LightningModule or a wrapper do
        # not say which module is its model.
        for module in model.modules():
            if module in self._paths:
                handle = module.register_forward_hook(self._add, prepend=True)
            else:
                handle = module.register_forward_hook(self._leave, always_call=True)
                self._handles.append(
                    module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
                )
            self._handles.append(handle)

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
        if self._watching:
            self._watching = False
            self._stance.__exit__(None, None, None)
            for handle in self._handles:
                handle.remove()

    def finish_(self) -> None:
        """Stop watching, and set the constants from the activations so far of all ranks.

        Call it on every rank.

        Raises:
            DataError: a layer was not reached, or its activations are not finite, or another rank
                failed or has other layers; then no constant is changed.
            ModelError: it was finished or cancelled before.
        """
        with self._ranks.sharing_errors():
            if not self._watching:
                raise ModelError(
                    "an AnnealStart can be finished once, but this one is over: make another"
                )
            self.cancel_()
            self._set_constants_()

    def _set_constants_(self) -> None:
        constants = {}
        for layer, sums in self._sums.items():
            path = self._paths[layer]
            # Notice a rank that failed, or has other layers, before the sums.
            self._ranks.require_same_place(path)
            sums_here = torch.stack([sums.counts, sums.log_betas, sums.inputs])
            totals = self._ranks.summed(sums_here)
            counts = totals[0]
            problem = ""
            if counts.min() == 0:
                problem = "none: run a training step in it, or look for a layer that is not used"
            elif not totals.isfinite().all():
                problem = "NaN or inf: look for an overflow"
            if problem:
                raise DataError(
                    "AnnealStart must see finite activations at every norm, but "
                    f"{path!r} saw {problem}"
                )
            shape = layer.normalized_shape
            if not layer.per_channel:
                totals = totals.sum(1, keepdim=True)
                shape = (1,)
            counts, log_betas, inputs = totals
            beta = (log_betas / counts).exp().reshape(shape)
            center = (inputs / counts).reshape(shape)
            constants[layer] = (beta, center)
        for layer, (beta, center) in constants.items():
            if layer in self._scales:
                fit = self._scales[layer].choose()
                least = LEAST_BETA * float(beta.mean())
                beta = beta.new_tensor([max(fit.beta, least)])
                layer.fill_gains_(beta.new_tensor(fit.gains))
            if layer in self._scales or layer.kind == "rmsnorm":
                center = torch.zeros_like(center)
            layer.fill_constants_(beta, center)

    def _enter(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        masks = []
        if self._owner is None:
            masks = token_masks(_named(module, args, kwargs))
        if masks:
            self._owner = module
        # At the outermost call the masks of the call before are forgotten.
        if masks or not self._running:
            self._masks = masks
        self._running.append(module)

    def _leave(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        output: object,
    ) -> None:
        # A module that raised may have left others on the stack.
        while self._running and self._running.pop() is not module:
            pass
        if self._owner is module:
            self._owner = None

    def _add(
        self,
        layer: AnnealedNorm,
        args: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        # Inside a backward pass, activation checkpointing runs the layer again: it was counted
        # before. torch has no public function for this.
        if torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            x = site_tokens(layer, args[0].detach(), self._masks).double()
            beta = own_betas(x, layer.kind, layer.norm_eps)
            # It is 0 if all other channels are equal and there is no eps: any constant fits then.
            counts = (beta != 0).to(x)
            log_beta = beta.where(beta != 0, 1.0).log()
            sums = self._sums[layer]
            sums.counts += counts.sum(0)
            sums.log_betas += log_beta.sum(0)
            sums.inputs += (x * counts).sum(0)
            if layer in self._scales:
                self._scales[layer].update(x)


def require_same_anneal(model: nn.Module) -> None:
    """Check that all ranks have the same annealed layers, t and constants.

    Raises:
        ModelError: a rank differs; it is raised on every rank.
    """
    ranks = Ranks(error=ModelError)
    with ranks.sharing_errors():
        layers = annealed_layers(model)
        require_gathered(model)
        forms = []
        constants = []
        for path, layer in layers.items():
            parameters = layer.constant_parameters()
            shapes = [p.shape for p in parameters]
            forms.append((path, type(layer).__name__, shapes))
            constants += parameters
        # Forms first: only ranks with the same shapes can gather sharded values.
        ranks.require_same(forms)
        values = (gathered(constant.detach()) for constant in constants)
        # set_to and not the buffer t, which DistributedDataParallel has made equal on all ranks.
        positions = [layer.set_to for layer in layers.values()]
        ranks.require_same(positions, values, "t and the same constants")


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
