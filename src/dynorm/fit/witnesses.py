"""Choose the witnesses of a site: the few channels whose squares tell a token's scale."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dynorm.ranks import Ranks
from dynorm.theory import token_moment

# So many channels are looked at: those whose share of the token's sum varies most.
_CANDIDATES = 64
# A further channel must lessen the error on held-out tokens by this part.
_WORTH = 0.02
# The power of its sum by which a large token counts more. At 1/2 the small tokens of
# all-MiniLM-L6-v2 lose more than the large ones win; at 0 a channel that is massive on a few tokens
# can be missed.
_LARGE = 0.2
# A variance or a squared error below this part of the mean square is rounding, about 1e-6 of the
# size; a sum below this part of a typical one counts as that part.
DEAD, SMALL = 1e-12, 0.25
# So many channels are tried for the report, however many are wanted.
_REPORTED = 4
# Rounds for each channel in which gains that are not negative are searched, and what counts as
# nothing there.
_TURNS, _TINY_PART = 5, 1e-12
_TINY = 1e-300
# So many values are held in float64 at a time.
_CHUNK = 1 << 20
# The gain of a fixed witness that tells nothing.
_LEAST_GAIN = 1e-6
# The golden ratio's multiples fall evenly between 0 and 1, whatever the length of a text: no period
# of theirs meets one of the tokens', so the first tokens of texts, the largest of all, stand on
# both sides.
_GOLDEN, _HELD_OUT = 0.6180339887498949, 0.25


@dataclass(frozen=True)
class Witnesses:
    """The witnesses of one site, and how well they tell a token's scale."""

    channels: tuple[int, ...]  # their positions, the most telling one first
    gains: tuple[float, ...]  # the weight of each one's square
    beta: float  # the constant beside them, for the rest of the sum
    # How much of the scale's variation over held-out tokens 0, 1, 2, ... channels explain, at most
    # 1; of fixed channels none and all. Below 0, they tell less than a constant.
    explained: tuple[float, ...]


