"""A norm that feeds nothing but norms is removed as a whole.

In norm_2(W norm_1(x)), norm_1 divides a token by s, s^2 = mean(x^2) + eps_1. Without it the outputs
of norm_2 are sqrt((m + eps_2) / (m + eps_2 / s^2)) times their old values, where m is the mean
square of its inputs before: furthest from 1 for the smallest m and the extremes of s.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.batches import site_tokens
from dynorm.fold.channels import moved_like
from dynorm.fold.graph import is_move, norm_index, packet, producer, shape, users, where
from dynorm.fold.operators import RefusedError
from dynorm.fold.site import NORMS, SiteFold
from dynorm.guard import hooked

# Each token's outputs are made of its own channels, which come last.
_PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul")


@dataclass
class Tokens:
    """The tokens that a norm takes in a run."""

    # Their mean squares, without zeros; of a LayerNorm about their means.
    squares: list[float] = field(default_factory=list)
    are_cast: bool = False  # the norm returns another dtype


@dataclass(frozen=True)
class _Trace:
    """A value that follows from a norm's outputs."""

    value: Node
    token_of: Tensor  # the number of the token that each element belongs to
    after_product: bool  # a product has read the norm


def decide_redundant(
    folds: Sequence[SiteFold], tokens: Mapping[str, Tokens], accepted: float
) -> None:
    """Decide for each norm whether it feeds only norms, whose outputs hardly change without it.

    ``tokens`` are by the norms' paths.
    """
    # In the order of the calls: of norms in a row the first is removed, and the next one stays.
    needed: set[SiteFold] = set()
    for fold in folds:
        if not fold.chosen or fold.site.kind not in NORMS:
            continue
        try:
            _require_only_division(fold)
            if tokens[fold.path].are_cast:
                raise RefusedError("it casts its output to another dtype")
            followers = _norms_fed(folds, fold)
            a_follower_goes = any(f is fold or f.followers for f in followers)
            if fold in needed or a_follower_goes:
                raise RefusedError("of norms in a row only every other one can go")
            change = max(_change(fold, norm, tokens) for norm in followers)
            if change > accepted:
                raise RefusedError(f"an eps after it would change outputs by up to {change:.1e}")
        except RefusedError as refusal:
            fold.redundant_refused = str(refusal)
            continue
        fold.followers = followers
        fold.change = change
        needed.update(followers)


def _change(fold: SiteFold, follower: SiteFold, tokens: Mapping[str, Tokens]) -> float:
    """Return the largest relative change of a follower's outputs without the norm."""
    # Without any tokens, or with zeros only, 1 takes their place.
    ours = tokens[fold.path].squares or [1.0]
    smallest = min(tokens[follower.path].squares or [1.0])
    eps = follower.site.eps
    largest_change = 0.0
    for square in (min(ours), max(ours)):
        s2 = square + fold.site.eps
        ratio = math.sqrt((smallest + eps) / (smallest + eps / s2))
        largest_change = max(largest_change, abs(ratio - 1))
    return largest_change


def _norms_fed(folds: Sequence[SiteFold], fold: SiteFold) -> list[SiteFold]:
    """Return the norms that a norm feeds through products.

    Raises:
        RefusedError: something else sees the scale of a token.
    """
    followers: list[SiteFold] = []
    todo = []
    for call in fold.calls:
        numbers = torch.arange(math.prod(shape(call)), device="cpu").view(shape(call))
        # A token's number is that of its first element.
        token_of = numbers.amin(fold.site.dim % numbers.ndim, keepdim=True)
        todo.append(_Trace(call, token_of.expand(numbers.shape), after_product=False))
    while todo:
        trace = todo.pop(0)
        value = trace.value
        for user in users(value):
            op, _ = producer(user)
            # A move that takes a second tensor, an index, may bring other tokens.
            if is_move(user, value) and op.all_input_nodes == [value] and -1 not in shape(user):
                moved = moved_like(user, value, trace.token_of)
                todo.append(_Trace(user, moved, trace.after_product))
            elif trace.after_product:
                norm = _norm_over_tokens(folds, op, trace.token_of)
                if norm not in followers:
                    followers.append(norm)
            else:
                _require_product(fold, user, value)
                # All outputs of a product belong to the token of its inputs.
                token_of = trace.token_of[..., :1].expand(shape(user))
                todo.append(_Trace(user, token_of, after_product=True))
    if not followers:
        raise RefusedError("no norm follows it")
    return followers


def _require_only_division(fold: SiteFold) -> None:
    """Check that a norm without its weight only divides each token by a number."""
    if fold.affine_refused is not None:
        raise RefusedError(fold.affine_refused)
    if fold.bias is not None and bool(fold.bias.any()):
        raise RefusedError("its bias is not 0")
    if fold.site.kind == "layernorm" and not fold.becomes_rms:
        raise RefusedError(f"it takes the mean out: {fold.mean_refused}")


def _norm_over_tokens(folds: Sequence[SiteFold], op: Node, token_of: Tensor) -> SiteFold:
    """Return the norm that an operator is, each of whose groups of channels is of one token."""
    index = norm_index(op)
    if index is not None:
        norm = folds[index]
        # Whether all elements along its axis belong to one token.
        of_one_token = torch.equal(token_of, token_of.roll(1, norm.site.dim % token_of.ndim))
        if norm.site.kind in NORMS and of_one_token:
            return norm
    raise RefusedError(f"{where(op)} sees the scale of its tokens")


def _require_product(fold: SiteFold, user: Node, value: Node) -> None:
    """Check that a reader of the norm is a product without a bias, token by token."""
    op, _ = producer(user)
    with_bias = ""
    for reader in fold.readers.linear:
        if reader.node is op:
            keeps_tokens = shape(user)[:-1] == shape(value)[:-1]
            if packet(op) in _PRODUCTS and keeps_tokens and not reader.bias:
                return
            with_bias = " with its bias" if reader.bias else ""
            break
    raise RefusedError(f"{where(user)}{with_bias} sees the scale of its tokens")


@contextmanager
def watched(folds: Sequence[SiteFold]) -> Iterator[dict[str, Tokens]]:
    """Collect the tokens that norms take in a run."""
    sites = {}
    tokens: dict[str, Tokens] = {}
    for fold in folds:
        if fold.refused is None and fold.site.kind in NORMS:
            sites[fold.module] = fold.site
            tokens[fold.path] = Tokens()

    def measure(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        site = sites[module]
        seen = tokens[site.path]
        seen.are_cast |= output.dtype != args[0].dtype
        values = site_tokens(site, args[0].detach().double(), [])
        if site.kind == "layernorm":
            of_tokens = values.var(-1, correction=0)
        else:
            of_tokens = values.square().mean(-1)
        seen.squares += of_tokens[of_tokens > 0].tolist()

    with hooked(sites, measure):
        yield tokens
