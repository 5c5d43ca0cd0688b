"""Check that without norms the logits of a decoder are plain sums of the parts of its stream."""

import math
from warnings import catch_warnings

import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.nn.functional import linear

from dynorm.batches import Batch, arguments
from dynorm.fold.graph import is_move, is_tensor, packet, shape
from dynorm.fold.operators import product_of
from dynorm.fold.tensors import mapped
from dynorm.fold.trace import Flat, exported
from dynorm.guard import undisturbed
from dynorm.outputs import relative_error
from dynorm.plain import JsonObject


@torch.no_grad()
def attribution(model: nn.Module, batch: Batch) -> JsonObject | None:
    """Compare the logits for the first sample of a batch with the sum of their parts.

    Returns:
        The number of ``parts``, which are embeddings and the outputs of attention and feed-forward,
        and the relative ``error`` of their sum. None if the logits are not a linear map of a sum,
        as with a norm before the head.
    """
    example = mapped(arguments(model, batch), lambda tensor: tensor[:1] if tensor.ndim else tensor)
    with undisturbed(model, example, evaluate=True, attributes=True):
        flat = Flat(model, example)
        with catch_warnings(action="ignore"):
            graph = exported(flat).module()
        # It keeps the values of all nodes.
        run = Interpreter(graph, garbage_collect_values=False)
        run.run(*flat.tensors)
    # The first of the model's outputs.
    head = _unmoved(graph.graph.output_node().all_input_nodes[0])
    product = product_of(head)
    if product is None:
        return None
    parts = _terms(product.value)
    if len(parts) < 2:
        return None
    weight = run.env[product.weight].movedim(product.out, 0).float()
    total = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
    if product.bias is not None:
        total = run.env[product.bias].float()
    for part in parts:
        values = run.env[part].float()
        # One sample: (tokens, C). A bias, (C), has no tokens.
        if values.ndim > 1:
            values = values.flatten(0, -2)
        total = total + linear(values, weight)
    logits = run.env[head].flatten(0, -2).float()
    return {"parts": len(parts), "error": relative_error([total], [logits])}


def _terms(value: Node) -> list[Node]:
    """Return the values whose sum a value is."""
    value = _unmoved(value)
    if packet(value) != "aten.add" or value.kwargs:
        return [value]
    terms = []
    for term in value.args:
        # A number is not a part.
        if not is_tensor(term):
            return [value]
        terms += _terms(term)
    return terms


def _unmoved(value: Node) -> Node:
    """Return the value before casts, dropouts, and views that only number the tokens otherwise."""
    while value.args:
        source = value.args[0]
        if not is_tensor(source) or not is_move(value, source):
            break
        before = shape(source)
        after = shape(value)
        if before[-1:] != after[-1:] or math.prod(before) != math.prod(after):
            break
        value = source
    return value
