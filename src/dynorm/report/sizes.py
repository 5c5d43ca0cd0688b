"""The sizes of a site's tokens: the largest ones, where they stand, and the few channels that tell them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynorm.batches import token_masks, valid_tokens
from dynorm.fit.witnesses import TokenScales
from dynorm.ranks import Ranks
from dynorm.site import NormSite

# So many channels are tried at most.
_MOST = 4
_LARGEST = 5
# Where one channel makes a token this many times as large as the median one, its activation is
# called massive.
_MASSIVE = 3.0


@dataclass(frozen=True)
class LargeToken:
    """One of the largest tokens at a site, of each text or number the largest one."""

    size: float  # its sigma (an RMSNorm's rms) over the median token's
    channel: int  # its largest channel
    share: float  # the part of its sum of squares that this channel holds
    position: int | None = (
        None  # its place in the text, from 0 on; None where the batch does not tell
    )
    token: str | int | None = (
        None  # its text, or its number where no tokenizer is known; None likewise
    )


@dataclass(frozen=True)
class TokenSizes:
    """How much the tokens of a site differ in size, and how few channels tell it."""

    tokens: tuple[LargeToken, ...]  # the largest ones, the largest first
    channels: tuple[int, ...]  # those that tell the sizes best, the best first
    gains: tuple[float, ...]  # the weight of each one's square
    beta: float  # the constant beside them
    # How much of the sizes' variation 0, 1, 2 and 4 channels explain, on tokens that they were not
    # chosen by; 1 is all, 0 no more than a constant does.
    explained: dict[int, float]

    @property
    def massive(self) -> bool:
        """Whether one channel holds most of the largest token, and makes it 3 times as large as the median one."""
        return self.largest.size > _MASSIVE and self.largest.share > 0.5

    @property
    def largest(self) -> LargeToken:
        """The largest of the tokens."""
        return self.tokens[0]

    def places(self) -> str:
        """Return the largest tokens in words, each once: text or number, and position."""
        named = {
            " ".join(
                [repr(t.token)] * (t.token is not None)
                + [f"at {t.position}"] * (t.position is not None)
            ): None
            for t in self.tokens
        }
        return ", ".join(filter(None, named)) or "unknown"


class SizeStats:
    """The running sums behind :class:`TokenSizes`, of a size that depends on neither tokens nor channels."""

    def __init__(self, site: NormSite) -> None:
        # A report is that of this process, as its tokens and errors are.
        ranks = Ranks(local=True)
        self._scales = TokenScales(site.kind or "layernorm", site.eps, None, ranks, least=0.0)
        self._largest: list[LargeToken] = []

    def add(self, x: Tensor, sigma: Tensor, y: Tensor, places: Tensor) -> None:
        """Add tokens (tokens, C) with their sigmas, the norm's core, and their places, (tokens, 2), -1 if unknown."""
        self._scales.update(x)
        known = places.tolist()
        chosen: dict[int, int] = {}
        for i in sigma.argsort(descending=True, stable=True).tolist():
            # Those without a number are all different.
            chosen.setdefault(known[i][1] if known[i][1] >= 0 else -2 - i, i)
            if len(chosen) == _LARGEST:
                break
        rows = torch.tensor(list(chosen.values()), device=x.device)
        squares = y[rows].double().square()
        share, channel = (squares / squares.sum(1, keepdim=True).clamp_min(1e-300)).max(1)
        columns = (column.tolist() for column in (sigma[rows], channel, share))
        places_of = ((None if each < 0 else each for each in known[i]) for i in chosen.values())
        new = [
            LargeToken(*figures, *place)
            for *figures, place in zip(*columns, places_of, strict=True)
        ]
        both = sorted([*self._largest, *new], key=lambda token: token.size)
        named = {token if token.token is None else token.token: token for token in both}
        self._largest = sorted(named.values(), key=lambda token: token.size, reverse=True)[
            :_LARGEST
        ]

    def report(self, median: float) -> TokenSizes:
        """Return the record, with the median sigma of the site."""
        found = self._scales.choose(_MOST)
        told = [max(each, 0.0) for each in found.explained]
        tokens = tuple(replace(token, size=token.size / median) for token in self._largest)
        explained = {count: told[min(count, len(told) - 1)] for count in (0, 1, 2, _MOST)}
        return TokenSizes(tokens, found.channels, found.gains, found.beta, explained)


def token_places(site: NormSite, x: Tensor, batch: Any) -> Tensor | None:
    """Return position and vocabulary number of each token of ``site_tokens``, (tokens, 2), -1 if none.

    None where the batch has neither ``input_ids`` nor a mask of the shape of ``x`` without its
    channels.
    """
    dims = (site.dim,) if isinstance(site.dim, int) else tuple(site.dim)
    masks = token_masks(batch)
    ids: Any = (
        batch.get("input_ids")
        if isinstance(batch, Mapping) and "decoder_input_ids" not in batch
        else None
    )
    rest = tuple(
        size for axis, size in enumerate(x.shape) if axis not in {d % x.ndim for d in dims}
    )
    like: Tensor | None = ids if isinstance(ids, Tensor) else next(iter(masks), None)
    if like is None or like.ndim != 2 or rest not in (like.shape, (like.numel(),)):
        return None
    mask = next((mask for mask in masks if mask.shape == like.shape), torch.ones_like(like))
    # Padding on the left does not count.
    position = mask.long().cumsum(1) - 1
    known = torch.full_like(position, -1) if like is not ids else like.long().to(position.device)
    places, valid = (
        torch.stack([position.flatten(), known.flatten()], 1),
        valid_tokens(x.shape, dims, masks),
    )
    return places if valid is None else places[valid.to(places.device)]
