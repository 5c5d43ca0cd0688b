"""The least-squares fit of one point-wise layer to the norm it replaces, streamed: memory O(C), however many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dynorm import functional
from dynorm.fit.ranks import Ranks
from dynorm.layers import AnnealedNorm, LinearControl, PointwiseNorm
from dynorm.theory import leave_one_out_beta, leave_one_out_square_sum

# Candidates for beta, in units of the closed form's: from a tenth, where all but the smallest values saturate, to
# a thousand, where the function is a straight line.
_DECADES = (-1.0, 3.0)
_CANDIDATES = 17
# Least squares shrinks what it cannot predict; site after site the shrinkage multiplies. Half of it is given back.
_GIVE_BACK = 0.5
# A variance below this part of the mean square is rounding: about 1e-6 of the size, that is float32's resolution.
_DEAD = 1e-12
# So many values at a time stay in the cache of a CPU core.
_CHUNK = 1 << 18
_TINY = torch.finfo(torch.float64).tiny


def as_tokens(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return ``x`` as a matrix (tokens, C) in at least float32, the channel axes last."""
    dims = (dim,) if isinstance(dim, int) else dim
    last = torch.movedim(x, dims, tuple(range(-len(dims), 0)))
    tokens = last.reshape(-1, math.prod(last.shape[-len(dims) :]))
    return tokens if tokens.dtype == torch.float64 else tokens.float()


def own_betas(x: Tensor, kind: str, eps: float) -> Tensor:
    """Return, for each channel of tokens (tokens, C), the beta with which DyISRU would be the norm (closed forms 2, 3).

    Args:
        x: the tokens.
        kind: "layernorm" or "rmsnorm".
        eps: the norm's eps.
    """
    return (leave_one_out_beta if kind == "layernorm" else leave_one_out_square_sum)(x, eps=eps)


