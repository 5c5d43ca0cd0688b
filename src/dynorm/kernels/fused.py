"""Layers inside the matrix product that writes their input: an option of ``torch.compile``.

A point-wise function needs no finished row, so product, residual and layer are one kernel. A pass
over the graph of a compiled model finds ``layer(product(x) + residual)`` and puts the op
``dynorm::product`` in its place.
"""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses import FakeTensor
from torch.nn import functional as F  # noqa: N812

from dynorm.kernels._form import NAMESPACE
from dynorm.kernels._product import product_op
from dynorm.kernels._traced import definition

_pointwise = getattr(torch.ops, NAMESPACE).pointwise.default
# An fx.Node, or a number in its place: the arguments of a node have no one type.
Node = Any
# Not ``+=``, which also changes what the tensor's other names see.
_ADDITIONS = (operator.add, torch.add)
_FACTORS = (operator.mul, torch.mul)
_CHANNELS = slice(-1, None)


def compile_options(**options: Any) -> dict[str, Any]:
    """Return options for ``torch.compile`` by which layers run inside the product before them.

    They are for models in bfloat16 or float16 on a GPU, and layers without witnesses, whose values
    depend on their own channel. In training one kernel is the forward pass, and backward passes are
    those of the layer and of the product. With another dtype or device, product and layer run one
    after the other, which is slower than without these options.

    Args:
        **options: further options of Inductor.

    Returns:
        A dictionary for ``torch.compile(model, options=...)``.

    Example:
        >>> import dynorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), dynorm.DyISRU(8))
        >>> compiled = torch.compile(model, options=dynorm.compile_options())
    """
    return {"pre_grad_custom_pass": FuseProducts(), **options}


class FuseProducts(CustomGraphPass):
    """The pass of :func:`compile_options`, before Inductor takes the operators of torch apart."""

    def __call__(self, graph: fx.Graph) -> None:
        """Put the op in the place of every layer with a product before it."""
        for layer in graph.find_nodes(op="call_function", target=definition):
            total = _source(layer.args[0])
            sums = _operands(total, total, _ADDITIONS)
            if _value(layer) is not None:
                _fuse(graph, layer, total, sums, layer.args[1:])
        for call in graph.find_nodes(op="call_function", target=_pointwise):
            x, residual, *parameters, token_constant = call.args[:7]
            results = {node.args[1]: node for node in call.users}
            total, sums = results.get(1), [(x, residual), (residual, x)]
            if residual is None:
                total = _source(x)
                sums = _operands(total, total, _ADDITIONS)
            if token_constant is None and total is not None and 0 in results:
                _fuse(graph, results[0], total, sums, (*parameters, *call.args[7:]))
        # Something may have used a sum before its layer did.
        stable_topological_sort(graph)

    def uuid(self) -> bytes:
        """Return the key of what is compiled with this pass."""
        # The op's gradients, too, are part of what is compiled.
        files = sorted(str(file) for file in Path(__file__).parent.glob("*.py"))
        return get_hash_for_files(tuple(files))


class _Product(NamedTuple):
    """A product in a graph, as the op takes it."""

    x: Node
    weight: Node
    transposed: bool
    bias: Node = None
    factor: Node = None
    residual: Node = None


def _product_in(total: Node, sums: Sequence[tuple[Node, Node]]) -> _Product | None:
    """Return the product that ``total`` is, with a factor for each channel and a residual if it has them.

    ``sums`` are the ways to read it as a sum of something and a residual. The values on the way
    must be used nowhere else.
    """
    for scaled, residual in sums:
        if residual is not None and not _is_like(residual, total):
            continue
        for end, factor in _operands(scaled, total, _FACTORS):
            if factor is not None and not _is_like(factor, total, _CHANNELS):
                continue
            product = _linear(_inner(end, total), total)
            # Without a residual the op has the shape of x, and Conv1D flattens its x.
            if product is not None and not (product.transposed and residual is None):
                return product._replace(factor=factor, residual=residual)
    return None


def _operands(end: Node, total: Node, targets: Sequence[object]) -> list[tuple[Node, Node]]:
    """Return both operands of a sum or of a factor, in both orders; else the value and None."""
    node = _inner(end, total)
    if node is None or node.target not in targets or node.kwargs:
        return [(end, None)]
    first, second = node.args
    return [(first, second), (second, first)]


def _linear(node: Node, total: Node) -> _Product | None:
    """Return the product of matrices that a node is."""
    if node is None or node.kwargs:
        return None
    product = None
    if node.target is F.linear:
        x, weight, *bias = node.args
        product = _Product(x, weight, False, *bias)
    elif node.target == "view" and node.args[0].target is torch.addmm and not node.args[0].kwargs:
        # Conv1D of transformers.
        bias, x, weight = node.args[0].args
        product = _Product(x, weight, True, bias)
        if _value(weight).shape[1] != _value(total).shape[-1]:
            return None
    if product is None or not all(_has_dtype(tensor, total) for tensor in product[:2]):
        # Another dtype is that of autocast.
        return None
    return product


def _inner(end: Node, total: Node) -> Node:
    """Return the node whose value ``end`` is; None if it is not like the total, or used elsewhere."""
    if not _is_like(end, total):
        return None
    node = _source(end)
    return node if node is total or len(node.users) == 1 else None


def _source(node: Node) -> Node:
    """Go back over nodes that change nothing, and that nothing else uses."""
    while len(node.users) == 1 and node.args and _is_like(node.args[0], node):
        inactive = node.target is F.dropout and False in (
            *node.args[2:3],
            node.kwargs.get("training"),
        )
        if not inactive and node.target not in ("to", "contiguous"):
            break
        node = node.args[0]
    return node


def _value(node: Node) -> Any:
    """Return the tensor that represents a node's value; None for a number or a sharded tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def _has_dtype(node: Node, other: Node) -> bool:
    value = _value(node)
    return value is not None and bool(value.dtype == _value(other).dtype)


def _is_like(node: Node, other: Node, axes: slice = slice(None)) -> bool:
    """Return whether a value has the dtype of another, and the shape of its ``axes``."""
    return _has_dtype(node, other) and bool(_value(node).shape == _value(other).shape[axes])


def _fuse(
    graph: fx.Graph,
    y: Node,
    total: Node,
    sums: Sequence[tuple[Node, Node]],
    layer: Sequence[Node],
) -> None:
    """Put the op in the place of a layer whose input holds a product, if it does.

    The nodes that it replaces stay, unused, and compilers drop them.

    Args:
        graph: the graph.
        y: the output of the layer.
        total: its input.
        sums: the ways to read the input as a sum.
        layer: the arguments of the layer.
    """
    found = _product_in(total, sums)
    # The results of the op lie in memory in the usual order.
    if found is None or not _value(y).is_contiguous():
        return
    # The gradient of a layer is computed from its input.
    is_kept = len(total.users) > 1 or _value(y).requires_grad
    with graph.inserting_before(y):
        op = graph.call_function(product_op, (*found, is_kept, *layer))
        new_total, new_y = [graph.call_function(operator.getitem, (op, place)) for place in (0, 1)]
    for old, new in ((y, new_y), (total, new_total)):
        new.meta["example_value"] = old.meta["example_value"]
    y.replace_all_uses_with(new_y)
    if is_kept:
        total.replace_all_uses_with(new_total)
