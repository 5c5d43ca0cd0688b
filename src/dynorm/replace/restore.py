"""Put the norms of a converted model back."""

from torch import Tensor, nn

from dynorm.errors import ModelError, listed
from dynorm.find.affine import affine_parts
from dynorm.guard import require_plain_model
from dynorm.replace.converted import dynorm_layers, is_ours, replaced_by
from dynorm.replace.swap import original_, swap_


def restore_(model: nn.Module) -> nn.Module:
    """Put the original norms back, bit for bit: undo :func:`convert_` and :func:`calibrate_`.

    Args:
        model: a converted model. Its other weights are not changed back after training.

    Returns:
        The same model.

    Raises:
        ModelError: the model has no point-wise layer, or one whose norm is not known: it was
            loaded, distilled, folded or sharded; or it is compiled, wrapped or offloaded.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> type(dynorm.restore_(model)[1]).__name__
        'LayerNorm'
    """
    require_plain_model(model)
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must be converted, but it has no point-wise layer: there is nothing to "
            "restore"
        )
    originals: dict[nn.Module, nn.Module] = {}
    shared: dict[Tensor, Tensor] = {}
    lost = []
    for path, module in model.named_modules():
        replaced = replaced_by(module)
        if replaced is None:
            if path in layers or is_ours(module):
                lost.append(path)
            continue
        layer = layers[path]
        norm = original_(layer).train(layer.training)
        originals[layer] = norm
        for name, part in affine_parts(norm, replaced.site).items():
            shared[getattr(layer, name)] = part.tensor
    if lost:
        raise ModelError(
            f"the original norms must be known, but those of {listed(lost)} are not: the model was "
            "loaded, distilled, folded or sharded, or built with these layers; load the original "
            "model instead"
        )
    swap_(model, {**originals, **shared})
    return model
