"""``fold_``: exact algebra on a model's own graph."""

import logging
import operator
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn.modules.dropout import _DropoutNd

from dynorm.arguments import check_not_negative
from dynorm.errors import DynormError, ModelError
from dynorm.find.probe import find_norms
from dynorm.fold.apply import added_biases, applied, is_changed, new_values, untied
from dynorm.fold.check import Check, Inputs, copied, held_tensors, mapped, run, tensors_in
from dynorm.fold.graph import Graph, Owner, Slot, leaves, packet
from dynorm.fold.refusals import SiteFold, refused, require_model
from dynorm.fold.report import FoldReport
from dynorm.fold.rewrites import (
    Part,
    fold_affine,
    fold_centers,
    fold_means,
    fold_redundant,
    fold_through,
)
from dynorm.guard import undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.replace.convert import Globs
from dynorm.site import NormSite, select_sites


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

    A norm is ``weight * core(x) + bias``, and LayerNorm's core centres first, with P = I - 11^T /
    C. Three rewrites:

    - *affine*: into everything that reads the norm, ``W' = W diag(weight)``, ``b' = b + W bias``,
      if all of that is linear. Weight and bias stay as ones and zeros, so that the model's own
      class loads it; a point-wise layer drops them, and its scale.
    - *center*: out of everything that writes into the residual stream, ``W' = P W``, ``b' = P b``,
      if nothing but LayerNorms looks at that stream; they become
      :class:`dynorm.layers.rmsnorm.RMSNorm`, of the same eps.
    - *constants*: a point-wise layer's scale into its readers, its learned centre into the bias
      before it. With *affine*, a linear layer without witnesses goes altogether, where need be by
      rescaling the residual stream.

    These are exact. A fourth, *redundant*, takes out a norm that feeds only norms, through
    products: they take out each token's scale themselves. It is exact up to their eps, which then
    meets tokens of another size.

    The model is traced once with ``torch.export``. A part that cannot be shown to be safe is left
    alone, and the report says why. All new values are computed in float64 first. Then the outputs
    for the example and for fresh random inputs are compared; if they differ, everything is put
    back, to the bit. Parameters stay the same objects.

    Only what the example runs is seen: a branch that it does not take may read a norm too. Outputs
    that show the inside, such as ``output_hidden_states=True``, change if the example did not ask
    for them; so do tensors that a forward keeps on ``self``. Axes of the example should be longer
    than 1: a reordering of one token is not seen.

    Args:
        model: in eval mode; plain, neither compiled, wrapped, quantized nor sharded.
        *args: the example, the arguments of one call.
        affine: fold weights and biases.
        center: fold means.
        constants: fold the scales and centres of point-wise layers.
        redundant: the largest relative change to allow where a norm goes because it feeds only
            norms. It bounds these norms' outputs, for tokens as large as the example's, and the
            model's too if ``tolerance`` is None. At 0 none goes.
        add_bias: give a linear layer a bias where a norm's bias needs one.
        untie: give tied weights, as of an embedding and a head, a tensor each where a fold needs
            it.
        only: globs of the norms' paths to fold; None means all.
        skip: globs of the paths to leave alone.
        check: compare the outputs. Without, the result is only run once.
        tolerance: the relative error to allow; by default 1e-12 in float64, 1e-5 in float32, and
            for half precision twice the model's own error against float32, measured.
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
        1 of 1 affine maps folded, 1 of 1 means; 16 parameters and 64 operations less
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
    # A run may write into its arguments: a cache grows.
    example = copied((args, kwargs))
    with undisturbed(model, attributes=True):
        folds = _find_folds(model, *copied(example), only, skip)
    # A norm that cannot be folded is traced as it is.
    graph = capture(
        model,
        {i: fold.module for i, fold in enumerate(folds) if fold.refused is None},
        example,
        untie,
    )
    folds, parts = _planned(graph, folds, affine, constants, add_bias)
    if center:
        fold_means(graph, folds)
    if constants:
        fold_centers(graph, folds, add_bias)
    if redundant and affine:
        fold_redundant(model, graph, folds, example, redundant)
    checked: dict[str, Any] = {}
    try:
        if any(
            fold.is_given or fold.is_gone or fold.through or fold.becomes_rms or fold.center_into
            for fold in folds
        ):
            before = Check(model, example, tolerance) if check else None
            if before is not None and tolerance is None and any(fold.change for fold in folds):
                before.tolerance = max(before.tolerance, redundant)
            with applied(model, graph, folds, parts, new_values(folds, parts)):
                if before is not None:
                    checked = {"error": before.require_same(model), "tolerance": before.tolerance}
                    checked |= {"noise": before.noise, "fresh": before.fresh}
                else:
                    run(model, example)
    except DynormError:
        raise
    # The model's code may raise anything with other modules in it.
    except Exception as problem:
        raise ModelError(
            f"the model must compute as before when it is folded, but {type(problem).__name__} was "
            f"raised: {problem}; "
            "everything was put back. Its code may use tensors that a norm or a layer holds: only= "
            "and skip= help to "
            "find which"
        ) from problem
    rows = [fold.row(affine, center, constants) for fold in folds]
    loads_with = "dynorm" if is_changed(model) else "stock"
    return FoldReport(rows, added_biases(model), untied(model), loads_with=loads_with, **checked)


