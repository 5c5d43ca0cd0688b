"""Run a converted model with its old norms, and record the outputs of norms or layers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from dynorm.batches import Batch, call
from dynorm.guard import hooked, undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import require_layers
from dynorm.replace.swap import original_forward

Outputs = dict[PointwiseNorm, list[Tensor]]


def norm_outputs(model: nn.Module, batch: Batch) -> Outputs:
    """Run a batch with the original norms, and return their outputs by layer, in call order."""
    outputs: Outputs = defaultdict(list)

    def keep(layer: PointwiseNorm, _: Tensor, output: Tensor) -> None:
        # A copy: the model may write into its tensor later.
        outputs[layer].append(output.clone())

    run_norms(model, require_layers(model, with_norms=True).values(), batch, keep)
    return outputs


def run_norms(
    model: nn.Module,
    norms: Iterable[nn.Module],
    batch: Batch,
    see: Callable[..., object],
) -> object:
    """Run a batch without gradient, each layer replaced by its norm, and return the model's output.

    ``see`` is called with each of ``norms``, its input and its output. The random state is put
    back, so that a model which draws numbers draws the same ones in another run.
    """

    def hook(
        norm: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> object:
        if isinstance(norm, PointwiseNorm):
            output = original_forward(norm, *args)
        see(norm, args[0] if args else next(iter(kwargs.values())), output)
        return output

    with undisturbed(model, batch), hooked(norms, hook, with_kwargs=True):
        return call(model, batch)


@contextmanager
def recorded(modules: Mapping[PointwiseNorm, nn.Module]) -> Iterator[Outputs]:
    """Record the outputs of each layer's module, in call order; it may be the layer itself."""
    outputs: Outputs = defaultdict(list)
    layers = {module: layer for layer, module in modules.items()}

    def keep(
        module: nn.Module,
        args: tuple[object, ...],
        output: Tensor,
    ) -> None:
        outputs[layers[module]].append(output.clone())

    with hooked(layers, keep):
        yield outputs
