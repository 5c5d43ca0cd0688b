"""``fold_``: exact algebra on a model's own graph; ``as_stock``: the folded model in its own class."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from dynorm.arguments import check_not_negative
from dynorm.errors import DynormError, ModelError
from dynorm.find.probe import find_norms
from dynorm.fold.affine import Part, fold_affine, fold_through
from dynorm.fold.apply import added_biases, applied, new_values, untied
from dynorm.fold.capture import capture
from dynorm.fold.check import Check, copied
from dynorm.fold.graph import Graph
from dynorm.fold.redundant import fold_redundant
from dynorm.fold.refusals import refused, require_model
from dynorm.fold.report import FoldReport
from dynorm.fold.site_fold import SiteFold
from dynorm.fold.stream import fold_centers, fold_means
from dynorm.layers import PointwiseNorm
from dynorm.replace.convert import Globs
from dynorm.replace.specs import is_ours
from dynorm.site import NormSite, select_sites
from dynorm.watch import undisturbed

# A power of two, and so is its root: neither rounds a number.
_EPS = 2.0**80


def fold_(
    model: nn.Module,
    *args: Any,
    affine: bool = True,
    center: bool = True,
    constants: bool = True,
    redundant: float = 0.0,
    add_bias: bool = False,
    untie: bool = False,
    only: Globs = None,
    skip: Globs = None,
    check: bool = True,
    tolerance: float | None = None,
    **kwargs: Any,
) -> FoldReport:
    r"""Fold the linear parts of a model's norms into its neighbours, in place; its outputs stay the same.

    A norm is ``weight * core(x) + bias``, and LayerNorm's core centres first, with P = I - 11^T / C. Three rewrites:

    - *affine*: into everything that reads the norm, ``W' = W diag(weight)``, ``b' = b + W bias``, if all of that is
      linear. Weight and bias stay as ones and zeros, so that the model's own class loads it; a point-wise layer drops
      them, and its scale.
    - *center*: out of everything that writes into the residual stream, ``W' = P W``, ``b' = P b``, if nothing but
      LayerNorms looks at that stream; they become :class:`dynorm.layers.rmsnorm.RMSNorm`, of the same eps.
    - *constants*: a point-wise layer's scale into its readers, its learned centre into the bias before it. With
      *affine*, a linear layer without witnesses goes altogether, where need be by rescaling the residual stream.

    These are exact. A fourth, *redundant*, takes out a norm that feeds only norms, through products: they take out each
    token's scale themselves. It is exact up to their eps, which then meets tokens of another size.

    The model is traced once with ``torch.export``. A part that cannot be shown to be safe is left alone, and the report
    says why. All new values are computed in float64 first. Then the outputs for the example and for fresh random inputs
    are compared; if they differ, everything is put back, to the bit. Parameters stay the same objects.

    Only what the example runs is seen: a branch that it does not take may read a norm too. Outputs that show the
    inside, such as ``output_hidden_states=True``, change if the example did not ask for them; so do tensors that a
    forward keeps on ``self``. Axes of the example should be longer than 1: a reordering of one token is not seen.

    Args:
        model: in eval mode; plain, neither compiled, wrapped, quantized nor sharded.
        *args: the example, the arguments of one call.
        affine: fold weights and biases.
        center: fold means.
        constants: fold the scales and centres of point-wise layers.
        redundant: the largest relative change to allow where a norm goes because it feeds only norms. It bounds these
            norms' outputs, for tokens as large as the example's, and the model's too if ``tolerance`` is None. At 0
            none goes.
        add_bias: give a linear layer a bias where a norm's bias needs one.
        untie: give tied weights, as of an embedding and a head, a tensor each where a fold needs it.
        only: globs of the norms' paths to fold; None means all.
        skip: globs of the paths to leave alone.
        check: compare the outputs. Without, the result is only run once.
        tolerance: the relative error to allow; by default 1e-12 in float64, 1e-5 in float32, and for half precision
            twice the model's own error against float32, measured.
        **kwargs: the example's keyword arguments.

    Returns:
        A report with one row per site: where each part went, or why it stays.

    Raises:
        ArgumentError: ``tolerance`` or ``redundant`` is negative, or a glob matches no site.
        ModelError: the model has no norm, cannot be traced, is in training mode, quantized, sharded, compiled,
            wrapped or on the meta device; its outputs are opaque, too coarse to be checked, or changed; or its code
            raised. It is then as it was.
        DataError: the model cannot be run on the example, or gives nothing finite to compare.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
        >>> print(fold_(model, torch.randn(2, 4), check=False))
        1 of 1 affine maps folded, 1 of 1 means; 16 parameters and 64 operations less
        <BLANKLINE>
        site  norm                     affine  center
        1     layernorm(8) -> RMSNorm  folded  folded
        <BLANKLINE>
        loads where dynorm is imported: save it with dynorm.save

    Reference:
        S. Ashkboos et al., "SliceGPT", arXiv 2401.15024, section 3.1, for pre-norm transformers; N. Graef et al.,
        "FlashNorm", arXiv 2407.09577, for a norm before a norm.
    """
    if tolerance is not None:
        check_not_negative("tolerance", tolerance)
    check_not_negative("redundant", redundant)
    require_model(model)
    # A run may write into its arguments: a cache grows.
    example = copied((args, kwargs))
    with undisturbed(model, attributes=True):
        folds = _find_folds(model, *copied(example), only, skip)
    # A norm that cannot be folded is traced as it is.
    norms = {i: fold.module for i, fold in enumerate(folds) if fold.refused is None}
    graph = capture(model, norms, example, untie)
    folds, parts = _planned(model, graph, folds, affine, constants, add_bias)
    if center:
        fold_means(graph, folds)
    if constants:
        fold_centers(graph, folds, add_bias)
    if redundant and affine:
        fold_redundant(model, graph, folds, example, redundant)
    error, checked = None, dict[str, Any]()
    try:
        if any(fold.is_given or fold.is_gone or fold.through or fold.becomes_rms or fold.center_into for fold in folds):
            before = Check(model, example, tolerance) if check else None
            if before is not None and tolerance is None and any(fold.change for fold in folds):
                before.tolerance = max(before.tolerance, redundant)
            with applied(model, folds, parts, *new_values(folds, parts), affine):
                if before is not None:
                    error = before.require_same(model)
                    checked = {"tolerance": before.tolerance, "noise": before.noise, "fresh": before.fresh}
                else:
                    with undisturbed(model, example, attributes=True):
                        args, kwargs = copied(example)
                        model(*args, **kwargs)
    except DynormError:
        raise
    # The model's code may raise anything with other modules in it.
    except Exception as problem:
        raise ModelError(
            f"the model must compute as before when it is folded, but {type(problem).__name__} was raised: {problem}; "
            "everything was put back. Its code may use tensors that a norm or a layer holds: only= and skip= help to "
            "find which"
        ) from problem
    biases, free = added_biases(model), untied(model)
    # transformers does not tie tensors that were saved apart; other classes do.
    ours = bool(biases or (free and not hasattr(model, "save_pretrained"))) or any(map(is_ours, model.modules()))
    rows = [fold.row(affine, center, constants) for fold in folds]
    return FoldReport(rows, biases, free, error, loads_with="dynorm" if ours else "stock", **checked)


def _planned(
    model: nn.Module, graph: Graph, found: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool
) -> tuple[list[SiteFold], list[Part]]:
    """Decide where weights, biases and whole linear layers go; one that cannot go gives what any other layer would."""
    for call, i in graph.norms.items():
        found[i].calls.append(call)
    linear = {i for i, fold in enumerate(found) if affine and constants and fold.is_linear}
    # An identity gives its input on, which such a dropout would write into, in training alone.
    in_place = any(isinstance(module, _DropoutNd) and module.inplace for module in model.modules())
    goes = set() if in_place else linear
    stays = dict.fromkeys(linear - goes, "a dropout of the model works in place")
    while True:
        folds = [replace(fold, reads=[], goes=i in goes, left_because=stays.get(i, "")) for i, fold in enumerate(found)]
        fold_affine(graph, folds, affine, constants, add_bias)
        parts = fold_through(graph, folds, add_bias)
        kept = {i: folds[i].kept or "" for i in goes if not (folds[i].is_given or folds[i].through)}
        if not kept:
            return folds, parts
        goes, stays = goes - kept.keys(), stays | kept


def _find_folds(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], only: Any, skip: Any) -> list[SiteFold]:
    """Return the records of all norms, in call order, and then of all point-wise layers."""
    sites = find_norms(model, *args, **kwargs)
    for path, layer in model.named_modules():
        if path and isinstance(layer, PointwiseNorm):
            site = NormSite(path, (), type(layer).__name__.lower(), layer.dim, layer.normalized_shape)
            sites.append(replace(site, weight_name="weight", bias_name="bias"))
    if not sites:
        raise ModelError("the model must have norms or point-wise layers, but none was found: nothing can be folded")
    chosen = {site.path for site in select_sites(sites, only, skip)}
    placed = ((site, model.get_submodule(site.path)) for site in sites)
    return [SiteFold(site, m, site.path in chosen, site.refused or refused(site, m)) for site, m in placed]


def as_stock(model: nn.Module, *args: Any, tolerance: float | None = None, **kwargs: Any) -> nn.Module:
    r"""Return a folded transformers model in its own class, which loads where dynorm is unknown.

    Where a linear layer is gone, the class's RMSNorm computes the identity: with eps = 2^80 and a weight of 2^40,
    ``weight * x / sqrt(mean(x^2) + eps)`` is x to the last digit, which is checked. A LayerNorm cannot do so.

    Args:
        model: a model of transformers in which :func:`fold_` has left no other layer of dynorm.
        *args: the example, as for :func:`fold_`.
        tolerance: the relative error to allow, as for :func:`fold_`.
        **kwargs: the example's keyword arguments.

    Returns:
        A new model, for ``save_pretrained``.

    Raises:
        ModelError: a norm, a layer of dynorm or an added bias is left, the config has no eps, it is in float16, or the
            outputs differ.

    Example:
        >>> as_stock(nn.Linear(2, 2))
        Traceback (most recent call last):
        dynorm.errors.ModelError: the model must have a config with the eps of its norms, but Linear has none

    Reference:
        L. Baroni et al., "Transformers Don't Need LayerNorm at Inference Time", arXiv 2507.02559, with 1e12 and 1e6.
    """
    config: Any = copy.deepcopy(getattr(model, "config", None))
    names = [name for name in getattr(config, "__dict__", ()) if name.endswith(("_eps", "_epsilon"))]
    if not names:
        raise ModelError(f"the model must have a config with the eps of its norms, but {type(model).__name__} has none")
    ours = {path: module for path, module in model.named_modules() if is_ours(module)}
    left = [*(path for path, module in ours.items() if type(module) is not nn.Identity), *added_biases(model)]
    if left or not ours:
        what = f"not the layers or added biases {', '.join(left[:3])}" if left else "it has none"
        raise ModelError(f"the model must have identities where linear layers were folded away, but {what}")
    like = next(model.parameters())
    if like.dtype is torch.float16:
        raise ModelError("the model must have numbers up to 2^40, but is in float16: cast it to bfloat16 or float32")
    before = Check(model, (args, kwargs), tolerance)
    vars(config).pop("quantization_config", None)
    vars(config).update(dict.fromkeys(names, _EPS))
    stock: nn.Module = type(model)(config).to(like.device, like.dtype).eval()
    stock.load_state_dict(stock.state_dict() | model.state_dict())
    vars(stock).update({name: copy.deepcopy(v) for name, v in vars(model).items() if name == "generation_config"})
    kinds = {type(stock.get_submodule(path)) for path in ours}
    kept = [path for path, module in stock.named_modules() if type(module) in kinds and path not in ours]
    if kept:
        raise ModelError(f"all norms of the model must be gone, as one eps is for all, but {kept[0]!r} is there still")
    with torch.no_grad():
        for norm in map(stock.get_submodule, ours):
            weight = norm.get_parameter("weight")
            # Some classes scale by 1 + w.
            offset = float(norm(torch.ones_like(weight.zero_())).any())
            weight.fill_(_EPS**0.5 - offset)
    error = max(before.errors(stock))
    if not error <= before.tolerance:
        raise ModelError(
            f"the norms of {type(model).__name__} must compute the identity with a large eps, but the outputs differ "
            f"by {error:.1e}: a LayerNorm takes the mean out, T5 ties weights again; save such a model with dynorm.save"
        )
    return stock
