"""What a fold leaves on the modules that it gave a parameter of their own, for saving to find."""

from __future__ import annotations

from torch import nn

ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"


def added_biases(model: nn.Module) -> list[str]:
    """Return the paths of the modules that got a bias.

    Example:
        >>> added_biases(nn.Linear(2, 2))
        []
    """
    return [path for path, module in model.named_modules() if module.__dict__.get(ADDED_BIAS)]


def untied(model: nn.Module) -> list[str]:
    """Return the names of the parameters that were tied to others.

    Example:
        >>> untied(nn.Linear(2, 2))
        []
    """
    found = []
    for path, module in model.named_modules():
        found += [f"{path}.{name}" if path else name for name in module.__dict__.get(UNTIED, ())]
    return found