class SiteFit:
    r"""Running sums from which the constants of one layer follow in closed form.

    For each candidate beta of a grid and each channel, with f the layer's function without affine map and y the
    target, the sums of f, f^2, f y, y and y^2 are kept. From them follow, per channel, the weight and bias of
    least squares and the residual; the beta with the smallest residual wins, for all channels together or one
    by one. The grid is centred on closed form 5 with the leave-one-out variance, ``exp(mean log(C v_i))``.

    Args:
        layer: the layer to be fitted; its affine map decides what is fitted beside beta.
        kind: "layernorm" or "rmsnorm": which leave-one-out statistic beta starts from, and whether there is a centre.
        eps: the norm's eps.
        ranks: the processes over which to sum, where there are several: each adds its own tokens, at the same time.
    """

    def __init__(self, layer: PointwiseNorm, kind: str, eps: float, ranks: Ranks | None = None) -> None:
        self.layer = layer
        self._ranks = ranks if ranks is not None and ranks.size > 1 else None
        self.kind = kind
        self.eps = eps
        self.tokens = 0
        self._weight_sum = 0.0
        self._betas: Tensor | None = None
        self._residual: Tensor | None = None

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, weight: float = 1.0) -> None:
        """Add tokens; until one has a spread over its channels, nothing can be fitted and nothing is added.

        Args:
            x: input of the layer, (tokens, C), finite.
            y: what the layer should return, (tokens, C).
            weight: how much these tokens count.
        """
        if self._betas is None:
            self._start(x, y)
        if self._betas is None:
            return
        count = self._total(len(x))
        self.tokens += count
        self._weight_sum += weight * count
        sums = self._sums if self._ranks is None else torch.zeros_like(self._sums)
        size = max(1, _CHUNK // x.shape[1]) if x.device.type == "cpu" else max(1, len(x))
        for start in range(0, len(x), size):
            self._add(sums, x[start : start + size], y[start : start + size], weight)
        if self._ranks is not None:
            self._sums += self._ranks.summed(sums)

    def _add(self, sums: Tensor, x: Tensor, y: Tensor, weight: float) -> None:
        y = y - self._y0
        sums[0, 0] += weight * y.sum(0)
        sums[0, 1] += weight * y.square().sum(0)
        for row, f in enumerate(self._functions(x), start=1):
            f = f - self._f0[row - 1]
            sums[row, 0] += weight * f.sum(0)
            sums[row, 1] += weight * f.square().sum(0)
            sums[row, 2] += weight * (f * y).sum(0)

    def _total(self, count: int) -> int:
        """A number of tokens, of all ranks."""
        if self._ranks is None:
            return count
        return int(self._ranks.summed(torch.tensor([count], device=next(self.layer.parameters()).device)))

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        """The mean over tokens of each (tokens, C), of all ranks: one sum over the ranks for all of them."""
        if self._ranks is None:
            return torch.stack([each.mean(0) for each in values])
        rows = [torch.cat([each.double().sum(0), each.new_tensor([len(each)], dtype=torch.float64)]) for each in values]
        sums = self._ranks.summed(torch.stack(rows))
        return sums[:, :-1] / sums[:, -1:]

    @torch.no_grad()
    def solve_(self) -> None:
        """Set the layer's constants, weight and bias to the best of all tokens so far."""
        if self._betas is None:
            return
        slope, offset, residual = self._least_squares()
        best = self._best(residual)
        channel = torch.arange(residual.shape[1], device=residual.device)
        shape = self.layer.normalized_shape
        betas = self._betas[best]
        self.layer.fill_slope_(betas.reshape(shape) if self.layer.per_channel else betas[:1])
        if self.layer.weight is not None:
            self.layer.weight.copy_(slope[best, channel].reshape(shape))
        if self.layer.bias is not None:
            self.layer.bias.copy_(offset[best, channel].reshape(shape))
        self._residual = residual[best, channel]

    @property
    def error(self) -> float:
        """Root of the residual over the spread of the target, at the last solution; NaN before there is one."""
        if self._residual is None:
            return math.nan
        y, yy = self._sums[0, :2] / self._weight_sum
        spread = (yy - y * y).sum() if self.layer.bias is not None else yy.sum()
        return float((self._residual.sum() / spread.clamp_min(_TINY)).sqrt())

    def _start(self, x: Tensor, y: Tensor) -> None:
        """Choose centre and candidates by the first tokens that have a spread over their channels."""
        alive = x[self._statistic(x, 0.0).amax(1) > _DEAD * x.square().sum(1)] if len(x) else x
        if not self._total(len(alive)):
            return
        beta = self._statistic(alive, self.eps)
        # Without eps, the only channel of a token that is not 0 has a beta of 0.
        log_beta = self._mean([beta.clamp_min(_DEAD * beta.amax(1, keepdim=True)).log()]).mean()
        grid = torch.logspace(*_DECADES, _CANDIDATES, dtype=torch.float64, device=x.device)
        if isinstance(self.layer, LinearControl) and self.layer.weight is not None:
            # Its weight takes the slope; beta would only be a second name for it.
            grid = grid.new_ones(1)
        self._closed_form = int((grid.log().abs()).argmin())
        self._betas = grid * log_beta.double().exp()
        self._center = self._set_center_(x)
        self._start_sums(x, y)

    def _statistic(self, x: Tensor, eps: float) -> Tensor:
        return own_betas(x, self.kind, eps)

    def _set_center_(self, x: Tensor) -> Tensor:
        """Set the layer's centre, and what else is not fitted, and return the centre as the layer's dtype holds it."""
        for name in self.layer.constants[1:]:
            getattr(self.layer, name).zero_()
        if self.layer.center is None:
            return x.new_zeros(())
        self.layer.center.fill_(self._mean([x]).mean() if self.kind == "layernorm" else 0.0)
        return self.layer.center.flatten()[0].to(x.dtype)

    def _start_sums(self, x: Tensor, y: Tensor) -> None:
        layer, channels = self.layer, x.shape[1]
        # In the layer's dtype: what is fitted is what will be computed.
        dtype = getattr(layer, layer.constants[0]).dtype
        self._probe = type(layer)(channels, elementwise_affine=False, scale=layer.scale, device=x.device, dtype=dtype)
        self._weight = None if layer.weight is None else layer.weight.detach().double().flatten()
        # Sums of differences from the first means keep the digits that sums of squares would lose.
        shifts = layer.bias is not None
        self._y0 = self._mean([y])[0].to(y.dtype) * shifts
        self._f0 = self._mean(self._functions(x)).to(x.dtype) * shifts
        # In the first row y and y^2, then for each candidate f, f^2 and f y: one tensor, summed over ranks at once.
        self._sums = torch.zeros(1 + len(self._f0), 3, channels, dtype=torch.float64, device=x.device)

    def _functions(self, x: Tensor) -> Iterator[Tensor]:
        assert self._betas is not None
        centred = x - self._center
        for beta in self._betas:
            self._probe.fill_slope_(beta)
            yield self._probe(centred)

    def _best(self, residual: Tensor) -> Tensor:
        """The best candidate of each channel; the closed form's where no other is better."""
        score = residual if self.layer.per_channel else residual.sum(1, keepdim=True).expand_as(residual)
        lowest, best = score.min(0)
        return best.masked_fill(score[self._closed_form] <= lowest * (1 + 1e-6), self._closed_form)

    def _least_squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slope, offset and mean squared residual of every candidate and channel, (candidates, C)."""
        f, ff, fy = (self._sums[1:] / self._weight_sum).unbind(1)
        y, yy = self._sums[0, :2] / self._weight_sum
        if self._weight is None:
            return torch.ones_like(f), torch.zeros_like(f), yy - 2 * fy + ff
        if self.layer.bias is None:
            slope, residual = self._slope(ff, fy, yy, ff)
            return slope, torch.zeros_like(f), residual
        mean_f, mean_y = f + self._f0, y + self._y0
        var_f = ff - f * f
        slope, residual = self._slope(var_f, fy - f * y, yy - y * y, var_f + mean_f * mean_f)
        return slope, mean_y - slope * mean_f, residual

    def _slope(self, var_f: Tensor, cov: Tensor, var_y: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of least squares, half its shrinkage given back, and the residual; the norm's if f is constant."""
        assert self._weight is not None
        moves = var_f > _DEAD * square
        slope = torch.where(moves, cov / var_f.clamp_min(_TINY), 0.0)
        residual = (var_y - slope * cov).clamp_min(0)
        # |correlation| is what least squares shrank the slope by.
        correlation = (slope.abs() * (var_f.clamp_min(0) / var_y.clamp_min(_TINY)).sqrt()).clamp(1e-2, 1)
        return torch.where(moves, slope * correlation**-_GIVE_BACK, self._weight), residual


class AnnealFit(SiteFit):
    """The fit of an annealed layer: its function to the core of its norm, for its weight and bias are to stay.

    Args:
        layer: the annealed layer.
        ranks: as for :class:`SiteFit`.
    """

    def __init__(self, layer: AnnealedNorm, ranks: Ranks | None = None) -> None:
        plain = {"normalized_shape": layer.channels, "elementwise_affine": False, "bias": False, "dim": -1}
        config = layer.target_config() | plain
        like = next(layer.parameters())
        super().__init__(
            layer.target(**config, device=like.device, dtype=like.dtype), layer.kind, layer.norm_eps, ranks
        )
        self._annealed = layer

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, weight: float = 1.0) -> None:
        """Add tokens (tokens, C); ``y`` is not looked at."""
        core = (functional.layer_norm if self.kind == "layernorm" else functional.rms_norm)(x, eps=self.eps)
        super().update(x, core, weight)

    @torch.no_grad()
    def solve_(self) -> None:
        """Set the annealed layer's constants to the best of all tokens so far."""
        super().solve_()
        if self.tokens:
            for name, parameter in self.layer.named_parameters():
                mine = self._annealed.get_parameter(name)
                mine.copy_(parameter.reshape(mine.shape))
