"""The sizes of a site's tokens: the largest ones, and how few channels explain the sizes."""

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
# An activation is called massive if its channel makes a token larger than usual by this factor.
_MASSIVE = 3.0


@dataclass(frozen=True)
class LargeToken:
    """One of the largest tokens at a site."""

    size: float  # its sigma (an RMSNorm's rms) over the typical one
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
    # The share of the sizes' variation that 0, 1, 2 and 4 channels explain; 0 is no more than a
    # constant explains.
    explained: dict[int, float]

    @property
    def massive(self) -> bool:
        """Whether one channel holds most of the largest token, and that is over 3 times the usual size."""
        return self.largest.size > _MASSIVE and self.largest.share > 0.5

    @property
    def largest(self) -> LargeToken:
        """The largest of the tokens."""
        return self.tokens[0]

    def places(self) -> str:
        """Return the largest tokens as text, each once."""
        places = dict.fromkeys(token.place() for token in self.tokens)
        return ", ".join(place for place in places if place) or "unknown"


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
        rows = sigma.argsort(descending=True, stable=True).tolist()
        numbers = places[:, 1].tolist()
        # Of the tokens of one number only the largest counts.
        by_number: dict[Hashable, LargeToken] = {}
        for row in rows:
            key = numbers[row] if numbers[row] >= 0 else (row,)
            if key in by_number:
                continue
            by_number[key] = _large_token(float(sigma[row]), y[row], places[row].tolist())
            if len(by_number) == _LARGEST:
                break
        for token in self._largest:
            key = token.token if token.token is not None else token
            if key not in by_number or by_number[key].size < token.size:
                by_number[key] = token
        largest = sorted(by_number.values(), key=lambda token: token.size, reverse=True)
        self._largest = largest[:_LARGEST]

    def report(self, typical: float) -> TokenSizes:
        """Return the record, with the typical sigma of the site."""
        choice = self._scales.choose()
        explained = {}
        for count in (0, 1, 2, _MOST):
            # Fewer channels than the count may be chosen.
            share = choice.explained[min(count, len(choice.explained) - 1)]
            explained[count] = max(share, 0.0)
        tokens = tuple(replace(token, size=token.size / typical) for token in self._largest)
        return TokenSizes(tokens, choice.channels, explained)


def _large_token(sigma: float, y: Tensor, place: list[int]) -> LargeToken:
    """Return a token with its sigma and the norm's core y, (C)."""
    squares = y.double().square()
    channel = int(squares.argmax())
    position, number = place
    return LargeToken(
        size=sigma,
        channel=channel,
        share=float(squares[channel] / squares.sum().clamp_min(1e-300)),
        position=position if position >= 0 else None,
        token=number if number >= 0 else None,
    )


def token_places(site: NormSite, x: Tensor, batch: Batch) -> Tensor | None:
    """Return position and vocabulary number of each token of ``site_tokens``, (tokens, 2).

    The number is -1 without ``input_ids``. None if the batch has neither ``input_ids`` nor a mask
    of the shape of ``x`` without its channels.
    """
    masks = token_masks(batch)
    ids = None
    if isinstance(batch, Mapping) and "decoder_input_ids" not in batch:
        ids = batch.get("input_ids")
    # The shape of the texts, (samples, tokens), is that of the ids or the first mask.
    texts = ids if isinstance(ids, Tensor) else next(iter(masks), None)
    token_shape = torch.movedim(x, site.dim, -1).shape[:-1]
    if texts is None or texts.ndim != 2 or token_shape not in (texts.shape, (texts.numel(),)):
        return None
    mask = next((mask for mask in masks if mask.shape == texts.shape), torch.ones_like(texts))
    # Padding on the left is not counted.
    position = mask.long().cumsum(1) - 1
    number = torch.full_like(position, -1)
    if texts is ids:
        number = ids.long().to(position.device)
    places = torch.stack([position.flatten(), number.flatten()], 1)
    valid = valid_tokens(x.shape, site.dim, masks)
    return places if valid is None else places[valid.to(places.device)]
