"""``fold_``: exact algebra on a model's own graph."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch import Tensor, nn

from dynorm.arguments import check_not_negative
from dynorm.batches import Inputs, example_arguments
from dynorm.errors import ArgumentError, DynormError, ModelError
from dynorm.find import find_norms
from dynorm.fold.apply import applied
from dynorm.fold.check import Check
from dynorm.fold.plan import Options, planned
from dynorm.fold.report import FoldReport
from dynorm.fold.site import SiteFold, site_folds
from dynorm.fold.tensors import tensors_in
from dynorm.fold.trace import Graph, separated_
from dynorm.guard import require_plain_model, undisturbed
from dynorm.replace.edits import edits_of, is_changed
from dynorm.site import NormSite

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def fold_(
    model: nn.Module,
    *args: Any,
    sites: Sequence[NormSite] | None = None,
    paths: Collection[str] | None = None,
    center: bool = True,
    add_bias: bool = False,
    untie: bool = False,
    tolerance: float | None = None,
    **kwargs: Any,
) -> FoldReport:
    r"""Fold the linear parts of a model's norms into its neighbours, in place.

    The outputs stay the same. A norm is ``weight * core(x) + bias``, and LayerNorm's core centres
    first, with P = I - 11^T / C. Two rewrites:

    - *affine*: into everything that reads the norm, ``W' = W diag(weight)``, ``b' = b + W bias``,
      if all of that is linear. Weight and bias stay as ones and zeros, so that the model's own
      class loads it. A point-wise layer drops them, and its scale; a linear layer is
      removed as a whole.
    - *center*: out of everything that writes into the residual stream, ``W' = P W``, ``b' = P b``,
      if nothing but LayerNorms reads that stream; they become
      :class:`dynorm.layers.rmsnorm.RMSNorm`, with the same eps.

    The model is traced once with ``torch.export``. A part that cannot be shown to be safe is left
    as it is, and the report says why. All new values are computed in float64 first. Then the
    outputs for the example and for fresh random inputs are compared; if they differ, everything is
    put back, to the bit. Parameters stay the same objects.

    A branch that the example does not take is not seen, and may read a norm too. Outputs
    that show the inside, such as ``output_hidden_states=True``, change if the example did not ask
    for them; so do tensors that a forward keeps on ``self``. Axes of the example should be longer
    than 1, because a reordering of one token is not seen.

    Args:
        model: in eval mode; not compiled, wrapped, quantized or sharded.
        *args: the example, the arguments of one call; or one batch, a tuple or dict of them.
        sites: all norms of the model, from :func:`find_norms`; None means to search for them.
        paths: the paths of the norms and point-wise layers to fold; None means all.
        center: fold means; False keeps LayerNorms, which the model's own class has.
        add_bias: give a linear layer a bias if a norm's bias needs one.
        untie: give tied weights, such as those of an embedding and a head, separate tensors if a
            fold needs it.
        tolerance: the relative error to allow. The default is 1e-12 in float64 and 1e-5 in float32;
            in half precision it is twice the model's measured error against float32.
        **kwargs: the example's keyword arguments.

    Returns:
        A report with one row per site: where each part went, or why it stays. ``report.norms`` are
        the sites as they are now.

    Raises:
        ArgumentError: ``tolerance`` is negative, a site or path is not of this model, or a keyword is
            neither an option nor an argument of the model.
        ModelError: the model has no norm, cannot be traced, is in training mode, quantized,
            sharded, compiled, wrapped or on the meta device; its outputs are opaque, too coarse to
            be checked, or changed; or its code raised. It is then as it was.
        DataError: the model cannot be run on the example, or gives nothing finite to compare.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
        >>> print(fold_(model, torch.randn(2, 4)))  # doctest: +ELLIPSIS
        1 of 1 affine maps folded, 1 of 1 means folded
        <BLANKLINE>
        site  norm                     affine  center
        1     layernorm(8) -> RMSNorm  folded  folded
        <BLANKLINE>
        relative error on fresh inputs ..., allowed 1.0e-05
        loads where dynorm is imported: save it with dynorm.save

    Reference:
        S. Ashkboos et al., "SliceGPT", arXiv 2401.15024, section 3.1, for pre-norm transformers; N.
        Graef et al., "FlashNorm", arXiv 2407.09577, for a norm before a norm.
    """
    if tolerance is not None:
        check_not_negative("tolerance", tolerance)
    require_foldable(model)
    _require_no_misspelt_option(model, kwargs)
    example = example_arguments(model, args, kwargs)
    options = Options(affine=True, center=center, add_bias=add_bias, untie=untie)
    return folded(model, [example], sites, paths, options, tolerance)


def folded(
    model: nn.Module,
    examples: Sequence[Inputs],
    sites: Sequence[NormSite] | None,
    paths: Collection[str] | None,
    options: Options,
    tolerance: float | None,
) -> FoldReport:
    """Fold as :func:`fold_` does, which explains the arguments, and compare on several examples.

    The first example is traced. The model must be foldable.
    """
    graph, folds = traced(model, examples[0], sites, paths, options)
    plan = planned(graph, folds, options)
    checked: dict[str, Any] = {}
    if plan.values or plan.added:
        before = Check(model, examples, tolerance)
        try:
            with applied(model, plan):
                checked = before.require_same(model)
        except DynormError:
            raise
        # The model's code may raise anything with other modules in it.
        except Exception as error:
            raise ModelError(
                "the model must compute as before when it is folded, but "
                f"{type(error).__name__} was raised: {error}; everything was put back. Its code "
                "may use tensors that a norm or a layer holds: paths= helps to find which"
            ) from error
    rows = [fold.row() for fold in folds]
    left = [fold.site_after() for fold in folds]
    edits = edits_of(model)
    return FoldReport(
        rows,
        edits.biases,
        edits.untied,
        loads_with="dynorm" if is_changed(model) else "stock",
        norms=[site for site in left if site is not None],
        **checked,
    )


def traced(
    model: nn.Module,
    example: Inputs,
    sites: Sequence[NormSite] | None,
    paths: Collection[str] | None,
    options: Options,
) -> tuple[Graph, list[SiteFold]]:
    """Return a model's graph, with the norms and layers in it; the model stays as it is."""
    # Refuses an example in which tensors may hide.
    tensors_in(example)
    with undisturbed(model, example, attributes=True):
        if sites is None:
            args, kwargs = example
            sites = find_norms(model, *args, **kwargs)
        ties = separated_(model) if options.untie else []
        folds = site_folds(sites, dict(model.named_modules()), paths)
        # A norm that cannot be folded is traced as it is.
        norms = {i: fold.module for i, fold in enumerate(folds) if fold.refused is None}
        return Graph(model, norms, example, ties), folds


