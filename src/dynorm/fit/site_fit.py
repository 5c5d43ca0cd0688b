"""The least-squares fit of one point-wise layer to its norm.

The fit is streamed: its memory is O(C), however many tokens there are.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynorm import functional
from dynorm.fit.witnesses import DEAD, TokenScales, Witnesses
from dynorm.layers import AnnealedNorm, LinearControl, PointwiseNorm
from dynorm.replace.converted import Replaced
from dynorm.theory import exact_beta

# Candidates for beta, in units of the first estimate: from a tenth, where all but the smallest
# values saturate, to a thousand, where the function is a straight line.
_DECADES = (-1.0, 3.0)
_PER_DECADE = 4
# With witnesses beta is only the rest of the sum, and is known better.
_WITNESSED_DECADES = (-1.0, 1.0)
# With witnesses, beta is at least this part of the layer's typical sum: its logarithm must exist.
LEAST_BETA = 1e-4
# This number of values stays in the cache of a CPU core.
_CHUNK = 1 << 18
_TINY = torch.finfo(torch.float64).tiny


class Sums:
    """Sums over tokens, for each channel, of targets y and of a layer's function f with each beta.

    If the layer has a bias, y and f are first reduced by their means over the first tokens.
    """

    def __init__(self, candidates: int, like: Tensor) -> None:
        channels = like.shape[1]
        self.weight = 0.0
        self.y = like.new_zeros(channels, dtype=torch.float64)
        self.yy = self.y.clone()
        self.f = like.new_zeros(candidates, channels, dtype=torch.float64)
        self.ff = self.f.clone()
        self.fy = self.f.clone()


@dataclass(frozen=True)
class LeastSquares:
    """The line from the function to the target, of each candidate beta and channel, all (candidates, C)."""

    slope: Tensor
    offset: Tensor
    residual: Tensor  # the mean squared error


class SiteFit:
    r"""Running sums from which the constants of one layer follow in closed form.

    For each candidate beta of a grid and each channel, with f the layer's function without affine
    map and y the target, the sums of f, f^2, f y, y and y^2 are kept. From them follow, per
    channel, the weight and bias of least squares and the residual; the beta with the smallest
    residual of all channels wins. The grid is in units of a first
    estimate: ``exp(mean log(C v_i))``, v_i the leave-one-out variance; with witnesses the constant
    that they leave.

    A layer that may have witnesses gets them first, from :class:`dynorm.fit.witnesses.TokenScales`.
    They are chosen again at updates 1, 2, 4, 8, ..., from all tokens so far. If that changes the
    function, the sums start again from 0.

    Of an annealed layer only the constants are fitted, to the core of its norm.
    """

    def __init__(self, layer: PointwiseNorm, norm: Replaced, path: str = "") -> None:
        self.layer = layer
        self.path = path
        self.order = norm.site.order
        self.kind = norm.site.kind
        self.eps = norm.site.eps
        self.tokens = 0
        self.witnesses: Witnesses | None = None
        self._function: type[PointwiseNorm] = type(layer)
        self._factor: Tensor | None = None
        self._has_bias = False
        if isinstance(layer, AnnealedNorm):
            self._function = layer.target
        else:
            factor = layer.factor()
            if factor is not None:
                self._factor = factor.detach().to(torch.float64, copy=True).flatten()
                self._has_bias = layer.bias is not None
        self._scales: TokenScales | None = None
        allowed = norm.witnesses or len(layer.witness_channels)
        if allowed:
            self._scales = TokenScales(self.kind, self.eps, allowed)
        self._updates = 0
        # The rest of the mean squared error of each channel.
        self._squared_error: Tensor | None = None
        # From the first tokens that have a spread over their channels.
        self._has_started = False
        self._typical: float
        # From each choice of witnesses, and without witnesses from the first tokens.
        self._betas: Tensor
        self._estimate_index: int  # of the first estimate
        self._probe: PointwiseNorm
        self._y0: Tensor
        self._f0: Tensor
        self._sums: Sums

    @torch.no_grad()
    def fit_(self, x: Tensor, y: Tensor, weight: float = 1.0) -> None:
        """Add tokens x, finite, with the outputs y that the layer should return, and set the constants.

        Both are (tokens, C). Each token counts ``weight`` times. Until one has a spread over its
        channels, nothing can be fitted and nothing is added.
        """
        self.update(x, y, weight)
        if self._has_started:
            self._set_()

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, weight: float) -> None:
        """Add tokens to the sums."""
        if isinstance(self.layer, AnnealedNorm):
            core = functional.layer_norm if self.kind == "layernorm" else functional.rms_norm
            y = core(x, eps=self.eps)
        if not self._has_started:
            self._start(x)
        # The mean of no tokens, from which new sums would start, is NaN.
        if not self._has_started or not len(x):
            return
        self._updates += 1
        if self._scales is not None:
            self._scales.update(x)
        # This is true at the updates 1, 2, 4, 8 and so on. Other witnesses than before start new
        # sums. Just before the next choice these hold at least half of all tokens, if updates are
        # equally large.
        if self._updates.bit_count() == 1:
            self._start_sums_(x, y)
        self.tokens += len(x)
        sums = self._sums
        sums.weight += weight * len(x)
        for inputs, targets in zip(self._chunks(x), self._chunks(y), strict=True):
            shifted = targets - self._y0
            sums.y += weight * shifted.sum(0)
            sums.yy += weight * shifted.square().sum(0)
            for k, values in enumerate(self._functions(inputs)):
                f = values - self._f0[k]
                sums.f[k] += weight * f.sum(0)
                sums.ff[k] += weight * f.square().sum(0)
                sums.fy[k] += weight * (f * shifted).sum(0)

    def _set_(self) -> None:
        """Set the layer's constants, weight and bias by the sums."""
        lines = self._least_squares()
        residual = lines.residual
        layer = self.layer
        score = residual.sum(1)
        chosen = int(score.argmin())
        # The first estimate, if another is better only by rounding.
        if score[self._estimate_index] <= score[chosen] * (1 + 1e-6):
            chosen = self._estimate_index
        self._squared_error = residual[chosen]
        layer.set_slope_(self._betas[chosen])
        if self._factor is not None:
            assert layer.weight is not None
            layer.weight.copy_(lines.slope[chosen] - layer.weight_offset)
            if layer.bias is not None:
                layer.bias.copy_(lines.offset[chosen])

    @property
    def error(self) -> float:
        """Return the root of the layer's squared error over the target's spread; NaN before there is a solution."""
        if self._squared_error is None:
            return math.nan
        return math.sqrt(float(self._squared_error.sum()) / self._spread())

    def _spread(self) -> float:
        """Return the target's mean square over tokens, summed over channels; about its mean for a layer with a bias."""
        mean_square = self._sums.yy / self._sums.weight
        if self._has_bias:
            mean = self._sums.y / self._sums.weight
            mean_square = mean_square - mean * mean
        return max(float(mean_square.sum()), _TINY)

    def _start(self, x: Tensor) -> None:
        """Choose the candidates by the first tokens that have a spread over their channels."""
        logarithms = x.new_zeros(x.shape[1], dtype=torch.float64)
        count = 0
        for chunk in self._chunks(x):
            largest = exact_beta(chunk, self.kind).amax(1)
            alive = chunk[largest > DEAD * chunk.square().sum(1)]
            if not len(alive):
                continue
            beta = exact_beta(alive, self.kind, self.eps)
            # Without eps, the only channel of a token that is not 0 has a beta of 0.
            beta = beta.clamp_min(DEAD * beta.amax(1, keepdim=True))
            logarithms += beta.log().sum(0, dtype=torch.float64)
            count += len(alive)
        if not count:
            return
        self._has_started = True
        self._typical = float((logarithms / count).mean().exp())
        self._set_candidates_(*_DECADES, self._typical, x.device)
        for name in self.layer.constants[1:]:
            getattr(self.layer, name).zero_()

    def _start_sums_(self, x: Tensor, y: Tensor) -> None:
        """Start the sums of least squares, after a choice of witnesses; they go on if nothing changes."""
        changed = self._updates == 1
        if self._scales is not None:
            changed = self._choose_witnesses_(self._scales, x)
        if not changed:
            return
        self._probe = self._function(
            x.shape[1],
            elementwise_affine=False,
            scale=self.layer.scale,
            device=x.device,
            dtype=self.layer.first_constant.dtype,
        )
        if self.witnesses is not None:
            self._probe.set_witnesses_(self.witnesses.channels, self.witnesses.gains)
        self._y0 = y.new_zeros(y.shape[1])
        self._f0 = x.new_zeros(len(self._betas), x.shape[1])
        if self._has_bias:
            # Sums of differences from the first means keep the digits that sums of squares would
            # lose.
            self._y0 = self._mean([y])[0].to(y.dtype)
            self._f0 = self._mean(self._functions(x)).to(x.dtype)
        self._sums = Sums(len(self._betas), x)

    def _choose_witnesses_(self, scales: TokenScales, x: Tensor) -> bool:
        """Give the layer the witnesses for all tokens so far; return whether they are others than before."""
        before = self.witnesses
        chosen = scales.choose()
        self.witnesses = chosen
        if (
            before is not None
            and before.channels == chosen.channels
            and before.gains == chosen.gains
        ):
            return False
        self.layer.set_witnesses_(chosen.channels, chosen.gains)
        beta = self._typical
        decades = _DECADES
        if chosen.channels:
            beta = max(chosen.beta, LEAST_BETA * self._typical)
            decades = _WITNESSED_DECADES
        self._set_candidates_(*decades, beta, x.device)
        return True

    def _set_candidates_(
        self, low: float, high: float, estimate: float, device: torch.device
    ) -> None:
        """Set the candidates for beta, from 10^low to 10^high times a first estimate, which is one of them."""
        count = round(_PER_DECADE * (high - low)) + 1
        grid = torch.logspace(low, high, count, dtype=torch.float64, device=device)
        if isinstance(self.layer, LinearControl) and self._factor is not None:
            # Its weight takes the slope; beta would only be a second name for it.
            grid = grid.new_ones(1)
        self._betas = grid * estimate
        self._estimate_index = int(grid.log().abs().argmin())

    def _functions(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the layer's function of tokens for each candidate beta."""
        for beta in self._betas:
            self._probe.set_slope_(beta)
            yield self._probe(x)

    def _chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tokens in pieces that stay in a CPU's cache, and whose copies need little memory."""
        size = _CHUNK // x.shape[1] if x.device.type == "cpu" else len(x)
        return torch.split(x, max(1, size))

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        """Return the mean of each (tokens, C) over the tokens."""
        return torch.stack([tokens.mean(0, dtype=torch.float64) for tokens in values])

    def _least_squares(self) -> LeastSquares:
        """Return the lines of least squares by the sums."""
        sums = self._sums
        y = sums.y / sums.weight
        yy = sums.yy / sums.weight
        f = sums.f / sums.weight
        ff = sums.ff / sums.weight
        fy = sums.fy / sums.weight
        if self._factor is None:
            residual = yy - 2 * fy + ff
            return LeastSquares(torch.ones_like(f), torch.zeros_like(f), residual)
        # A line through the origin: the moments are those about 0.
        mean_f = mean_y = torch.zeros_like(f)
        var_f = ff
        cov = fy
        var_y = yy
        if self._has_bias:
            mean_f = f + self._f0
            mean_y = y + self._y0
            var_f = ff - f * f
            cov = fy - f * y
            var_y = yy - y * y
        # A function that is constant determines no slope: the norm's weight stays.
        varies = var_f > DEAD * (var_f + mean_f * mean_f)
        optimum = torch.where(varies, cov / var_f.clamp_min(_TINY), 0.0)
        residual = (var_y - optimum * cov).clamp_min(0)
        slope = torch.where(varies, optimum, self._factor)
        # The slope that stays has no part in the error: its function does not vary.
        return LeastSquares(slope, mean_y - slope * mean_f, residual)
