"""The sizes of a site's tokens: the largest ones, and the few channels that explain the sizes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dynorm.batches import Batch, token_masks, valid_tokens
from dynorm.fit.witnesses import TokenScales
from dynorm.site import NormSite

# The most channels that are tried.
_MOST = 4
# The number of tokens in a report.
_LARGEST = 5
# An activation is called massive if its channel makes a token this many times as large as the
# median token.
_MASSIVE = 3.0


@dataclass(frozen=True)
class LargeToken:
    """One of the largest tokens at a site, the largest one with its text or number."""

    size: float  # its sigma (an RMSNorm's rms) over the median token's
    channel: int  # its largest channel
    share: float  # the part of its sum of squares that this channel holds
    position: int | None = None  # its place in the text, from 0 on; None if it is not known
    token: str | int | None = None  # its text, or its number without a tokenizer, or None

    def place(self) -> str:
        """Return its text or number and its position, as far as they are known."""
        words = []
        if self.token is not None:
            words.append(repr(self.token))
        if self.position is not None:
            words.append(f"at {self.position}")
        return " ".join(words)


@dataclass(frozen=True)
class TokenSizes:
    """How much the tokens of a site differ in size, and how few channels explain it."""

    tokens: tuple[LargeToken, ...]  # the largest ones, the largest first
    channels: tuple[int, ...]  # those that explain the sizes best, the best first
    gains: tuple[float, ...]  # the weight of each one's square
    beta: float  # the constant that is added to them
    # The share of the sizes' variation that 0, 1, 2 and 4 channels explain, on tokens that they
    # were not chosen by; 1 is all, 0 no more than a constant explains.
    explained: dict[int, float]

    @property
    def massive(self) -> bool:
        """Whether one channel holds most of the largest token, 3 times as large as the median."""
        return self.largest.size > _MASSIVE and self.largest.share > 0.5

    @property
    def largest(self) -> LargeToken:
        """The largest of the tokens."""
        return self.tokens[0]

    def places(self) -> str:
        """Return the largest tokens as text, each once: text or number, and position."""
        places = []
        for token in self.tokens:
            place = token.place()
            if place and place not in places:
                places.append(place)
        return ", ".join(places) or "unknown"


class SizeStats:
    """The running sums behind :class:`TokenSizes`; their memory does not grow with the tokens."""

    def __init__(self, site: NormSite) -> None:
        self._scales = TokenScales(site.kind or "layernorm", site.eps, _MOST, least=0.0)
        self._largest: list[LargeToken] = []

    def add(self, x: Tensor, sigma: Tensor, y: Tensor, places: Tensor) -> None:
        """Add tokens (tokens, C) with their sigmas and the norm's core y.

        Each row of ``places`` has a token's position and vocabulary number, -1 if unknown.
        """
        self._scales.update(x)
        rows = _largest_rows(sigma, places[:, 1].tolist())
        squares = y[rows].double().square()
        shares, channels = (squares / squares.sum(1, keepdim=True).clamp_min(1e-300)).max(1)
        sizes = sigma[rows].tolist()
        candidates = list(self._largest)
        for i, (position, number) in enumerate(places[rows].tolist()):
            candidates.append(
                LargeToken(
                    size=sizes[i],
                    channel=int(channels[i]),
                    share=float(shares[i]),
                    position=position if position >= 0 else None,
                    token=number if number >= 0 else None,
                )
            )
        # Keep the largest of each number: it comes last.
        candidates.sort(key=lambda token: token.size)
        by_number: dict[Hashable, LargeToken] = {}
        for token in candidates:
            key = token if token.token is None else token.token
            by_number[key] = token
        largest = sorted(by_number.values(), key=lambda token: token.size, reverse=True)
        self._largest = largest[:_LARGEST]

    def report(self, median: float) -> TokenSizes:
        """Return the record, with the median sigma of the site."""
        choice = self._scales.choose()
        explained = {}
        for count in (0, 1, 2, _MOST):
            # Fewer channels than the count may be chosen.
            share = choice.explained[min(count, len(choice.explained) - 1)]
            explained[count] = max(share, 0.0)
        tokens = tuple(replace(token, size=token.size / median) for token in self._largest)
        return TokenSizes(tokens, choice.channels, choice.gains, choice.beta, explained)


def _largest_rows(sigma: Tensor, numbers: list[int]) -> list[int]:
    """Return the rows of the largest tokens, one per vocabulary number."""
    rows: list[int] = []
    taken = set()
    for row in sigma.argsort(descending=True, stable=True).tolist():
        number = numbers[row]
        if number in taken:
            continue
        # Tokens without a number are all different.
        if number >= 0:
            taken.add(number)
        rows.append(row)
        if len(rows) == _LARGEST:
            break
    return rows


def token_places(site: NormSite, x: Tensor, batch: Batch) -> Tensor | None:
    """Return position and vocabulary number of each token of ``site_tokens``, (tokens, 2).

    The number is -1 without ``input_ids``. None if the batch has neither ``input_ids`` nor a mask
    of the shape of ``x`` without its channels.
    """
    masks = token_masks(batch)
    # The shape of the texts, (samples, tokens), is that of the ids or the first mask.
    ids = None
    if isinstance(batch, Mapping) and "decoder_input_ids" not in batch:
        ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        texts = ids
    elif masks:
        texts = masks[0]
    else:
        return None
    sizes = list(x.shape)
    del sizes[site.dim]
    token_shape = tuple(sizes)
    if texts.ndim != 2 or token_shape not in (texts.shape, (texts.numel(),)):
        return None
    mask = next((mask for mask in masks if mask.shape == texts.shape), torch.ones_like(texts))
    # Padding on the left is not counted.
    position = mask.long().cumsum(1) - 1
    if texts is ids:
        number = ids.long().to(position.device)
    else:
        number = torch.full_like(position, -1)
    places = torch.stack([position.flatten(), number.flatten()], 1)
    valid = valid_tokens(x.shape, site.dim, masks)
    return places if valid is None else places[valid.to(places.device)]
