"""The main job in one call: find, replace, calibrate, refine, distil, measure."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from dynorm.batches import arguments, iterate
from dynorm.errors import DataError
from dynorm.find import find_norms
from dynorm.fit import calibrate_, refine_
from dynorm.fit.site_fit import TOLERANCE
from dynorm.jobs.checkpoint import KINDS
from dynorm.jobs.recipe import suits
from dynorm.replace import convert_, restore_
from dynorm.replace.convert import Globs, Target, default_witnesses
from dynorm.report import ModelReport, measure
from dynorm.train.distill import distill_


def convert_model(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    to: Target = "dyisru",
    held_out: Iterable[Any] | None = None,
    only: Globs = None,
    skip: Globs = None,
    per_channel: bool | None = None,
    witnesses: int | None = None,
    tolerance: float = TOLERANCE,
    refine: int = 50,
    steps: int = 0,
) -> ModelReport:
    """Replace a model's norms, fit the new layers and measure the loss, in place and in one call.

    It is :func:`find_norms`, :func:`convert_`, :func:`calibrate_`, :func:`refine_`,
    with ``steps`` :func:`distill_`, and :func:`measure`. If one of them fails, the model is
    restored.

    Args:
        model: any module that is neither compiled nor wrapped.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``,
            without labels. Padding is ignored.
        to: the layer, as in :func:`convert_`.
        held_out: batches to measure on. None sets every fourth of ``batches`` aside for it.
        only: globs of the paths to convert; None means all.
        skip: globs of the paths to leave unchanged.
        per_channel: one constant per channel instead of one per layer. None means True, or False
            for a model of transformers that generates text or takes images or audio.
        witnesses: number of channels from which each layer may estimate the size of a token; 0 for
            the pure function. None means 4, or 8 for the models just named.
        tolerance: as in :func:`calibrate_`, for ``to="auto"``.
        refine: steps that train all constants together.
        steps: steps of distillation, which train all weights; they need transformers.

    Returns:
        The report on the held-out batches.

    Raises:
        ArgumentError: an argument is outside its domain.
        DataError: there are fewer than two batches, or the model does not take them.
        ModelError: the model has no norm to replace, or cannot be converted.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        >>> report = dynorm.convert_model(model, [torch.randn(64, 8) for _ in range(8)], refine=8)
        >>> report.output.cosine_mean > 0.9
        True
    """
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
    noun = KINDS.get(getattr(model, "main_input_name", ""), "texts")
    language_model = noun != "audio" and getattr(model, "can_generate", bool)()
    defaults = suits(language_model, noun)
    if per_channel is None:
        per_channel = defaults["per_channel"]
    args, kwargs = arguments(model, fit[0])
    sites = find_norms(model, *args, **kwargs)
    if witnesses is None:
        witnesses = default_witnesses(defaults["witnesses"], sites)
    original = copy.deepcopy(model)
    convert_(model, sites, to, only=only, skip=skip, per_channel=per_channel, witnesses=witnesses)
    try:
        calibrate_(model, fit, lean=defaults["lean"], tolerance=tolerance)
        if refine:
            refine_(model, fit, steps=refine)
        if steps:
            distill_(model, fit, teacher=original, steps=steps)
        return measure(model, tests, original=original, fit_on=fit)
    except BaseException:
        restore_(model).load_state_dict(original.state_dict())
        raise
