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
from dynorm.replace.convert import Globs, Target
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
    distill: int = 0,
) -> ModelReport:
    """Replace a model's norms, fit what replaces them, and measure what was lost, in place and in one call.

    It is :func:`find_norms`, :func:`convert_`, :func:`calibrate_`, :func:`refine_`,
    :func:`distill_` where steps are given, and :func:`measure`. If one of them fails, the model is as it was before.

    Args:
        model: any module; plain, neither compiled nor wrapped.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``,
            without labels; padding is left out.
        to: the layer, as for :func:`convert_`.
        held_out: batches to measure on; by default every fourth of ``batches``, which the fit then
            does not see.
        only: globs of the paths to convert; None means all.
        skip: globs of the paths to leave alone.
        per_channel: one constant per channel instead of one per layer; None takes True, or False
            for a model of transformers that generates text or takes images or audio.
        witnesses: how many channels each layer may read to tell a token's size; 0 for the pure
            function. None takes 4, or 8 for a model of these kinds.
        tolerance: of :func:`calibrate_`, for ``to="auto"``.
        refine: steps that fit all constants together.
        distill: steps that train all weights; they need transformers.

    Returns:
        The report on the held-out batches.

    Raises:
        ArgumentError: an argument is outside its domain.
        DataError: there are fewer than two batches, or they are of the wrong kind.
        ModelError: the model has no norm to replace, or cannot be converted.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        >>> report = dynorm.convert_model(model, [torch.randn(64, 8) for _ in range(8)], refine=8)
        >>> report.output.cosine_mean > 0.9
        True
    """
    fit, tests = (
        list(iterate(batches)),
        [] if held_out is None else list(iterate(held_out, "held_out")),
    )
    if held_out is None:
        apart = set(range(3, len(fit), 4)) or {len(fit) - 1}
        tests = [batch for k, batch in enumerate(fit) if k in apart]
        fit = [batch for k, batch in enumerate(fit) if k not in apart]
    if not fit:
        raise DataError(
            "there must be batches to fit on and others to measure on, got 1: give more, or "
            "held_out="
        )
    noun = KINDS.get(getattr(model, "main_input_name", ""), "texts")
    kind = suits(noun != "audio" and getattr(model, "can_generate", bool)(), noun)
    per_channel = kind["per_channel"] if per_channel is None else per_channel
    witnesses = kind["witnesses"] if witnesses is None else witnesses
    args, kwargs = arguments(model, fit[0])
    sites = find_norms(model, *args, **kwargs)
    original = copy.deepcopy(model)
    convert_(model, sites, to, only=only, skip=skip, per_channel=per_channel, witnesses=witnesses)
    try:
        calibrate_(model, fit, lean=kind["lean"], tolerance=tolerance)
        if refine:
            refine_(model, fit, steps=refine)
        if distill:
            distill_(model, fit, teacher=original, steps=distill)
        return measure(model, tests, original=original, fit_on=fit)
    except BaseException:
        restore_(model).load_state_dict(original.state_dict())
        raise