def _planned(
    graph: Graph, found: Sequence[SiteFold], affine: bool, constants: bool, add_bias: bool
) -> tuple[list[SiteFold], list[Part]]:
    """Decide where weights, biases and whole linear layers go; one that cannot go gives what any other layer would."""
    for call, i in graph.norms.items():
        found[i].calls.append(call)
    linear = {i for i, fold in enumerate(found) if affine and constants and fold.is_linear}
    # An identity gives its input on, which such a dropout would write into, in training alone.
    in_place = any(
        isinstance(module, _DropoutNd) and module.inplace for module in graph.modules.values()
    )
    goes = set() if in_place else linear
    stays = dict.fromkeys(linear - goes, "a dropout of the model works in place")
    while True:
        folds = [
            replace(fold, reads=[], goes=i in goes, left_because=stays.get(i, ""))
            for i, fold in enumerate(found)
        ]
        fold_affine(graph, folds, affine, constants, add_bias)
        parts = fold_through(graph, folds, add_bias)
        kept = {i: folds[i].kept or "" for i in goes if not (folds[i].is_given or folds[i].through)}
        if not kept:
            return folds, parts
        goes, stays = goes - kept.keys(), stays | kept


def _find_folds(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], only: Any, skip: Any
) -> list[SiteFold]:
    """Return the records of all norms, in call order, and then of all point-wise layers."""
    sites = find_norms(model, *args, **kwargs)
    for path, layer in model.named_modules():
        if path and isinstance(layer, PointwiseNorm):
            site = NormSite(
                path, (), type(layer).__name__.lower(), layer.dim, layer.normalized_shape
            )
            sites.append(
                replace(
                    site,
                    weight_name="weight",
                    bias_name="bias",
                    weight_offset=layer.weight_offset,
                )
            )
    if not sites:
        raise ModelError(
            "the model must have norms or point-wise layers, but none was found: nothing can be "
            "folded"
        )
    chosen = {site.path for site in select_sites(sites, only, skip)}
    placed = [(site, model.get_submodule(site.path)) for site in sites]
    return [
        SiteFold(site, m, site.path in chosen, site.refused or refused(site, m))
        for site, m in placed
    ]


@torch.library.custom_op("dynorm::fold_site", mutates_args=())
def fold_site(x: Tensor, index: int) -> Tensor:
    """Stand for the norm of an index while a model is traced."""
    return x.clone()


@fold_site.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


