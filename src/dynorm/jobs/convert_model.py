"""The main job in one call: find, replace, calibrate, distil, measure."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dynorm.arguments import check_kind, check_module
from dynorm.batches import Batch, iterate
from dynorm.errors import ArgumentError, DataError, ModelError, require_library
from dynorm.jobs.stages import Data, convert_in_stages_
from dynorm.recipe import Recipe
from dynorm.replace.edits import is_changed
from dynorm.report import ModelReport

# The fields of a recipe that only the command can use, and what to do in a script.
_FOR_THE_COMMAND = {
    "prefix": "call dynorm.hub.with_prefix(model) before it",
    "stock": "call dynorm.hub.as_stock(model, **batch) after it",
    "max_length": "cut the texts of the batches",
    "batch": "pass batches of that size",
    "calibration": "pass that many samples",
}


def convert_model(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    held_out: Iterable[Batch] | None = None,
    recipe: Recipe | None = None,
    **options: Any,
) -> ModelReport:
    """Replace a model's norms, train the new layers and measure the loss, in place, in one call.

    It is :func:`find_norms`, :func:`convert_`, :func:`calibrate_`, :func:`distill_` and
    :func:`measure`. Before them, the means of LayerNorms are folded into the weights, unless
    ``fold_means=False`` leaves them. With ``to="none"``, :func:`fold_` takes the layers out in the
    end, and the report has the error of a decoder's logits as a sum of parts. After each stage the
    outputs for the first two batches to measure on are compared with the original's. If one of them
    fails, the model is restored.

    Args:
        model: any module that is neither compiled nor wrapped, with all its norms.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``,
            without labels. Padding is ignored.
        held_out: batches to measure on. None sets every fourth of ``batches`` aside for it.
        recipe: how to convert, a :class:`Recipe`, perhaps one that the command saved; None takes
            the defaults. Its fields for the command (``held_out``, ``max_length``, ``batch``,
            ``calibration``, ``stock``) make no batches here and save nothing; ``stock`` still refuses,
            before a distillation, a model whose lines cannot all be folded, and ``prefix`` any.
        options: other fields of the :class:`Recipe`, such as ``to="dyt"``, ``witnesses=2``
            or ``steps=0``, in place of those of ``recipe``. Those for the command are refused.

    Returns:
        The report on the held-out batches. ``report.meta["recipe"]`` is the recipe with the
        defaults for the model filled in, and ``report.meta["stages"]`` has the result of each stage.

    Raises:
        ArgumentError: an option is unknown, outside its domain or only for the command, or there
            are steps of distillation and transformers is not installed.
        DataError: there are fewer than two batches, or the model does not take them.
        ModelError: the model has no norm to replace, is converted in part already, or cannot be
            converted or copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        >>> data = [torch.randn(64, 8) for _ in range(8)]
        >>> report = dynorm.convert_model(model, data, steps=0)
        >>> report.output.cosine_mean > 0.7
        True
    """
    check_module(model)
    _require_usable(held_out, options)
    recipe = _checked(recipe, options)
    if is_changed(model):
        raise ModelError(
            "the model must have its norms, because it is compared with the model before the "
            "conversion, but it is converted or folded: call dynorm.restore_(model) first, or "
            "convert_, calibrate_ and measure in place of convert_model"
        )
    recipe = recipe.filled_for(model)
    if recipe.steps:
        require_library("transformers", "distillation (or pass steps=0)")
    fit = list(iterate(batches))
    if held_out is not None:
        tests = list(iterate(held_out, "held_out"))
    else:
        # Of up to three batches, the last.
        first = min(3, len(fit) - 1)
        tests = fit[first::4]
        del fit[first::4]
    if not fit:
        raise DataError(
            "there must be batches to fit on and others to measure on, got 1: give more, or "
            "held_out="
        )
    data = Data(fit, fit, tests, tests[:2])
    return convert_in_stages_(model, data, recipe, {})


def _require_usable(held_out: object, options: Mapping[str, object]) -> None:
    """Refuse options that only the command can use, because it makes the batches and saves."""
    for name, remedy in _FOR_THE_COMMAND.items():
        if name in options:
            raise ArgumentError(
                f"{name} must be left out of convert_model, which takes batches and saves nothing, "
                f"got {name}={options[name]!r}: {remedy}, or use `dynorm convert`"
            )
    if isinstance(held_out, int):
        raise ArgumentError(
            f"held_out must be batches to measure on, got {held_out!r}: a number of samples is for "
            "`dynorm convert`"
        )


def _checked(recipe: Recipe | None, options: dict[str, Any]) -> Recipe:
    """Return the checked recipe with other values of some fields."""
    if recipe is None:
        recipe = Recipe()
    check_kind("recipe", recipe, Recipe, "a dynorm.Recipe, as Recipe.load reads from a file")
    recipe = recipe.changed(**options)
    recipe.check()
    if recipe.prefix:
        raise ArgumentError(
            "the recipe's prefix must be False for convert_model, which cannot put a prefix before a model "
            f"in place: {_FOR_THE_COMMAND['prefix']}"
        )
    return recipe
