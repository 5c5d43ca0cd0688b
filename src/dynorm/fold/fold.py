"""``fold_``: exact algebra on a model's own graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from torch import nn

from dynorm.errors import ArgumentError, DynormError, ModelError
from dynorm.fold.capture import attributes_kept
from dynorm.fold.check import Check, run
from dynorm.fold.guard import require_foldable
from dynorm.fold.nested import copied
from dynorm.fold.places import find_places
from dynorm.fold.plan import Plan
from dynorm.fold.report import FoldReport
from dynorm.fold.rows import report_of
from dynorm.fold.swap import Swap

Globs = str | Iterable[str] | None


def fold_(
    model: nn.Module,
    *args: Any,
    affine: bool = True,
    center: bool = True,
    constants: bool = True,
    add_bias: bool = False,
    untie: bool = False,
    only: Globs = None,
    skip: Globs = None,
    check: bool = True,
    tolerance: float | None = None,
    trace: str = "export",
    **kwargs: Any,
) -> FoldReport:
    r"""Folds what is linear in a model's norms into its neighbours, in place; its outputs stay the same.

    A norm is ``weight * core(x) + bias``, and LayerNorm's core centres first, with P = I - 11^T / C. Three rewrites:

    - *affine*: into everything that reads the norm, ``W' = W diag(weight)``, ``b' = b + W bias``, if all of that is
      linear (``nn.Linear``, Conv1D, convolutions, products with a parameter). Weight and bias stay in the model as
      ones and zeros, so that its own class loads it; a point-wise layer drops them, and its scale.
    - *center*: out of everything that writes into the residual stream, ``W' = P W``, ``b' = P b``, if nothing but
      LayerNorms looks at that stream; they become :class:`dynorm.layers.rmsnorm.RMSNorm`, of the same eps.
    - *constants*: a point-wise layer's scale into its readers, its learned centre into the bias before it.

    The model is traced once with ``torch.export``, with the sizes of the example. What cannot be shown to be safe is
    left alone, and the report says why. All new values are computed in float64 first and put in last; then the outputs
    for the example and for fresh random inputs are compared, and if they differ everything is put back, to the bit.
    Parameters stay the objects they are, with dtype, device and ``requires_grad``.

    Only what the example runs is seen: a branch that it does not take may read a norm too. Outputs that show what is
    inside, such as ``output_hidden_states=True``, change if the example did not ask for them; so do tensors that a
    forward keeps on ``self``. Axes of the example should be longer than 1: a reordering of one token is not seen.

    Args:
        model: in eval mode; plain, neither compiled, wrapped, quantized nor sharded.
        *args: what one call takes.
        affine: fold weights and biases.
        center: fold means.
        constants: fold the scales and centres of point-wise layers.
        add_bias: give a linear layer a bias where a norm's bias needs one.
        untie: give tied weights, as of an embedding and a head, a tensor each where a fold needs it.
        only: globs of the norms' paths to fold; None means all.
        skip: globs of the paths to leave alone.
        check: compare the outputs; always with ``trace="modules"``. Without, the result is only run once.
        tolerance: the relative error to allow; by default 1e-12 in float64, 1e-5 in float32, and for half precision
            twice the model's own error against float32, measured.
        trace: "export", or "modules": no graph, affine maps only, readers found by watching linear layers in a run.
        **kwargs: what one call takes by keyword.

    Returns:
        A report with a row a site: what went where, or why it was refused.

    Raises:
        ArgumentError: ``trace`` is unknown, ``tolerance`` is negative, or a glob matches no site.
        ModelError: the model has no norm, cannot be traced, is in training mode, quantized, sharded, compiled,
            wrapped or on the meta device; returns what cannot be seen, such as a generator; rounds too coarsely to be
            checked; or the outputs changed, or its code raised. It is then as it was.
        DataError: the model cannot be run on the example, or gives nothing finite to compare; or the example cannot be
            copied.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
        >>> print(fold_(model, torch.randn(2, 4), check=False))
        1 of 1 affine maps folded, 1 of 1 means; 16 parameters and 64 operations less
          1  layernorm(8) -> RMSNorm
            affine: folded into 2.weight
            center: folded into 0.weight, 0.bias
          loads where dynorm is imported: save it with dynorm.save

    Reference:
        S. Ashkboos et al., "SliceGPT", arXiv 2401.15024, section 3.1, for pre-norm transformers.
    """
    if trace not in ("export", "modules"):
        raise ArgumentError(f"trace must be 'export' or 'modules', got {trace!r}")
    if tolerance is not None and not _is_tolerance(tolerance):
        raise ArgumentError(f"tolerance must be a finite number, 0 or more, got {tolerance!r}")
    require_foldable(model)
    # A run may write into what it is given: a cache grows.
    example = copied((args, kwargs))
    with attributes_kept(model):
        places = find_places(model, *copied(example), only, skip)
    plan = Plan(places)
    swap = Swap()
    before: Check | None = None
    error: float | None = None
    try:
        with _explained():
            if trace == "export":
                plan.by_graph(model, *example, affine, center, constants, add_bias, untie)
            else:
                plan.by_modules(model, *example, affine, constants, add_bias)
            if not plan.anything():
                return report_of(plan, model, None)
            if check or trace == "modules":
                before = Check(model, *example, tolerance)
            plan.apply_(model, swap)
            if before is None:
                run(model, example)
            else:
                error = before.require_same(model)
    except BaseException:
        swap.undo()
        raise
    return report_of(plan, model, before, error)


def _is_tolerance(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value) >= 0


@contextmanager
def _explained() -> Iterator[None]:
    """Let what the model's own code raises on the way be one of our errors."""
    try:
        yield
    except DynormError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model must compute as before when it is folded, but {type(error).__name__} was raised: {error}; "
            "everything was put back. Its code may use what a norm or a layer holds: only= and skip= help to find which"
        ) from error
