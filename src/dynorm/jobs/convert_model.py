"""The main job in one call: find, replace, calibrate, refine, distil, measure."""

import copy
from collections.abc import Iterable
from typing import Unpack

import torch
from torch import nn

from dynorm.batches import Batch, arguments, iterate
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.guard import edited_parts, require_plain_model, unchanged_on_error
from dynorm.jobs.means import fold_means_
from dynorm.ranks import Ranks
from dynorm.recipe import ModelFields, Recipe
from dynorm.replace import convert_
from dynorm.replace.converted import dynorm_layers, replaced_by
from dynorm.report import ModelReport, measure
from dynorm.report.cost import costs
from dynorm.train.distill import distill_


def convert_model(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    held_out: Iterable[Batch] | None = None,
    recipe: Recipe | None = None,
    **options: Unpack[ModelFields],
) -> ModelReport:
    """Replace a model's norms, fit the new layers and measure the loss, in place and in one call.

    It is :func:`find_norms`, :func:`convert_`, :func:`calibrate_`, :func:`refine_`,
    with :func:`distill_` if steps or minutes are given, and :func:`measure`. Before them, the means
    of LayerNorms are folded into the weights, unless ``fold_means=False`` leaves them. If one of
    them fails, the model is restored.

    Args:
        model: any module that is neither compiled nor wrapped.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``,
            without labels. Padding is ignored.
        held_out: batches to measure on. None sets every fourth of ``batches`` aside for it.
        recipe: how to convert, a :class:`Recipe`; None takes the defaults. Its fields about samples
            (``held_out``, ``max_length``, ``batch``, ``calibration``) are not used here, because
            the batches are given.
        options: other fields of the :class:`Recipe`, such as ``to="dyt"``, ``witnesses=2``,
            ``only="encoder.*"``, ``refine=100`` or ``steps=200``, in place of those of ``recipe``.

    Returns:
        The report on the held-out batches. ``report.meta["recipe"]`` is the recipe with the
        defaults for the model filled in.

    Raises:
        ArgumentError: an option is unknown or outside its domain, or layers are annealed and
            ``refine`` is not 0.
        DataError: there are fewer than two batches, or the model does not take them.
        ModelError: the model has no norm to replace, is converted in part already, or cannot be
            converted or copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        >>> report = dynorm.convert_model(model, [torch.randn(64, 8) for _ in range(8)], refine=8)
        >>> report.output.cosine_mean > 0.8
        True
    """
    recipe = _recipe(recipe, options)
    if recipe.refine and any(layer.is_annealed for layer in recipe.layers):
        raise ArgumentError(
            f"refine must be 0 for annealed layers, which are norms at first, got {recipe.refine}"
        )
    converted = [path for path, layer in dynorm_layers(model).items() if replaced_by(layer)]
    if converted:
        raise ModelError(
            "the model must have its norms, because it is compared with the model before the "
            f"conversion, but {converted[0]!r} is converted: call dynorm.restore_(model) first, or "
            "convert_, calibrate_ and measure in place of convert_model"
        )
    fit = list(iterate(batches))
    if held_out is not None:
        tests = list(iterate(held_out, "held_out"))
    elif len(fit) > 3:
        tests = fit[3::4]
        del fit[3::4]
    else:
        tests = fit[-1:]
        del fit[-1:]
    if not fit:
        raise DataError(
            "there must be batches to fit on and others to measure on, got 1: give more, or "
            "held_out="
        )
    original = _copied(model)
    meta: dict[str, object] = {"recipe": recipe.filled_for(model).to_dict()}
    try:
        with unchanged_on_error(edited_parts(model), tensors=()):
            stages = _convert_(model, fit, original, recipe)
            report = measure(
                model, tests, original=original, fit_on=fit, seed=recipe.seed, meta=meta
            )
            report.meta["cost"] = costs(original, model, tests[0])
    except BaseException:
        # The modules are the old ones again, and their tensors get the old values.
        _write_values_(model, original)
        raise
    if stages:
        report.meta["stages"] = stages
    return report


def _convert_(
    model: nn.Module, fit: list[Batch], original: nn.Module, recipe: Recipe
) -> dict[str, object]:
    """Go through all stages of a recipe but the measuring; return the reports on some of them."""
    stages: dict[str, object] = {}
    args, kwargs = arguments(model, fit[0])
    if recipe.fold_means:
        # Each rank folds by its own batches, but all must get the same weights.
        ranks = Ranks(error=ModelError)
        with ranks.sharing_errors():
            means = fold_means_(model, fit[0], recipe, fit[1:])
        has_changed = means is not None and means.folded + means.partly > 0
        values = model.parameters() if has_changed else ()
        ranks.require_same(
            has_changed,
            values,
            "weights after the means were folded",
            "give each rank batches that run the same parts of the model, or pass fold_means=False",
        )
        if means is not None:
            stages["fold_means"] = means.to_dict()
    sites = find_norms(model, *args, **kwargs)
    convert_(
        model,
        sites,
        recipe.target,
        per_channel=recipe.per_channel,
        center=recipe.center,
        witnesses=recipe.witnesses or 0,
    )
    calibrate_(model, fit)
    if recipe.refine:
        refine_(model, fit, steps=recipe.refine, **recipe.refine_fields)
    if recipe.steps:
        distilled = distill_(model, fit, teacher=original, **recipe.distill_fields)
        stages["distill"] = distilled.to_dict()
    return stages


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a plain model."""
    require_plain_model(model)
    try:
        return copy.deepcopy(model)
    # A model's parts may raise anything, and torch does for a tensor with a graph.
    except Exception as error:
        raise ModelError(
            "the model must be one that copy.deepcopy copies, because it is compared with its "
            f"original, but {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _write_values_(model: nn.Module, original: nn.Module) -> None:
    """Give all tensors of a model the values of its copy.

    A tensor that was made in inference mode cannot be written into, and has its value still.
    """
    for parameter, before in zip(model.parameters(), original.parameters(), strict=True):
        if torch.is_inference_mode_enabled() or not parameter.is_inference():
            parameter.copy_(before)
    for buffer, value in zip(model.buffers(), original.buffers(), strict=True):
        # Some are expanded, and cannot be written into.
        if not torch.equal(buffer, value):
            buffer.copy_(value)


def _recipe(recipe: Recipe | None, options: ModelFields) -> Recipe:
    """Return the checked recipe with other values of some fields."""
    if recipe is None:
        recipe = Recipe()
    if not isinstance(recipe, Recipe):
        raise ArgumentError(
            f"recipe must be a dynorm.Recipe, got {recipe!r:.60}: Recipe.load reads a file"
        )
    recipe = recipe.changed(**options)
    recipe.check()
    return recipe