def capture(
    model: nn.Module, norms: Mapping[int, nn.Module], example: Inputs, untie: bool
) -> Graph:
    """Trace one call with ``torch.export``, non-strict, and make it functional; linear operators stay whole.

    Nothing is computed, sizes are those of the example, and what that does not run is not in the
    graph. Each of the ``norms`` becomes one node, ``fold_site(x, index)``. With ``untie`` each
    owner of a tied one may get its own.
    """
    # Brings sympy, which importing dynorm must not.
    import torch.export

    owners: dict[Tensor, list[Owner]] = {}
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(tensor, []).append(Owner(module, name, path))
    apart = _overlapping(model)
    try:
        with undisturbed(model, attributes=True), _silent():
            # Each owner holds a tensor of its own, in the same memory: the graph then shows whose
            # use is whose.
            for tensor, held_by in owners.items():
                for owner in held_by[1:] if tensor not in apart else ():
                    alias, is_parameter = tensor.detach(), isinstance(tensor, nn.Parameter)
                    owner.table[owner.name] = (
                        nn.Parameter(alias, tensor.requires_grad) if is_parameter else alias
                    )
            for index, norm in norms.items():
                # An instance attribute is found before the class's method.
                norm.__dict__["forward"] = lambda x, index=index: torch.ops.dynorm.fold_site(
                    x, index
                )
            flat = _Flat(model, example)
            program = torch.export.export(flat, tuple(flat.tensors), strict=False)
            if all(_is_functional(node) for node in program.graph.nodes):
                # What nothing takes is no use of a value.
                program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
            else:
                # A second trace, which takes longer than the rest of a fold.
                program = program.run_decompositions({})
    except DynormError:
        raise
    # torch.export raises a dozen kinds of its own, and passes on whatever the model's code raises.
    except Exception as error:
        message = (str(error).strip().splitlines() or ["nothing more"])[0]
        # The innermost line that is neither torch's nor ours; a user's folder may be called torch
        # or dynorm too.
        ours = (
            str(Path(torch.__file__).parent),
            str(Path(__file__).parents[1]),
            "<string>",
            sys.base_prefix + "/lib",
        )
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
        ]
        frames = [f for f in frames if "/site-packages/sympy/" not in f.filename]
        where = (
            f" at {frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name})"
            if frames
            else ""
        )
        raise ModelError(
            f"the model must be traceable by torch.export, but{where} it raised "
            f"{type(error).__name__}: "
            f"{message}; data-dependent control flow cannot be analysed: write it with "
            "torch.where, skip it if "
            "torch.compiler.is_exporting(), or fold the parts of the model that have none"
        ) from error
    names = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    read: dict[tuple[nn.Module, str], list[Node]] = {}
    for node in program.graph.nodes:
        if node.name in names:
            path, _, name = names[node.name].removeprefix("model.").rpartition(".")
            read.setdefault((modules[path], name), []).append(node)
    inside = {part for norm in norms.values() for part in norm.modules()}
    slots = [
        slot
        for tensor, held_by in owners.items()
        for slot in _slots(
            tensor, {o: read.get((o.module, o.name), []) for o in held_by}, tensor in apart, untie
        )
    ]
    for slot in slots:
        # An opaque norm does not show what it does with its own parameters.
        hidden = next((owner for owner in slot.owners if owner.module in inside), None)
        slot.fixed = slot.fixed or (f"{hidden} is part of a norm" if hidden else None)
    return Graph(modules, program.graph.nodes, slots)


def _slots(
    tensor: Tensor, nodes: Mapping[Owner, list[Node]], apart: bool, untie: bool
) -> list[Slot]:
    """Return the slots of one tensor: one for each owner where it may be untied, else one for all of them."""
    # A buffer stays one tensor: only parameters are untied.
    is_buffer = any(owner.table is owner.module._buffers for owner in nodes)
    if untie and not apart and not is_buffer:
        return [Slot(tensor, [owner], own) for owner, own in nodes.items()]
    hint = "" if len(nodes) == 1 or untie or is_buffer else ": pass untie=True"
    whole = Slot(tensor, list(nodes), [node for own in nodes.values() for node in own], apart, hint)
    idle = next((owner for owner, own in nodes.items() if not any(map(leaves, own))), None)
    if apart:
        whole.fixed = f"{whole.name} shares its memory with another tensor of the model"
    elif idle is not None and len(nodes) > 1:
        whole.fixed = f"{whole.name} is {idle} too, which the example does not use{hint}"
    return [whole]


def _is_functional(node: Node) -> bool:
    """Tell whether a node writes no values into another, and hides no graph of its own."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "get_attr"
    # A constant in the model's code is detached in place.
    writes = not isinstance(node.target, OpOverload) or node.target._schema.is_mutable
    return not writes or packet(node) == "aten.detach_"


def _overlapping(model: nn.Module) -> set[Tensor]:
    """Return the parameters whose memory others use too: their uses cannot be told from the graph."""
    # A module may hold tensors as plain attributes too, or in plain containers.
    known = ("_parameters", "_buffers", "_modules")
    plain = [
        {name: held for name, held in vars(m).items() if name not in known} for m in model.modules()
    ]
    storages: dict[Any, list[Tensor]] = {}
    for tensor in (
        *dict.fromkeys((*model.parameters(), *model.buffers())),
        *_held_plainly(plain, 6),
    ):
        if tensor.numel():
            storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(
                tensor
            )
    return {tensor for tensors in storages.values() if len(tensors) > 1 for tensor in tensors}


def _held_plainly(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for part in list(value.values() if isinstance(value, Mapping) else value):
            yield from _held_plainly(part, depth - 1)


class _Flat(nn.Module):
    """A model that takes and returns only the tensors in its inputs and outputs: no exporter knows all classes."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs, self.tensors = model, inputs, held_tensors(inputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = {id(held): tensor for held, tensor in zip(self.tensors, tensors, strict=True)}
        args, kwargs = mapped(self.inputs, lambda tensor: given[id(tensor)])
        return tuple(tensors_in(self.model(*args, **kwargs)))


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from printing the half-traced graph of a model that cannot be traced: the error says where."""
    logger = logging.getLogger("torch")
    with (
        catch_warnings(action="ignore"),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        ExitStack() as end,
    ):
        end.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        yield
