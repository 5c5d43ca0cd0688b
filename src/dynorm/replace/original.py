"""Run a converted model with its old norms, and record what the norms or the layers give."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dynorm.batches import call
from dynorm.guard import hooked, undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.replace.specs import original_forward, require_layers

Outputs = dict[PointwiseNorm, list[Tensor]]


def norm_outputs(model: nn.Module, batch: Any) -> Outputs:
    """Run a batch through the original model and return its norms' outputs, a list per layer in call order."""
    outputs: Outputs = defaultdict(list)
    # A copy: the model may go on to write into its own.
    run_norms(
        model,
        require_layers(model, with_norms=True).values(),
        batch,
        lambda layer, _, y: outputs[layer].append(y.clone()),
    )
    return outputs


def run_norms(
    model: nn.Module, norms: Iterable[nn.Module], batch: Any, see: Callable[..., object]
) -> Any:
    """Run a batch, without gradient, with the norm in the place of each layer; ``see`` gets each, its input and output.

    The random state comes back, so that a model which draws numbers draws the same ones when it is
    run again.
    """

    def hook(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(norm, PointwiseNorm):
            output = original_forward(norm, *args)
        see(norm, args[0] if args else next(iter(kwargs.values())), output)
        return output

    with undisturbed(model, batch), hooked(norms, hook, with_kwargs=True):
        return call(model, batch)


@contextmanager
def recorded(modules: Mapping[PointwiseNorm, nn.Module]) -> Iterator[Outputs]:
    """Record the outputs of each layer's module, itself or its counterpart: a list per layer, in call order."""
    outputs: Outputs = defaultdict(list)
    layers = {module: layer for layer, module in modules.items()}

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs[layers[module]].append(output.clone())

    with hooked(layers, keep):
        yield outputs
