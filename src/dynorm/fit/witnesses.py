"""Choose the witnesses of a site: the channels from whose squares a token's size can be estimated.

Up to 16 are chosen one by one, each time the one that lessens the error most. More than 16 are a
sample of all channels: see :class:`Sample`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from dynorm.arguments import MOST_CHOSEN
from dynorm.fit.nonnegative import nonnegative_least_squares
from dynorm.ranks import Ranks
from dynorm.theory import token_moment

# The number of channels to choose from: those whose share of the token's sum varies most.
_CANDIDATES = 64
# A further channel must lessen the error on held-out tokens by this part.
_WORTH = 0.02
# The power of its sum by which a large token counts more. At 1/2 the small tokens of
# all-MiniLM-L6-v2 lose more than the large ones win; at 0 a channel that is massive on a few tokens
# can be missed.
_LARGE = 0.2
# A variance or a squared error below this part of the mean square is rounding, about 1e-6 of the
# size.
DEAD = 1e-12
# A sum below this part of the typical one is raised to that part.
SMALL = 0.25
# The report shows the errors with up to this number of channels, even if the layer gets fewer.
_REPORTED = 4
_TINY = 1e-300
# How strongly the gains of a sample are drawn to those that estimate the sum without bias, as a part
# of the mean square of its columns. A hundred times less or more changes little.
_TOWARDS_UNBIASED = 1e-4
# The gain of a sampled channel is at most this many times (other channels / sampled channels).
_MOST_REPRESENTED = 4
# Rounds of new weights for the tokens, and the least ratio of estimate to sum that they look at.
_ROUNDS = 2
_LEAST_RATIO = 1e-6
# The number of values that are copied to float64 at a time.
_CHUNK = 1 << 20
# The gain of a fixed witness that adds nothing to the others.
_LEAST_GAIN = 1e-6
# The multiples of the golden ratio fall evenly between 0 and 1, however long the texts are, and
# share no period with them. So the first tokens of texts, the largest of all, are on both sides.
GOLDEN = (math.sqrt(5) - 1) / 2
_HELD_OUT = 0.25


@dataclass(frozen=True)
class Witnesses:
    """The witnesses of one site, and how well a token's size follows from them."""

    channels: tuple[int, ...]  # their positions, the most useful one first
    gains: tuple[float, ...]  # the weight of each one's square
    beta: float  # the constant that replaces the rest of the sum
    # The share of the variation of the size over held-out tokens that 0, 1, 2, ... channels
    # explain (fixed ones: none, all); below 0 if a constant is better. A token with the sum S has
    # the weight S^0.2. ``SiteReport.explained`` is another measure.
    explained: tuple[float, ...]

    @property
    def explained_by_all(self) -> float:
        """How much of the variation all the chosen channels explain."""
        return self.explained[min(len(self.channels), len(self.explained) - 1)]


