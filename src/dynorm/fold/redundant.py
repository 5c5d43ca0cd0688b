"""A norm that feeds nothing but norms goes altogether.

In norm_2(W norm_1(x)), norm_1 divides a token by s, s^2 = mean(x^2) + eps_1. Without it the outputs
of norm_2 are sqrt((m + eps_2) / (m + eps_2 / s^2)) times what they were, where m is the mean square
of its inputs before: furthest from 1 for the smallest m and the ends of s.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dynorm.fold.check import run
from dynorm.fold.report import FOLDED, REFUSED, Rewrite
from dynorm.fold.site import SiteFold
from dynorm.stream.graph import Graph, is_move, moved_like, packet, producer, shape, users
from dynorm.stream.operators import RefusedError
from dynorm.stream.tensors import Inputs
from dynorm.watch import hooked, site_tokens

_NORMS = ("layernorm", "rmsnorm")
# Each token's outputs are made of its own channels, which come last.
_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")


def fold_redundant(
    model: nn.Module, graph: Graph, folds: Sequence[SiteFold], example: Inputs, accepted: float
) -> None:
    """Decide for each norm whether it feeds norms only, whose outputs change by no more than is accepted."""
    squares = _mean_squares(model, folds, example)
    # In the order of their calls: of norms in a row the first goes, and the next one has to stay.
    needed = set[SiteFold]()
    for fold in (fold for fold in folds if fold.chosen and fold.site.kind in _NORMS):
        try:
            fed = _fed(graph, folds, fold)
            if (
                not fed
                or fold in needed
                or any(norm.redundant.state == FOLDED or norm is fold for norm in fed)
            ):
                raise RefusedError("it, or a norm beside it in a row, goes")
            ends = [square(squares[fold.module]) + fold.site.eps for square in (min, max)]
            pairs = [
                (min(squares[norm.module]), norm.site.eps, end) for norm in fed for end in ends
            ]
            change = max(abs(math.sqrt((m + eps) / (m + eps / s)) - 1) for m, eps, s in pairs)
            if change > accepted:
                raise RefusedError(f"an eps after it would change outputs by up to {change:.1e}")
            fold.redundant, fold.change = Rewrite(FOLDED, tuple(norm.path for norm in fed)), change
            needed |= set(fed)
        except RefusedError as refusal:
            fold.redundant = Rewrite(REFUSED, reason=str(refusal))


def _fed(graph: Graph, folds: Sequence[SiteFold], fold: SiteFold) -> list[SiteFold]:
    """Return the norms that a norm feeds through products; RefusedError where anything else sees a token's scale."""
    if fold.kept is not None:
        raise RefusedError(fold.kept)
    if fold.bias is not None and bool(fold.bias.any()):
        raise RefusedError("its bias is not 0")
    if fold.site.output_dtype is not None:
        raise RefusedError(f"it makes {fold.site.output_dtype} of what it takes")
    if fold.site.kind == "layernorm" and not fold.becomes_rms:
        raise RefusedError(f"it takes the mean out: {fold.stream_refused or 'center is off'}")
    # Each value with the number of each element's token, and whether a product has read the norm.
    numbers = [torch.arange(math.prod(shape(call))).view(shape(call)) for call in fold.calls]
    tokens = [n.amin(fold.axis(n.ndim), keepdim=True).expand(n.shape) for n in numbers]
    todo, found = (
        list(zip(fold.calls, tokens, [False] * len(tokens), strict=True)),
        list[SiteFold](),
    )
    while todo:
        value, token, is_read = todo.pop(0)
        for user in users(value):
            op, _ = producer(user)
            norm = folds[graph.norms[op]] if op in graph.norms and is_read else None
            reader = next((read for read in fold.reads if read.node is op and not is_read), None)
            # A move by an index, another tensor, may bring other tokens.
            if is_move(user, value) and op.all_input_nodes == [value] and -1 not in shape(user):
                todo.append((user, moved_like(user, value, token), is_read))
            elif (
                norm
                and norm.site.kind in _NORMS
                and torch.equal(token, token.roll(1, norm.axis(token.ndim)))
            ):
                found += [norm] * (norm not in found)
            elif (
                reader
                and packet(op) in _PRODUCTS
                and not reader.bias
                and shape(user)[:-1] == shape(value)[:-1]
            ):
                todo.append((user, token[..., :1].expand(shape(user)), True))
            else:
                with_bias = " with its bias" if reader and reader.bias else ""
                raise RefusedError(f"{graph.where(user)}{with_bias} sees the scale of its tokens")
    return found


def _mean_squares(
    model: nn.Module, folds: Sequence[SiteFold], example: Inputs
) -> dict[nn.Module, list[float]]:
    """Return the mean squares of the tokens that norms take, a LayerNorm's about their means; none of a token of 0."""
    sites = {
        fold.module: fold.site
        for fold in folds
        if fold.refused is None and fold.site.kind in _NORMS
    }
    found: dict[nn.Module, list[float]] = {module: [] for module in sites}

    def take(module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        tokens = site_tokens(sites[module], args[0].detach().double(), [])
        squares = (
            tokens.var(-1, correction=0)
            if sites[module].kind == "layernorm"
            else tokens.square().mean(-1)
        )
        found[module] += squares[squares > 0].tolist()

    with hooked(sites, take):
        run(model, example)
    return {module: squares or [1.0] for module, squares in found.items()}
