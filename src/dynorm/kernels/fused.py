"""Layers inside the matrix product that writes their input: an option of ``torch.compile``.

A point-wise function needs no finished row, so product, residual and layer are one kernel. A pass
over the graph of a compiled model finds ``layer(product(x) + residual)`` and puts the op
``dynorm::product`` in its place.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses import FakeTensor
from torch.nn import functional as F  # noqa: N812

from dynorm.kernels import _triton
from dynorm.kernels._form import FORM, NAMESPACE, TENSORS, Form, Parameters
from dynorm.kernels._traced import definition

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
# The total, (x @ weight.T + product_bias) * factor + residual, empty unless it is kept; then y.
_library.define(
    "product(Tensor x, Tensor weight_of_product, bool transposed, Tensor? product_bias, "
    f"Tensor? factor, Tensor? residual, bool keep_total, {TENSORS}, {FORM}) -> (Tensor, Tensor)"
)
_op = getattr(torch.ops, NAMESPACE).product.default
# An fx.Node: its arguments have no one type.
Node = Any
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_FACTORS = (operator.mul, torch.mul)


def compile_options(**options: Any) -> dict[str, Any]:
    """Return options for ``torch.compile`` by which layers run inside the product before them.

    They are for inference (under ``torch.no_grad()``) in bfloat16 or float16 on a GPU, and for
    layers without witnesses, whose values depend on their own channel. Everything else is compiled
    as it is without them.

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
            total = _unchanged(layer.args[0])
            product = _product_in(total)
            y = _value(layer)
            # The op has no gradient, and its results lie in memory in the usual order.
            if product is not None and y.is_contiguous() and not y.requires_grad:
                _replace(graph, layer, total, product)
        # Something may have used a sum before its layer did.
        stable_topological_sort(graph)

    def uuid(self) -> bytes:
        """Return the key of what is compiled with this pass."""
        return get_hash_for_files((__file__,))


class _Product(NamedTuple):
    """A product in a graph, as the op takes it."""

    x: Node
    weight: Node
    transposed: bool
    bias: Any = None
    factor: Any = None
    residual: Any = None


def _product_in(total: Node) -> _Product | None:
    """Return the product, with a residual or without, whose result is ``total``."""
    product = _product(total, total)
    if product is not None:
        # The op has the shape of x, where it has no residual.
        return None if product.transposed else product
    if total.target in _ADDITIONS and not total.kwargs:
        for end, residual in (total.args, total.args[::-1]):
            product = _product(end, total)
            if product is not None and _is_like(residual, total):
                return product._replace(residual=residual)
    return None


def _product(end: Any, total: Node) -> _Product | None:
    """Return the product, with its factor for each channel, that ends in a node and is used nowhere else."""
    if not _is_like(end, total):
        return None
    node = _unchanged(end)
    if len(node.users) > 1 and node is not total:
        return None
    if node.target in _FACTORS:
        for value, factor in (node.args, node.args[::-1]):
            product = _product(value, total)
            if product is not None and _has_one_per_channel(factor, total):
                return product._replace(factor=factor)
        return None
    product = None
    if node.target is F.linear and not node.kwargs:
        x, weight, *bias = node.args
        product = _Product(x, weight, False, *bias)
    elif node.target == "view" and node.args[0].target is torch.addmm and not node.args[0].kwargs:
        # Conv1D of transformers.
        bias, x, weight = node.args[0].args
        product = _Product(x, weight, True, bias)
    if product is None or not all(_has_dtype(tensor, total) for tensor in product[:2]):
        # Another dtype is that of autocast.
        return None
    channels = _value(product.weight).shape[int(product.transposed)]
    return product if channels == _value(total).shape[-1] else None


def _unchanged(node: Node) -> Node:
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


def _value(node: Any) -> Any:
    """Return the tensor that represents a node's value; None for a number or a sharded tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


def _has_dtype(node: Any, total: Node) -> bool:
    value = _value(node)
    return value is not None and bool(value.dtype == _value(total).dtype)


def _is_like(node: Any, total: Node) -> bool:
    return _has_dtype(node, total) and bool(_value(node).shape == _value(total).shape)


def _has_one_per_channel(node: Any, total: Node) -> bool:
    return _has_dtype(node, total) and bool(_value(node).shape == _value(total).shape[-1:])


def _replace(graph: fx.Graph, layer: Node, total: Node, product: _Product) -> None:
    """Put the op in the place of a layer, and of its input if something else uses that too."""
    with graph.inserting_before(layer):
        op = graph.call_function(_op, (*product, True, *layer.args[1:]))
        new_total, y = [graph.call_function(operator.getitem, (op, place)) for place in range(2)]
    y.meta["example_value"] = layer.meta["example_value"]
    new_total.meta["example_value"] = total.meta["example_value"]
    layer.replace_all_uses_with(y)
    node = layer
    while node is not total:
        node, changed_nothing = node.args[0], node
        graph.erase_node(changed_nothing)
    if not total.users:
        op.update_arg(len(product), False)
    total.replace_all_uses_with(new_total)
    superfluous = [total]
    while superfluous:
        node = superfluous.pop()
        if not node.users and node.op != "placeholder":
            superfluous += node.all_input_nodes
            graph.erase_node(node)


def _compute(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the results of the op: by one kernel on a GPU, else by a product, a sum and the layer."""
    x, weight, transposed, product_bias, factor, residual, keep_total, *layer = arguments
    total, y = _empty(*arguments)
    if x.is_cuda and _triton.available():
        from dynorm.kernels import _triton_product

        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        if _triton_product.can_multiply(x, weight, residual):
            kept = total if keep_total else None
            others = (product_bias, factor, residual)
            parameters, form = Parameters(*layer[:5]), Form(*layer[5:])
            _triton_product.product(x, weight, transposed, others, parameters, form, kept, y)
            return total, y
    result = F.linear(x, weight.t() if transposed else weight, product_bias)
    if factor is not None:
        result = result * factor
    if residual is not None:
        result = result.view(residual.shape) + residual
    if keep_total:
        total.copy_(result)
    return total, y.copy_(definition(result, *layer))


def _empty(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return empty results, by which compilers know their shapes."""
    x, weight, transposed, _, _, residual, keep_total = arguments[:7]
    shape = (*x.shape[:-1], weight.shape[int(transposed)]) if residual is None else residual.shape
    return x.new_empty(shape if keep_total else 0), x.new_empty(shape)


_library.impl("product", _compute, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::product", _empty, lib=_library)
