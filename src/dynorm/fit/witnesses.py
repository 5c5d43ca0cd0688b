"""Choose the witnesses of a site: the few channels from whose squares a token's size can be estimated."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynorm.fit.nonnegative import Array, nonnegative_least_squares
from dynorm.functional import mean_square
from dynorm.theory import norm_numerator

# The number of channels to choose from: those whose share of the token's sum varies most.
_CANDIDATES = 64
# A further channel must lessen the squared error by this part. The best of 64 channels of noise
# lessens it by about 8 / tokens, so with few tokens it must do more.
_WORTH = 0.02
_NOISE = 12.0
# The power of its sum by which a large token counts more. At 1/2 the small tokens of
# all-MiniLM-L6-v2 lose more than the large ones win; at 0 a channel that is massive on a few tokens
# can be missed.
_LARGE = 0.2
# A variance or a squared error below this part of the mean square is rounding, about 1e-6 of the
# size.
DEAD = 1e-12
# A sum below this part of the typical one is raised to that part: the relative errors of padding or
# blank tokens would outweigh all others.
_SMALL = 0.25
# The number of values that are copied to float64 at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Witnesses:
    """The witnesses of one site, and how well a token's size follows from them."""

    channels: tuple[int, ...]  # their positions, the most useful one first
    gains: tuple[float, ...]  # the weight of each one's square
    beta: float  # the constant that replaces the rest of the sum
    # The share of the variation of the size that 0, 1, 2, ... channels explain. A token with the
    # sum S has the weight S^0.2.
    explained: tuple[float, ...]

    @property
    def explained_by_all(self) -> float:
        """How much of the variation all the chosen channels explain."""
        return self.explained[-1]


@dataclass(frozen=True)
class Gram:
    r"""Sums over tokens from which gains and error of every set of candidates follow.

    The error of a token is :math:`\sum_k g_k a_k + \beta b - 1`, with :math:`a_k = u_k^2 / S` of
    each of K candidates and :math:`b = 1 / S`. These K + 1 are the columns; 1 is the target.
    """

    products: Array  # (K + 1, K + 1): each column times each, the one of the constant last
    targets: Array  # (K + 1): each column times the target
    weight: float  # the sum of the tokens' weights, because the target is 1

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return len(self.targets) - 1

    def solve(self, picked: Sequence[int]) -> tuple[Array, float]:
        """Return the gains of some candidates and the constant, none negative, and their error.

        The error is the mean squared relative one.
        """
        columns = [*picked, self.count]
        products = self.products[np.ix_(columns, columns)]
        targets = self.targets[columns]
        solution = nonnegative_least_squares(products, targets)
        error = float(solution @ (products @ solution - 2 * targets)) + self.weight
        # With tokens of one size only rounding remains, and one processor would find a witness in
        # it where another does not.
        return solution, max(error / self.weight, DEAD)

    def best_addition(self, picked: Sequence[int]) -> tuple[int, float]:
        """Return the candidate that lessens the error most if it is added, and the error then."""
        best = -1
        least = math.inf
        for candidate in range(self.count):
            if candidate in picked:
                continue
            _, error = self.solve([*picked, candidate])
            if error < least:
                best = candidate
                least = error
        return best, least


class TokenScales:
    r"""Running sums from which the witnesses of one site follow, by non-negative least squares.

    .. math:: \min_{\beta, g \ge 0} \sum_t S_t^{1/5} \left( \frac{\beta + \sum_k g_k u_{tk}^2}{S_t} - 1 \right)^2

    with S the norm's own sum: :math:`C (\sigma^2 + \varepsilon)` of a LayerNorm,
    :math:`C (MS + \varepsilon)` of an RMSNorm. The error is relative because the output's is. The
    factor lets a large token count by its size: one that is missed comes out too large, not too
    small, and the relative error hardly shows it.

    At most ``most`` channels are chosen, one by one. The sums are a matrix of 66 x 66 for the 64
    channels whose part :math:`u_k^2 / S` varies most in the first tokens. A sum below ``least``
    counts as that; None takes a quarter of the typical sum of the first tokens.
    """

    def __init__(
        self,
        kind: str,
        eps: float,
        most: int,
        *,
        least: float | None = None,
    ) -> None:
        self._kind = kind
        self._eps = eps
        self._most = most
        self._least = least
        self._tokens = 0
        self._candidates: list[int] = []
        self._sums: Tensor | None = None

    @torch.no_grad()
    def update(self, u: Tensor) -> None:
        """Add tokens (tokens, C)."""
        if self._least is None:
            self._least = self._quarter_of_typical(u)
        if not self._candidates:
            self._candidates = self._most_varying(u)
        for tokens, total in self._chunks(u):
            parts = tokens[:, self._candidates].square() / total
            columns = torch.cat([parts, 1 / total, torch.ones_like(total)], 1)
            columns *= (total**_LARGE).sqrt()
            products = columns.T @ columns
            self._sums = products if self._sums is None else self._sums + products
            self._tokens += len(total)

    def choose(self) -> Witnesses:
        """Return the witnesses for all tokens so far."""
        if self._sums is None:
            # No token had a spread.
            return Witnesses((), (), 0.0, (0.0,))
        # The sums of all products, (K + 2, K + 2), the target last.
        sums = self._sums.cpu().numpy()
        gram = Gram(sums[:-1, :-1], sums[:-1, -1], float(sums[-1, -1]))
        _, error_of_constant = gram.solve([])
        errors = [error_of_constant]
        picked: list[int] = []
        worth = max(_WORTH, _NOISE / self._tokens)
        while len(picked) < min(self._most, gram.count):
            added, error = gram.best_addition(picked)
            if error >= (1 - worth) * errors[-1]:
                break
            picked.append(added)
            errors.append(error)
        solution, _ = gram.solve(picked)
        channels = []
        gains = []
        for candidate, gain in zip(picked, solution[:-1].tolist(), strict=True):
            # One that was chosen early may be of no use next to the later ones.
            if gain > 0:
                channels.append(self._candidates[candidate])
                gains.append(gain)
        explained = [1 - error / errors[0] for error in errors]
        return Witnesses(tuple(channels), tuple(gains), float(solution[-1]), tuple(explained))

    def _quarter_of_typical(self, u: Tensor) -> float | None:
        """Return a quarter of the typical sum, or None if no token has a spread."""
        logarithms = 0.0
        count = 0
        for _, total in self._chunks(u):
            logarithms += float(total.log().sum())
            count += len(total)
        return _SMALL * math.exp(logarithms / count) if count else None

    def _most_varying(self, u: Tensor) -> list[int]:
        """Return the channels whose part of the token's sum varies most."""
        mean = u.new_zeros(u.shape[1], dtype=torch.float64)
        mean_square = mean.clone()
        for tokens, total in self._chunks(u):
            parts = tokens.square() / total
            mean += parts.sum(0) / len(u)
            mean_square += parts.square().sum(0) / len(u)
        variance = mean_square - mean.square()
        channels: list[int] = variance.topk(min(_CANDIDATES, u.shape[1])).indices.tolist()
        return channels

    def _chunks(self, u: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens that have a spread over their channels, and the norm's sums of these, (tokens, 1)."""
        for chunk in torch.split(u, max(1, _CHUNK // u.shape[1])):
            tokens = chunk.double()
            moment = mean_square(norm_numerator(tokens, self._kind))
            alive = moment > DEAD * tokens.square().mean(1)
            total = u.shape[1] * (moment[alive, None] + self._eps)
            if len(total):
                yield tokens[alive], total.clamp_min(self._least or 0.0)
