"""Models of transformers with point-wise layers, in programs that do not know dynorm.

``save(remote_code=True)`` copies this file and the layers' own next to a model: pass
``trust_remote_code=True`` to ``from_pretrained``. config.json lists the layers under "dynorm".
"""

from typing import Any

from torch import nn

from dynorm.layers.derf import Derf
from dynorm.layers.dyisru import DyISRU
from dynorm.layers.dyt import DyT
from dynorm.layers.linear import LinearControl
from dynorm.layers.rmsnorm import RMSNorm

# config.json has this key and value, and the configuration below removes it. If the model is loaded
# without this file, transformers takes the value for the name of a file, and quotes it in its
# error. Otherwise it would load the model with norms, and only warn.
BARRIER = "transformers_weights"
ADVICE = "pass trust_remote_code=True: only modeling_dynorm.py knows the layers of this model"


class RootMeanSquare(RMSNorm):
    """RMSNorm: some programs replace any class by theirs if its name ends so."""


LAYERS: dict[str, Any] = {
    "dyisru": DyISRU,
    "linear": LinearControl,
    "dyt": DyT,
    "derf": Derf,
    "rmsnorm": RootMeanSquare,
    "identity": nn.Identity,
}


class PointwiseConfig:
    """The part of a configuration that removes the key, and writes it again."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration without the key."""
        values = dict(config_dict)
        values.pop(BARRIER, None)
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the configuration with the key."""
        setattr(self, BARRIER, ADVICE)
        try:
            super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
        finally:
            delattr(self, BARRIER)


class PointwiseModel:
    """The part of a model that puts the layers of its configuration in the place of its norms."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        changes = config.dynorm
        if type(self).__name__ == changes["model"]:
            _put_layers_(self, changes, "")
        elif changes["base"]:
            # The base model of a model with a head.
            _put_layers_(self, changes, changes["base"])


def _put_layers_(model: Any, changes: dict[str, Any], prefix: str) -> None:
    """Put the layers and the added biases below a prefix into a model that is not loaded yet."""
    for entry in changes["layers"]:
        paths = [path.removeprefix(prefix) for path in entry["paths"] if path.startswith(prefix)]
        layer = LAYERS[entry["layer"]](**entry["config"])
        for path in paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer)
        # The parameters of a layer with several paths are saved once.
        for path in paths[1:]:
            for name, _ in layer.named_parameters():
                model.all_tied_weights_keys[f"{path}.{name}"] = f"{paths[0]}.{name}"
    for path in changes["biases"]:
        if path.startswith(prefix):
            linear = model.get_submodule(path.removeprefix(prefix))
            # The first axis of a weight is that of the outputs, unless a convolution is transposed.
            outputs = getattr(linear, "out_channels", None) or linear.out_features
            linear.bias = nn.Parameter(linear.weight.new_zeros(outputs))