class TokenScales:
    r"""Running sums from which the witnesses of one site follow, by non-negative least squares.

    .. math:: \min_{\beta, g \ge 0} \sum_t S_t^{1/5} \left( \frac{\beta + \sum_k g_k u_{tk}^2}{S_t} - 1 \right)^2

    with S the norm's own sum: :math:`C (\sigma^2 + \varepsilon)` of a LayerNorm,
    :math:`C (MS + \varepsilon)` of an RMSNorm. The error is relative, for the output's is. The
    factor lets a large token count by its size: one that is missed comes out too large, not too
    small, and the relative error alone hardly sees it.

    The sums are a matrix of 66 x 66 for the 64 channels whose part :math:`u_k^2 / S` varies most in
    the first tokens, and a second one for the held-out quarter of the tokens.

    Of fixed ``channels`` only the gains are wanted. All ``ranks`` add their own tokens, at the same
    time. A sum below ``least`` counts as that; None takes a quarter of the typical sum of this
    rank's first tokens.
    """

    def __init__(
        self,
        kind: str,
        eps: float,
        channels: Sequence[int] | None,
        ranks: Ranks,
        *,
        least: float | None = None,
    ) -> None:
        self._kind, self._eps = kind, eps
        self._ranks = ranks
        self._channels = None if channels is None else torch.tensor(channels, device="cpu")
        self._fixed = channels is not None
        self._seen = 0
        self.least = least
        size = 1 if channels is None else len(channels) + 2
        self._sums = torch.zeros(2, size, size, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def update(self, u: Tensor, first: int | None = None) -> None:
        """Add tokens (tokens, C) about their centre, the first of them number ``first`` among those of all ranks."""
        start = self._seen if first is None else first
        self._seen += len(u)
        if self.least is None:
            # Each rank by itself: AnnealStart adds tokens while a model trains.
            self._set_least(u)
        if self._channels is None:
            self._choose_candidates(u)
        if self._channels is None:
            return
        channels = self._channels.to(u.device)
        for offset, chunk in self._chunks(u):
            alive, total = self._sums_of_tokens(chunk)
            number = torch.arange(len(chunk), device=u.device, dtype=torch.float64)[alive]
            parts = chunk[alive][:, channels].double().square() / total
            columns = torch.cat([parts, 1 / total, torch.ones_like(total)], 1)
            columns = columns * total ** (_LARGE / 2)
            held_out = ((start + offset + number) * _GOLDEN) % 1 < _HELD_OUT
            fit = columns[~held_out]
            judge = columns[held_out]
            self._sums = self._sums.to(u.device) + torch.stack([fit.T @ fit, judge.T @ judge])

    def _set_least(self, u: Tensor) -> None:
        """Set ``least`` to a quarter of the typical sum, if there is a token with a spread."""
        logarithms = u.new_zeros((), dtype=torch.float64)
        count = 0
        for _, chunk in self._chunks(u):
            _, total = self._sums_of_tokens(chunk)
            logarithms += total.log().sum()
            count += len(total)
        if count:
            self.least = SMALL * math.exp(float(logarithms) / count)

    def _choose_candidates(self, u: Tensor) -> None:
        """Choose the channels whose part of the token's sum varies most, if a rank has a token with a spread."""
        sums = u.new_zeros(3, u.shape[1], dtype=torch.float64)
        for _, chunk in self._chunks(u):
            alive, total = self._sums_of_tokens(chunk)
            parts = chunk[alive].double().square() / total
            sums += torch.stack(
                [parts.sum(0), parts.square().sum(0), parts.new_full(parts.shape[1:], len(parts))]
            )
        sums = self._ranks.summed(sums)
        if sums[2].any():
            mean, mean_square = sums[:2] / sums[2]
            variance = mean_square - mean * mean
            self._channels = variance.topk(min(_CANDIDATES, u.shape[1])).indices

    def _sums_of_tokens(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens have a spread over their channels, and the norm's sums of these, (tokens, 1)."""
        u = u.double()
        moment = token_moment(u, self._kind)
        alive = moment > DEAD * u.square().mean(1)
        total = u.shape[1] * (moment[alive, None] + self._eps)
        # Of padding or blank tokens no relative error would leave anything to the others.
        return alive, total.clamp_min(self.least or 0.0)

    def _chunks(self, u: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the tokens in pieces, whose copies in float64 need little memory, with the place of each piece."""
        size = max(1, _CHUNK // u.shape[1])
        for offset in range(0, len(u), size):
            yield offset, u[offset : offset + size]

    def choose(self, limit: int) -> Witnesses:
        """Return at most ``limit`` witnesses, added one by one while each lessens the held-out error by 2 %.

        Fixed channels are all taken, whatever they tell. Call it on every rank.
        """
        if self._channels is None:
            # No token had a spread.
            return Witnesses((), (), 0.0, (0.0,))
        fit, judge = self._ranks.summed(self._sums.clone()).cpu()
        whole, count = fit + judge, len(self._channels)
        # Of a few tokens all may stand on one side: then there is nothing to judge by.
        limit = limit if min(fit[-1, -1], judge[-1, -1]) > 0 else 0
        fit, judge = (each if each[-1, -1] > 0 else whole for each in (fit, judge))
        first = [
            torch.arange(0, device="cpu"),
            *([torch.arange(count, device="cpu")] if self._fixed else []),
        ]
        errors = [_error(judge, each, _solve(fit, each[None])[0]) for each in first]
        chosen = kept = first[-1]
        wanted = not self._fixed
        while len(chosen) < min(max(limit, _REPORTED), count):
            rest = torch.tensor([k for k in range(count) if k not in chosen], device="cpu")
            tried = torch.cat([chosen.expand(len(rest), -1), rest[:, None]], 1)
            solved = _solve(fit, tried)
            best = min(range(len(rest)), key=lambda k: _error(fit, tried[k], solved[k]))
            chosen = tried[best]
            errors.append(_error(judge, chosen, solved[best]))
            wanted = wanted and len(chosen) <= limit and errors[-1] < (1 - _WORTH) * errors[-2]
            kept = chosen if wanted else kept
        # The channels are chosen; their gains may know all tokens.
        *gains, beta = _solve(whole, kept[None])[0].tolist()
        # A gain of 0 is a channel that tells nothing beside the others: fixed ones keep a gain for
        # its logarithm.
        gains = [max(gain, _LEAST_GAIN) if self._fixed else gain for gain in gains]
        pairs = [(k, g) for k, g in zip(self._channels[kept].tolist(), gains, strict=True) if g > 0]
        # Whoever has more channels may use fewer.
        explained = tuple(1 - least / errors[0] for least in accumulate(errors, min))
        return Witnesses(tuple(k for k, _ in pairs), tuple(g for _, g in pairs), beta, explained)


def _solve(sums: Tensor, chosen: Tensor) -> Tensor:
    """Return the gains and the constant of each row of channels (rows, m), none negative: (rows, m + 1)."""
    columns = torch.cat([chosen, torch.full((len(chosen), 1), len(sums) - 2, device="cpu")], 1)
    matrix, wanted = sums[columns[:, :, None], columns[:, None, :]], sums[columns, -1]
    scale = matrix.diagonal(dim1=1, dim2=2).clamp_min(_TINY).rsqrt()
    matrix, wanted = matrix * scale[:, :, None] * scale[:, None, :], wanted * scale
    # Without this part of it a matrix with two like channels has no solution.
    unit = torch.eye(columns.shape[1], dtype=matrix.dtype, device="cpu")
    matrix, least = matrix + _TINY_PART * unit, _TINY_PART * wanted.abs().amax(1)
    found, free = torch.zeros_like(wanted), torch.ones_like(wanted, dtype=torch.bool)
    # Lawson and Hanson's active sets, of all rows at once. Go from what is found towards the best
    # over those that are free, up to where the first would be negative, and hold that at 0; from
    # the best set free what lessens the error most. The error never grows.
    for _ in range(_TURNS * columns.shape[1]):
        inner = torch.where(free[:, :, None] & free[:, None, :], matrix, unit)
        aim = torch.linalg.solve_ex(inner, wanted * free)[0]
        falls = free & (aim <= 0)
        short = falls.any(1)
        reach = (
            (found / (found - aim))
            .where(falls & (found > 0), falls.logical_not().to(found))
            .amin(1, keepdim=True)
        )
        found = (found + reach * (aim - found)).clamp_min(0)
        free &= ~falls | (found > least[:, None])
        slope = (wanted - (matrix @ found[:, :, None])[:, :, 0]).where(~free, -torch.inf)
        more = ~short & (slope.amax(1) > least)
        if not (more | short).any():
            break
        rows = more.nonzero()[:, 0]
        free[rows, slope[rows].argmax(1)] = True
    return found * scale


def _error(sums: Tensor, chosen: Tensor, weights: Tensor) -> float:
    """Return the mean squared relative error over the tokens of ``sums``, at least what rounding leaves."""
    columns = torch.cat([chosen, torch.tensor([len(sums) - 2], device="cpu")])
    quadratic = weights @ sums[columns[:, None], columns] @ weights
    error = quadratic - 2 * weights @ sums[columns, -1] + sums[-1, -1]
    # Of tokens of one size rounding alone is left, and one processor would find a witness in it
    # where another does not.
    return float((error / sums[-1, -1].clamp_min(_TINY)).clamp_min(DEAD))