@dataclass(frozen=True)
class Gram:
    r"""Sums over tokens from which gains and errors of every set of candidates follow.

    The error of a token is :math:`\sum_k g_k a_k + \beta b - 1`, with :math:`a_k = u_k^2 / S` of
    each of K candidates and :math:`b = 1 / S`. These K + 1 are the columns; 1 is the target.
    """

    products: Tensor  # (K + 1, K + 1): each column times each, the one of the constant last
    targets: Tensor  # (K + 1): each column times the target
    weight: Tensor  # (): the sum of the tokens' weights, because the target is 1

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """Name the parts of the sums of all products, (K + 2, K + 2), with the target last."""
        return cls(sums[:-1, :-1], sums[:-1, -1], sums[-1, -1])

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return len(self.targets) - 1

    def columns(self, picked: Tensor) -> Tensor:
        """Append the constant's column to those of picked candidates, (..., m): (..., m + 1)."""
        constant = picked.new_full((*picked.shape[:-1], 1), self.count)
        return torch.cat([picked, constant], -1)

    def for_sample(self, unbiased: Tensor) -> "Gram":
        """Return the sums without the constant, and with a penalty on the gains' squared distance from given ones.

        A sample explains all of the sum: with a constant that fits the other tokens, a small one
        would come out of the layer far too small.
        """
        strength = _TOWARDS_UNBIASED * self.products.diagonal()[:-1].mean()
        products = self.products.clone()
        products[-1] = 0.0
        products[:, -1] = 0.0
        products.diagonal()[:-1] += strength
        targets = self.targets.clone()
        targets[:-1] += strength * unbiased
        targets[-1] = 0.0
        return Gram(products, targets, self.weight)

    def parts(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products and targets of each row of candidates, (rows, m), and the constant.

        They are (rows, m + 1, m + 1) and (rows, m + 1).
        """
        columns = self.columns(picked)
        return self.products[columns[:, :, None], columns[:, None, :]], self.targets[columns]

    def solve(self, picked: Tensor) -> Tensor:
        """Return the gains and the constant of each row of candidates, (rows, m), none negative: (rows, m + 1)."""
        return nonnegative_least_squares(*self.parts(picked))

    def squared_errors(self, products: Tensor, targets: Tensor, solutions: Tensor) -> Tensor:
        """Return the mean squared relative error of each solution, (rows), at least the rounding error."""
        estimated = (products @ solutions[:, :, None])[:, :, 0]
        error = (solutions * (estimated - 2 * targets)).sum(1) + self.weight
        # With tokens of one size only rounding remains, and one processor would find a witness in
        # it where another does not.
        return (error / self.weight.clamp_min(_TINY)).clamp_min(DEAD)

    def squared_error(self, picked: Tensor, solution: Tensor) -> float:
        """Return the error of a solution for candidates (m)."""
        return float(self.squared_errors(*self.parts(picked[None]), solution[None])[0])

    def squared_error_on(self, held_out: "Gram", picked: Tensor) -> float:
        """Return the error on other tokens with the gains and the constant that fit these best."""
        return held_out.squared_error(picked, self.solve(picked[None])[0])

    def growing_sets(self, limit: int) -> "Iterator[Picked]":
        """Yield sets of 1, 2, ... candidates: each time the one is added that lessens the error most."""
        picked = torch.arange(0, device="cpu")
        is_left = torch.ones(self.count, dtype=torch.bool, device="cpu")
        while len(picked) < limit:
            added = is_left.nonzero()
            tried = torch.cat([picked.expand(len(added), -1), added], 1)
            products, targets = self.parts(tried)
            solutions = nonnegative_least_squares(products, targets)
            best = int(self.squared_errors(products, targets, solutions).argmin())
            picked = tried[best]
            is_left[picked[-1]] = False
            yield Picked(picked, solutions[best])


@dataclass(frozen=True)
class Sample:
    r"""Many witnesses: the largest channels, and some of all others that represent the rest.

    Half of the witnesses are the channels with the largest mean square of their part of the token's
    sum: also those that are massive on a few tokens only. The other half are taken at equal
    distances from the rest, in the same order. As for a poll, the error of such a sample depends on
    its size, and hardly on the text and on how many channels there are: n of N channels of like
    size estimate their sum to :math:`\sqrt{2 (1 - n / N) / n}`.
    """

    channels: Tensor  # (K), the largest first
    gains: Tensor  # (K): 1 for the largest, and for each other one how many channels it represents

    @classmethod
    def of(cls, parts: Tensor, squared_parts: Tensor, count: int) -> Self:
        """Take ``count`` channels, given the means of each one's part of the sum and of its square."""
        order = squared_parts.argsort(descending=True, stable=True)
        largest = order[: count - count // 2]
        rest = order[count - count // 2 :]
        taken = count // 2
        # The middle of each of that many equal pieces.
        places = (torch.arange(taken, dtype=torch.float64, device=rest.device) + 0.5) / taken
        sampled = rest[(places * len(rest)).long()]
        represented = parts[rest].sum() / parts[sampled].sum().clamp_min(_TINY)
        # If the sampled channels happen to be dead, no gain makes them represent the others.
        most = _MOST_REPRESENTED * len(rest) / max(taken, 1)
        represented = represented.clamp_max(most)
        gains = torch.cat([torch.ones_like(parts[largest]), represented.expand(taken)])
        return cls(torch.cat([largest, sampled]), gains)


@dataclass(frozen=True)
class Picked:
    """Some of the candidates, with the gains and the constant that fit best."""

    indices: Tensor  # (m), among the candidates
    solution: Tensor  # (m + 1)


@dataclass(frozen=True)
class _Tokens:
    """The columns of some tokens."""

    columns: Tensor  # (tokens, K + 2): the candidates' parts of S, 1 / S, and 1
    weights: Tensor  # (tokens, 1)
    is_held_out: Tensor  # (tokens)

    def sums(self, factor: Tensor | float = 1.0) -> Tensor:
        """Return the products of the columns, of the tokens to fit to and of those held out, (2, K + 2, K + 2)."""
        columns = self.columns * (self.weights * factor).sqrt()
        fitted = columns[~self.is_held_out]
        held_out = columns[self.is_held_out]
        return torch.stack([fitted.T @ fitted, held_out.T @ held_out])


class TokenScales:
    r"""Running sums from which the witnesses of one site follow, by non-negative least squares.

    .. math:: \min_{\beta, g \ge 0} \sum_t S_t^{1/5} \left( \frac{\beta + \sum_k g_k u_{tk}^2}{S_t} - 1 \right)^2

    with S the norm's own sum: :math:`C (\sigma^2 + \varepsilon)` of a LayerNorm,
    :math:`C (MS + \varepsilon)` of an RMSNorm. The error is relative because the output's is. The
    factor lets a large token count by its size: one that is missed comes out too large, not too
    small, and the relative error hardly shows it.

    At most ``most`` channels are chosen. The sums are a matrix of 66 x 66 for the 64 channels whose
    part :math:`u_k^2 / S` varies most in the first tokens, and a second one for the held-out quarter
    of the tokens. With ``robust`` there are two more. If ``most`` is above 16, the channels are a
    :class:`Sample` by the first tokens, and the gains are drawn a little to those that make the
    estimate unbiased. With ``fixed`` channels only the gains are fitted.

    With ``robust`` the error is that of :math:`\log S`, except for a sample: the tokens of each update
    get weights that depend on how far the estimate is off. ``explained`` stays that of the relative
    error.

    All ``ranks`` add their own tokens, at the same time. A sum below ``least`` counts as that; None
    takes a quarter of the typical sum of this rank's first tokens.
    """

    def __init__(
        self,
        kind: str,
        eps: float,
        ranks: Ranks,
        most: int = 0,
        *,
        fixed: Sequence[int] = (),
        least: float | None = None,
        robust: bool = False,
    ) -> None:
        self.is_sample = most > MOST_CHOSEN
        self.least = least
        self._kind = kind
        self._eps = eps
        self._ranks = ranks
        self._most = most
        self._robust = robust and not self.is_sample
        self._candidates: Tensor | None = None
        self._takes_all = bool(fixed)
        self._seen = 0
        self._unbiased: Tensor | None = None
        size = 1  # The first sums make it that of the candidates.
        if fixed:
            self._candidates = torch.tensor(fixed, device="cpu")
            size = len(fixed) + 2
        self._sums = torch.zeros(2, size, size, dtype=torch.float64, device="cpu")
        self._robust_sums = self._sums.clone()

    @torch.no_grad()
    def update(self, u: Tensor, numbers: Tensor | None = None) -> None:
        """Add tokens (tokens, C) about their centre, with their numbers among those of all ranks."""
        if numbers is None:
            numbers = self._seen + torch.arange(len(u), device=u.device, dtype=torch.float64)
        self._seen += len(u)
        if self.least is None:
            # Each rank by itself: AnnealStart adds tokens while a model trains.
            self._set_least(u)
        if self._candidates is None:
            self._choose_candidates(u)
        if self._candidates is None:
            return
        if u.device != self._sums.device:
            self._sums = self._sums.to(u.device)
            self._robust_sums = self._robust_sums.to(u.device)
        tokens = self._tokens(u, self._candidates.to(u.device), numbers)
        sums = tokens.sums()
        if self._robust:
            self._robust_sums = self._robust_sums + self._reweighted(tokens, sums)
        self._sums = self._sums + sums

    def _reweighted(self, tokens: _Tokens, sums: Tensor) -> Tensor:
        r"""Return the sums of tokens with the weights that make the squared error that of the logarithm.

        An estimate :math:`r = \hat S / S` that is far too small costs at most 1 in
        :math:`(r - 1)^2`, but such a token leaves the layer too large, and in a pre-norm model it
        grows from layer to layer. With the weight :math:`(\log r / (r - 1))^2`, from the r of the
        round before, it costs :math:`\log^2 r`.
        """
        for _ in range(_ROUNDS):
            summed = self._ranks.summed(self._robust_sums + sums).cpu()
            gram = Gram.of(summed[0] + summed[1])
            picked = torch.arange(gram.count, device="cpu")
            if not self._takes_all:
                limit = min(self._most, gram.count)
                picked = list(gram.growing_sets(limit))[-1].indices
            solution = gram.solve(picked[None])[0]
            columns = gram.columns(picked).to(tokens.columns.device)
            ratio = tokens.columns[:, columns] @ solution.to(tokens.columns)
            ratio = ratio.clamp_min(_LEAST_RATIO)
            factor = (ratio.log() / (ratio - 1)).square()
            # The limit at r = 1, where the formula is 0 / 0.
            factor = torch.where((ratio - 1).abs() < 1e-6, 1.0, factor)
            sums = tokens.sums(factor[:, None])
        return sums

    def _tokens(self, u: Tensor, channels: Tensor, numbers: Tensor) -> _Tokens:
        """Return the columns of the tokens with a spread; ``numbers`` decide which are held out."""
        columns = []
        weights = []
        has_spread = []
        for chunk in self._chunks(u):
            alive, total = self._sums_of_tokens(chunk)
            parts = chunk[alive][:, channels].double().square() / total
            columns.append(torch.cat([parts, 1 / total, torch.ones_like(total)], 1))
            weights.append(total**_LARGE)
            has_spread.append(alive)
        numbers = numbers[torch.cat(has_spread)]
        is_held_out = (numbers * GOLDEN) % 1 < _HELD_OUT
        return _Tokens(torch.cat(columns), torch.cat(weights), is_held_out)

    def _set_least(self, u: Tensor) -> None:
        """Set ``least`` to a quarter of the typical sum, if there is a token with a spread."""
        logarithms = u.new_zeros((), dtype=torch.float64)
        count = 0
        for chunk in self._chunks(u):
            _, total = self._sums_of_tokens(chunk)
            logarithms += total.log().sum()
            count += len(total)
        if count:
            self.least = SMALL * math.exp(float(logarithms) / count)

    def _choose_candidates(self, u: Tensor) -> None:
        """Choose the channels to fit the gains of, if a rank has a token with a spread.

        They are a sample, or those whose part of the token's sum varies most.
        """
        # Of each channel's part: the sum, the sum of squares and the count.
        sums = u.new_zeros(3, u.shape[1], dtype=torch.float64)
        for chunk in self._chunks(u):
            alive, total = self._sums_of_tokens(chunk)
            parts = chunk[alive].double().square() / total
            sums[0] += parts.sum(0)
            sums[1] += parts.square().sum(0)
            sums[2] += len(parts)
        sums = self._ranks.summed(sums)
        if not sums[2].any():
            return
        mean = sums[0] / sums[2]
        if self.is_sample:
            sample = Sample.of(mean, sums[1], min(self._most, len(mean)))
            self._candidates = sample.channels
            self._unbiased = sample.gains.cpu()
            self._takes_all = True
            return
        variance = sums[1] / sums[2] - mean * mean
        self._candidates = variance.topk(min(_CANDIDATES, u.shape[1])).indices

    def _sums_of_tokens(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens have a spread over their channels, and the norm's sums of these, (tokens, 1)."""
        u = u.double()
        moment = token_moment(u, self._kind)
        alive = moment > DEAD * u.square().mean(1)
        total = u.shape[1] * (moment[alive, None] + self._eps)
        # Small sums are raised to the least one: the relative errors of padding or blank tokens would
        # outweigh all others.
        return alive, total.clamp_min(self.least or 0.0)

    def _chunks(self, u: Tensor) -> Sequence[Tensor]:
        """Return the tokens in pieces, at least one, whose copies in float64 need little memory."""
        return torch.split(u, max(1, _CHUNK // u.shape[1]))

    def choose(self) -> Witnesses:
        """Return the witnesses for all tokens so far; call it on every rank.

        They are added one by one while each lessens the held-out error by 2%. Fixed channels are all
        taken, however little they explain.
        """
        if self._candidates is None:
            # No token had a spread.
            return Witnesses((), (), 0.0, (0.0,))
        sums = self._ranks.summed(self._sums.clone()).cpu()
        robust_sums = sums
        if self._robust:
            robust_sums = self._ranks.summed(self._robust_sums.clone()).cpu()
        limit = self._most
        if (sums[:, -1, -1] <= 0).any():
            # The few tokens are all on one side: nothing can be judged, and no channel is added.
            limit = 0
            sums = sums.sum(0).expand(2, -1, -1) / 2
            robust_sums = robust_sums.sum(0).expand(2, -1, -1) / 2
        fitted = Gram.of(sums[0])
        held_out = Gram.of(sums[1])
        # The channels are chosen; their gains may be fitted to all tokens.
        all_tokens = Gram.of(robust_sums[0] + robust_sums[1])
        nothing = torch.arange(0, device="cpu")
        # Without witnesses there is only the constant, so it is fitted; with a sample it is 0.
        errors = [fitted.squared_error_on(held_out, nothing)]
        if self._takes_all:
            chosen = torch.arange(fitted.count, device="cpu")
            errors.append(self._for_gains(fitted).squared_error_on(held_out, chosen))
        else:
            robust = (Gram.of(robust_sums[0]), Gram.of(robust_sums[1]))
            chosen, errors_of_more = _chosen_one_by_one((fitted, held_out), robust, limit)
            errors += errors_of_more
        if self._unbiased is not None and errors[0] <= errors[1]:
            # The tokens are so alike that a constant is nearer than a sample.
            chosen = nothing
        else:
            all_tokens = self._for_gains(all_tokens)
        return self._witnesses(chosen, all_tokens, errors)

    def _for_gains(self, gram: Gram) -> Gram:
        """Return the sums to fit the gains by: those of a sample are drawn to the unbiased ones."""
        return gram if self._unbiased is None else gram.for_sample(self._unbiased)

    def _witnesses(self, chosen: Tensor, all_tokens: Gram, errors: list[float]) -> Witnesses:
        """Fit the gains of the chosen candidates; ``errors`` are those with 0, 1, 2, ... channels."""
        assert self._candidates is not None
        solved: list[float] = all_tokens.solve(chosen[None])[0].tolist()
        beta = solved.pop()
        channels = []
        gains = []
        for channel, gain in zip(self._candidates[chosen].tolist(), solved, strict=True):
            if self._takes_all:
                # One that adds nothing to the others keeps a gain for its logarithm.
                gain = max(gain, _LEAST_GAIN)
            if gain > 0:
                channels.append(channel)
                gains.append(gain)
        # A larger set may ignore channels, so its error counts as at most that of a smaller one.
        explained = [1 - least / errors[0] for least in accumulate(errors, min)]
        return Witnesses(tuple(channels), tuple(gains), beta, tuple(explained))


def _chosen_one_by_one(
    sums: tuple[Gram, Gram], robust_sums: tuple[Gram, Gram], limit: int
) -> tuple[Tensor, list[float]]:
    """Return at most ``limit`` candidates, chosen by the robust sums, and the errors with 1, 2, ... of them.

    Both sums are of the tokens to fit and of those held out.
    """
    fitted, held_out = sums
    robust_fitted, robust_held_out = robust_sums
    chosen = torch.arange(0, device="cpu")
    last_robust_error = robust_fitted.squared_error_on(robust_held_out, chosen)
    errors = []
    is_worth_it = True
    for tried in robust_fitted.growing_sets(min(max(limit, _REPORTED), fitted.count)):
        errors.append(fitted.squared_error_on(held_out, tried.indices))
        robust_error = robust_held_out.squared_error(tried.indices, tried.solution)
        is_better = robust_error < (1 - _WORTH) * last_robust_error
        last_robust_error = robust_error
        is_worth_it &= is_better and len(tried.indices) <= limit
        if is_worth_it:
            chosen = tried.indices
        elif len(tried.indices) >= _REPORTED:
            # After the first channel that is not worth it, the sets grow only for the errors in the
            # report.
            break
    return chosen, errors
