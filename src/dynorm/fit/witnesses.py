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
# Rounds of new weights for the tokens, and the least ratio of estimate to sum that they look at.
_ROUNDS, _LEAST_RATIO = 2, 1e-6
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

    With ``robust_for`` the error is that of :math:`\log S`, for a choice of so many channels: tokens
    of one update get weights that depend on how far the estimate is off. ``explained`` stays that of
    the relative error.

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
        robust_for: int = 0,
    ) -> None:
        self._kind, self._eps = kind, eps
        self._ranks = ranks
        self._channels = None if channels is None else torch.tensor(channels, device="cpu")
        self._fixed = channels is not None
        self._seen = 0
        self.least = least
        self._robust_for = robust_for
        size = 1 if channels is None else len(channels) + 2
        self._sums = torch.zeros(2, size, size, dtype=torch.float64, device="cpu")
        self._robust_sums = self._sums.clone()

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
        if u.device != self._sums.device:
            self._sums = self._sums.to(u.device)
            self._robust_sums = self._robust_sums.to(u.device)
        columns: list[Tensor] = []
        weights: list[Tensor] = []
        for _, chunk in self._chunks(u):
            chunk_columns, total = self._columns(chunk)
            columns.append(chunk_columns)
            weights.append(total**_LARGE)
        part = _Tokens(torch.cat(columns), torch.cat(weights), self._held_out(u, start))
        new = part.sums()
        if self._robust_for:
            self._robust_sums = self._robust_sums + self._reweighted(part, new)
        self._sums = self._sums + new

    def _reweighted(self, part: "_Tokens", sums: Tensor) -> Tensor:
        r"""Return the sums of tokens with the weights that make the squared error that of the logarithm.

        An estimate :math:`r = \hat S / S` that is far too small costs at most 1 in
        :math:`(r - 1)^2`, but such a token leaves the layer too large, and in a pre-norm model it
        grows from layer to layer. With the weight :math:`(\log r / (r - 1))^2`, from the r of the
        round before, it costs :math:`\log^2 r`.
        """
        for _ in range(_ROUNDS):
            fit, judge = self._ranks.summed((self._robust_sums + sums).clone()).cpu()
            both = fit + judge
            chosen = torch.arange(len(both) - 2, device="cpu")
            if not self._fixed:
                limit = min(self._robust_for, len(both) - 2)
                *_, (_, chosen, _) = _grown(both, limit)
            estimate = _solve(both, chosen[None])[0]
            places = torch.cat([chosen, chosen.new_tensor([len(both) - 2])])
            ratio = part.columns[:, places.to(part.columns.device)] @ estimate.to(part.columns)
            ratio = ratio.clamp_min(_LEAST_RATIO)
            factor = (ratio.log() / (ratio - 1)).square()
            factor = torch.where((ratio - 1).abs() < 1e-6, 1.0, factor)
            sums = part.sums(factor[:, None])
        return sums

    def _columns(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of the candidates, 1 / S and 1 of each token with a spread, and its S."""
        assert self._channels is not None
        alive, total = self._sums_of_tokens(u)
        parts = u[alive][:, self._channels.to(u.device)].double().square() / total
        return torch.cat([parts, 1 / total, torch.ones_like(total)], 1), total

    def _held_out(self, u: Tensor, start: int) -> Tensor:
        """Return which of the tokens with a spread are held out; ``start`` is the first one's number."""
        alive = torch.cat([self._sums_of_tokens(chunk)[0] for _, chunk in self._chunks(u)])
        number = start + torch.arange(len(u), device=u.device, dtype=torch.float64)
        return (number[alive] * _GOLDEN) % 1 < _HELD_OUT

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
        for offset in range(0, max(1, len(u)), size):
            yield offset, u[offset : offset + size]

    def choose(self, limit: int) -> Witnesses:
        """Return at most ``limit`` witnesses, added one by one while each lessens the held-out error by 2 %.

        Fixed channels are all taken, whatever they tell. Call it on every rank.
        """
        if self._channels is None:
            # No token had a spread.
            return Witnesses((), (), 0.0, (0.0,))
        sums = self._ranks.summed(self._sums.clone()).cpu()
        robust = sums
        if self._robust_for:
            robust = self._ranks.summed(self._robust_sums.clone()).cpu()
        count = len(self._channels)
        if (sums[:, -1, -1] <= 0).any():
            # All of a few tokens are on one side: nothing judges them, and nothing is chosen.
            limit = 0
            sums, robust = (both.sum(0).expand(2, -1, -1) / 2 for both in (sums, robust))
        fit, judge = sums
        robust_fit, robust_judge = robust
        robust_all = robust_fit + robust_judge
        nothing = torch.arange(0, device="cpu")
        everything = torch.arange(count, device="cpu")
        errors = [_error(judge, nothing, _solve(fit, nothing[None])[0])]
        kept = nothing
        if self._fixed:
            kept = everything
            errors.append(_error(judge, everything, _solve(fit, everything[None])[0]))
        else:
            last = _error(robust_judge, nothing, _solve(robust_fit, nothing[None])[0])
            worth_it = True
            for error_gains, chosen, _ in _grown(robust_fit, min(max(limit, _REPORTED), count)):
                errors.append(_error(judge, chosen, _solve(fit, chosen[None])[0]))
                error = _error(robust_judge, chosen, error_gains)
                worth_it = worth_it and len(chosen) <= limit and error < (1 - _WORTH) * last
                last = error
                if worth_it:
                    kept = chosen
        # The channels are chosen; their gains may know all tokens.
        solved: list[float] = _solve(robust_all, kept[None])[0].tolist()
        *gains, beta = solved
        # A gain of 0 is a channel that adds nothing to the others: fixed ones keep a gain for its
        # logarithm.
        if self._fixed:
            gains = [max(gain, _LEAST_GAIN) for gain in gains]
        pairs = [(k, g) for k, g in zip(self._channels[kept].tolist(), gains, strict=True) if g > 0]
        # A larger set may ignore channels, so the error never increases with the count.
        explained = tuple(1 - least / errors[0] for least in accumulate(errors, min))
        return Witnesses(tuple(k for k, _ in pairs), tuple(g for _, g in pairs), beta, explained)


@dataclass(frozen=True)
class _Tokens:
    """What the sums need of some tokens."""

    columns: Tensor  # (tokens, candidates + 2): the candidates' parts of S, 1 / S, and 1
    weights: Tensor  # (tokens, 1)
    held_out: Tensor  # (tokens)

    def sums(self, factor: Tensor | float = 1.0) -> Tensor:
        """Return the Gram matrices of the tokens to fit to and of those held out, (2, n, n)."""
        columns = self.columns * (self.weights * factor).sqrt()
        fit = columns[~self.held_out]
        judge = columns[self.held_out]
        return torch.stack([fit.T @ fit, judge.T @ judge])


def _grown(sums: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield growing sets of channels, each with the one that lessens the error most: gains, channels, error."""
    chosen = torch.arange(0, device="cpu")
    while len(chosen) < limit:
        rest = torch.tensor([k for k in range(len(sums) - 2) if k not in chosen], device="cpu")
        tried = torch.cat([chosen.expand(len(rest), -1), rest[:, None]], 1)
        solved = _solve(sums, tried)
        errors = [_error(sums, row, gains) for row, gains in zip(tried, solved, strict=True)]
        best = min(range(len(errors)), key=errors.__getitem__)
        chosen = tried[best]
        yield solved[best], chosen, errors[best]


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
