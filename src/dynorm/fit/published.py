"""The starts that the authors of DyT and Derf published, for layers of scale 1."""

from fnmatch import fnmatchcase

import torch
from torch import nn

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import Derf, DyT, PointwiseNorm
from dynorm.replace.converted import require_layers

# DyT's alpha in language models, by width: in front of attention, and at all other sites.
_OF_LANGUAGE_MODELS = {4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


@torch.inference_mode(False)
def init_as_published_(model: nn.Module, *, attention: str | None = None) -> dict[str, float]:
    r"""Set the constants of DyT and Derf as their authors do, for training from the first step.

    .. math:: y = w \tanh(\alpha x) + b \quad\text{or}\quad y = w\,\mathrm{erf}(\alpha x + s) + b

    The scale becomes 1, the shift s of Derf 0, and alpha 0.5, except in language models of three
    widths, where DyT has two alphas: at 4,096 channels 0.8 in front of attention and 0.2 elsewhere,
    at 5,120 channels 0.6 and 0.15, at 8,192 channels 0.2 and 0.05. Weights and biases stay.

    It is for repeating published runs: :func:`dynorm.init_from_batch_` measures the constants, and
    is far ahead in small models. Call this before the optimizer is made.

    Args:
        model: a model whose point-wise layers are DyT and Derf.
        attention: a glob for the paths of the layers in front of attention, such as
            "\*.input_layernorm". DyT needs it at the three widths.

    Returns:
        The alphas, by path.

    Raises:
        ModelError: the model has no point-wise layer, or another than DyT and Derf.
        ArgumentError: ``attention`` is needed, or matches no layer.

    Example:
        >>> model = nn.Sequential(dynorm.DyT(8), nn.Linear(8, 4096), dynorm.DyT(4096))
        >>> dynorm.init_as_published_(model, attention="0")
        {'0': 0.5, '2': 0.2}

    Reference:
        J. Zhu et al., arXiv 2503.10622, section 7; M. Chen et al., arXiv 2512.10938.
    """
    layers = require_layers(model)
    if attention is not None and not (
        isinstance(attention, str) and any(fnmatchcase(path, attention) for path in layers)
    ):
        raise ArgumentError(
            "attention must be a glob, and match the path of a layer, such as "
            f"{next(iter(layers))!r}, got {attention!r}"
        )
    alphas = {}
    for path, layer in layers.items():
        if type(layer) not in (DyT, Derf):
            raise ModelError(
                f"every point-wise layer must be DyT or Derf, but {path!r} is "
                f"{type(layer).__name__}: call dynorm.init_from_batch_, which sets them all"
            )
        alphas[path] = _alpha(layer, path, attention)
    for path, layer in layers.items():
        layer.scale = 1.0
        layer.fill_constants_(layer.slope_ratio / alphas[path] ** 2)
    return alphas


def _alpha(layer: PointwiseNorm, path: str, attention: str | None) -> float:
    """Return the published alpha of a layer."""
    if isinstance(layer, Derf) or layer.channels not in _OF_LANGUAGE_MODELS:
        return 0.5
    if attention is None:
        raise ArgumentError(
            f"attention must be given for DyT with {layer.channels} channels, as {path!r} has: a "
            "glob for the paths of the layers in front of attention"
        )
    before_attention, elsewhere = _OF_LANGUAGE_MODELS[layer.channels]
    if fnmatchcase(path, attention):
        return before_attention
    return elsewhere