def _require_no_misspelt_option(model: nn.Module, kwargs: Iterable[str]) -> None:
    """Refuse a keyword that resembles an option of ``fold_``, unless the model's forward names it."""
    parameters = signature(fold_).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in kwargs:
        near = get_close_matches(name, options, 1, cutoff=0.8)
        if near and name not in signature(model.forward).parameters:
            raise ArgumentError(
                f"every keyword must be an option of fold_ or an argument of the model, got {name!r}: do "
                f"you mean {near[0]!r}? An argument that forward does not name goes into a dict: "
                f"fold_(model, {{{name!r}: ...}})"
            )


def require_foldable(model: nn.Module) -> None:
    """Check that the weights are plain numbers and that the model computes as it will be used."""
    require_plain_model(model)
    for path, module in model.named_modules():
        if module.training:
            place = f"{path!r} is" if path else "it is"
            raise ModelError(
                f"the model must be in eval mode, but {place} in training mode: call model.eval()"
            )
    must = "the model's weights must be plain numbers, but"
    if getattr(model, "is_quantized", False):
        raise ModelError(f"{must} it is quantized: fold it first, then quantize")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_plain = type(tensor) in _PLAIN and type(tensor.data) in _PLAIN
        is_narrow = tensor.is_floating_point() and tensor.element_size() < 2
        if not is_plain or is_narrow:
            kind = f"a {type(tensor.data).__name__} of {tensor.dtype}"
            raise ModelError(
                f"{must} {name!r} is {kind}: fold the model before it is quantized or sharded"
            )
