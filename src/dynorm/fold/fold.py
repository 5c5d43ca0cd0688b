"""``fold_``: exact algebra on a model's own graph."""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dynorm.arguments import check_not_negative
from dynorm.batches import example_arguments
from dynorm.errors import DynormError, ModelError
from dynorm.find.probe import NormSearch
from dynorm.fold.apply import applied
from dynorm.fold.check import Check, run
from dynorm.fold.plan import Options, planned
from dynorm.fold.redundant import mean_squares
from dynorm.fold.refusals import require_model
from dynorm.fold.report import FoldReport
from dynorm.fold.rows import row_of
from dynorm.fold.site import site_folds
from dynorm.guard import undisturbed
from dynorm.replace.convert import Globs
from dynorm.replace.edits import edits_of, is_changed
from dynorm.stream.capture import Graph
from dynorm.stream.tensors import detached_copy


def fold_(
    model: nn.Module,
    *args: Any,
    affine: bool = True,
    center: bool = True,
    center_partly: bool = False,
    redundant: float = 0.0,
    add_bias: bool = False,
    untie: bool = False,
    only: Globs = None,
    skip: Globs = None,
    check: bool = True,
    tolerance: float | None = None,
    **kwargs: Any,
) -> FoldReport:
    r"""Fold the linear parts of a model's norms into its neighbours, in place.

    The outputs stay the same. A norm is ``weight * core(x) + bias``, and LayerNorm's core centres
    first, with P = I - 11^T / C. Four rewrites:

    - *affine*: into everything that reads the norm, ``W' = W diag(weight)``, ``b' = b + W bias``,
      if all of that is linear. Weight and bias stay as ones and zeros, so that the model's own
      class loads it; a point-wise layer drops them, and its scale.
    - *center*: out of everything that writes into the residual stream, ``W' = P W``, ``b' = P b``,
      if nothing but LayerNorms reads that stream; they become
      :class:`dynorm.layers.rmsnorm.RMSNorm`, with the same eps.
    - *center_partly*: the same out of the linear writers of a stream that has others. Its norms
      stay LayerNorms, and the mean that stays is that of the few others.
    - *constants*: a point-wise layer's scale into its readers, its learned centre into the bias
      before it. With *affine*, a linear layer without witnesses is removed as a whole, if
      necessary by rescaling the residual stream.

    These are exact. A fifth, *redundant*, removes a norm that feeds only norms, through products:
    the later norms divide by each token's scale anyway. It is exact up to their eps, which is then
    added to the squares of tokens of another size.

    The model is traced once with ``torch.export``. A part that cannot be shown to be safe is left
    as it is, and the report says why. All new values are computed in float64 first. Then the
    outputs for the example and for fresh random inputs are compared; if they differ, everything is
    put back, to the bit. Parameters stay the same objects.

    Only what the example runs is seen: a branch that it does not take may read a norm too. Outputs
    that show the inside, such as ``output_hidden_states=True``, change if the example did not ask
    for them; so do tensors that a forward keeps on ``self``. Axes of the example should be longer
    than 1, because a reordering of one token is not seen.

    Args:
        model: in eval mode; not compiled, wrapped, quantized or sharded.
        *args: the example, the arguments of one call; or one batch, a tuple or dict of them.
        affine: fold weights and biases.
        center: fold means.
        center_partly: with ``center``, fold the means of linear writers where others write too.
            This simplifies nothing, but tokens of such a stream then usually have nearly the same
            mean, so one centre suits them all when point-wise layers replace the norms.
        redundant: the largest relative change to allow when a norm is removed because it feeds only
            norms. It bounds the change of these norms' outputs, for tokens as large as the
            example's, and the model's change too if ``tolerance`` is None. At 0 none is removed.
        add_bias: give a linear layer a bias if a norm's bias needs one.
        untie: give tied weights, such as those of an embedding and a head, separate tensors if a
            fold needs it.
        only: globs of the norms' paths to fold; None means all.
        skip: globs of the paths to leave as they are.
        check: compare the outputs. Otherwise the folded model is run once, without comparison.
        tolerance: the relative error to allow. The default is 1e-12 in float64 and 1e-5 in float32;
            in half precision it is twice the model's measured error against float32.
        **kwargs: the example's keyword arguments.

    Returns:
        A report with one row per site: where each part went, or why it stays.

    Raises:
        ArgumentError: ``tolerance`` or ``redundant`` is negative, or a glob matches no site.
        ModelError: the model has no norm, cannot be traced, is in training mode, quantized,
            sharded, compiled, wrapped or on the meta device; its outputs are opaque, too coarse to
            be checked, or changed; or its code raised. It is then as it was.
        DataError: the model cannot be run on the example, or gives nothing finite to compare.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
        >>> print(fold_(model, torch.randn(2, 4), check=False))
        1 of 1 affine maps folded, 1 of 1 means folded
        <BLANKLINE>
        site  norm                     affine  center
        1     layernorm(8) -> RMSNorm  folded  folded
        <BLANKLINE>
        loads where dynorm is imported: save it with dynorm.save

    Reference:
        S. Ashkboos et al., "SliceGPT", arXiv 2401.15024, section 3.1, for pre-norm transformers; N.
        Graef et al., "FlashNorm", arXiv 2407.09577, for a norm before a norm.
    """
    if tolerance is not None:
        check_not_negative("tolerance", tolerance)
    check_not_negative("redundant", redundant)
    require_model(model)
    in_place = any(isinstance(m, _DropoutNd) and m.inplace for m in model.modules())
    args, kwargs = example_arguments(model, args, kwargs)
    options = Options(affine, center, center_partly, redundant, add_bias, in_place)
    # A run may write into its arguments: a cache grows.
    example = detached_copy((args, kwargs))
    squares = None
    modules = dict(model.named_modules())
    with undisturbed(model, example, attributes=True) as put_back:
        search = NormSearch(model, detached_copy(example))
        # A trial or a trace must not start from tensors that a run kept on a module.
        put_back()
        sites = site_folds(search.norms(), modules, only, skip)
        if redundant and affine:
            run_args, run_kwargs = detached_copy(example)
            with mean_squares(sites, modules) as squares:
                model(*run_args, **run_kwargs)
            put_back()
        # A norm that cannot be folded is traced as it is.
        norms = {i: modules[fold.path] for i, fold in enumerate(sites) if fold.refused is None}
        graph = Graph(model, norms, example, untie)
    plan = planned(graph, sites, options, squares)
    checked: dict[str, Any] = {}
    if plan.changes_anything:
        try:
            before = Check(model, example, tolerance) if check else None
            if before is not None and tolerance is None and plan.is_inexact:
                before.tolerance = max(before.tolerance, redundant)
            with applied(model, plan):
                if before is not None:
                    checked = before.require_same(model)
                else:
                    run(model, example)
        except DynormError:
            raise
        # The model's code may raise anything with other modules in it.
        except Exception as error:
            raise ModelError(
                "the model must compute as before when it is folded, but "
                f"{type(error).__name__} was raised: {error}; everything was put back. Its code may "
                "use tensors that a norm or a layer holds: only= and skip= help to find which"
            ) from error
    edits = edits_of(model)
    return FoldReport(
        [row_of(fold, options) for fold in plan.folds],
        edits.biases,
        edits.untied,
        loads_with="dynorm" if is_changed(model) else "stock",
        **checked,
    )
