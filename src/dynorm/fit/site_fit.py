"""The least-squares fit of one point-wise layer to its norm, and the choice of the simplest layer.

The fit is streamed: its memory is O(C), however many tokens there are.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynorm import functional
from dynorm.family import NAMES
from dynorm.fit.witnesses import DEAD, SMALL, TokenScales, Witnesses
from dynorm.layers import AnnealedNorm, DyISRU, LinearControl, PointwiseNorm
from dynorm.ranks import Ranks
from dynorm.replace.converted import Replaced
from dynorm.replace.swap import take_over_
from dynorm.theory import own_betas

# Candidates for beta, in units of the first estimate: from a tenth, where all but the smallest
# values saturate, to a thousand, where the function is a straight line.
_DECADES = (-1.0, 3.0)
_PER_DECADE = 4
# With witnesses beta is only the rest of the sum, and is known better.
_WITNESSED_DECADES = (-1.0, 1.0)
# With witnesses, beta is at least this part of the layer's typical sum. A token whose witnesses are
# all small would come out of the layer too large. If errors add up, it would grow from layer to
# layer, so it is left a larger constant. The witnesses of a sample explain all of the sum, and beta
# must only be positive.
LEAST_BETA = 1e-4
_LEAST_BETA_IF_ERRORS_ADD_UP = 0.3
_LEAST_BETA_OF_SAMPLE = 1e-3
# For the choice of a sample, a token's sum below this part of the typical one counts as that part.
_SMALL_FOR_SAMPLE = 1e-3
# Least squares shrinks outputs that it cannot predict. If errors add up, that is right: the layers
# should add less of the unknown part. Otherwise the shrinkage multiplies site after site, so the
# slope is multiplied by |correlation|^-1/2, which undoes half of it on a log scale.
_GIVE_BACK = 0.5
# This number of values stays in the cache of a CPU core.
_CHUNK = 1 << 18
_TINY = torch.finfo(torch.float64).tiny
# Name, class and whether it has witnesses. A linear layer can be folded away; one with witnesses
# still needs a number per token.
_SIMPLEST_FIRST = [
    ("linear", LinearControl, False),
    ("linear with witnesses", LinearControl, True),
    ("dyisru", DyISRU, False),
    ("dyisru with witnesses", DyISRU, True),
]


class Sums:
    """Sums over tokens, for each channel, of targets y and of a layer's function f with each beta.

    If the layer has a bias, y and f are first reduced by their means over the first tokens. All sums
    are views of one tensor, so that one exchange adds them over the ranks.
    """

    def __init__(self, candidates: int, like: Tensor) -> None:
        channels = like.shape[1]
        self.all = torch.zeros(
            2 + 3 * candidates, channels, dtype=torch.float64, device=like.device
        )
        self.y = self.all[0]
        self.yy = self.all[1]
        by_candidate = self.all[2:].view(3, candidates, channels)
        self.f = by_candidate[0]
        self.ff = by_candidate[1]
        self.fy = by_candidate[2]


@dataclass(frozen=True)
class LeastSquares:
    """The line from the function to the target, of each candidate beta and channel, all (candidates, C).

    Beta is chosen by ``residual``, as if nothing were given back. The report shows
    ``squared_error``.
    """

    slope: Tensor  # of the layer: half of the shrinkage is given back, unless errors add up
    offset: Tensor
    residual: Tensor  # the mean squared error of least squares
    squared_error: Tensor  # the mean squared error of ``slope``


@dataclass(frozen=True)
class Solution:
    """The best constants of one layer, one value per channel in float64."""

    beta: Tensor  # the same in all channels of a layer that has one for all
    weight: Tensor  # the factor of the function
    bias: Tensor
    squared_error: Tensor  # the mean squared error that is left


class SiteFit:
    r"""Running sums from which the constants of one layer follow in closed form.

    For each candidate beta of a grid and each channel, with f the layer's function without affine
    map and y the target, the sums of f, f^2, f y, y and y^2 are kept. From them follow, per
    channel, the weight and bias of least squares and the residual; the beta with the smallest
    residual wins, for all channels together or one by one. The grid is in units of a first
    estimate: ``exp(mean log(C v_i))``, v_i the leave-one-out variance; with witnesses the constant
    that they leave.

    A layer that may have witnesses gets them first, from :class:`dynorm.fit.witnesses.TokenScales`.
    They are chosen again at updates 1, 2, 4, 8, ..., from all tokens so far. If that changes the
    function, the sums start again from 0.

    Of an annealed layer only the constants are fitted, to the core of its norm. All ``ranks`` add
    their own tokens, at the same time. If the layers' ``errors_add_up``, outputs are made too small
    rather than too large.
    """

    def __init__(
        self, layer: PointwiseNorm, norm: Replaced, ranks: Ranks, *, errors_add_up: bool = False
    ) -> None:
        self.layer = layer
        self.kind = norm.site.kind
        self.eps = norm.site.eps
        self.tokens = 0
        self.witnesses: Witnesses | None = None
        self._ranks = ranks
        self._errors_add_up = errors_add_up
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
        # Those that an earlier calibration chose are chosen again.
        fixed = () if norm.witnesses else layer.witness_channels
        if norm.witnesses or fixed:
            self._scales = TokenScales(
                self.kind, self.eps, ranks, norm.witnesses, fixed=fixed, robust=errors_add_up
            )
        self._updates = 0
        self._solution: Solution | None = None
        # From the first tokens that have a spread over their channels.
        self._has_started = False
        self._typical: float
        self._center: Tensor
        # From each choice of witnesses, and without witnesses from the first tokens.
        self._betas: Tensor
        self._estimate_index: int  # of the first estimate
        self._probe: PointwiseNorm
        self._y0: Tensor
        self._f0: Tensor
        self._sums: Sums
        self._weight_sum: float

    @property
    def is_sampled(self) -> bool:
        """Whether the witnesses are a sample of all channels."""
        return self._scales is not None and self._scales.is_sample

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, weight: float, numbers: Tensor) -> None:
        """Add tokens x, finite, with the outputs y that the layer should return, both (tokens, C).

        Each counts ``weight`` times. Until a token has a spread over its channels, nothing can be
        fitted and nothing is added. ``numbers``, the tokens' numbers among those of all ranks,
        decide which are held out.
        """
        if isinstance(self.layer, AnnealedNorm):
            core = functional.layer_norm if self.kind == "layernorm" else functional.rms_norm
            y = core(x, eps=self.eps)
        if not self._has_started:
            self._start(x)
        if not self._has_started:
            return
        counts = self._ranks.exchange(len(x))
        if not any(counts):
            # The mean of no tokens, from which new sums would start, is NaN.
            return
        self._updates += 1
        if self._scales is not None:
            self._scales.update(x - self._center, numbers)
        # This chooses again at the updates 1, 2, 4, 8 and so on. Other witnesses than before start
        # new sums. Just before the next choice the new sums hold at least half of all tokens, if
        # updates are equally large.
        if self._updates.bit_count() == 1:
            self._start_sums_(x, y)
        self.tokens += sum(counts)
        self._weight_sum += weight * sum(counts)
        sums = Sums(len(self._betas), x)
        for inputs, targets in zip(self._chunks(x), self._chunks(y), strict=True):
            shifted = targets - self._y0
            sums.y += shifted.sum(0)
            sums.yy += shifted.square().sum(0)
            for k, values in enumerate(self._functions(inputs)):
                f = values - self._f0[k]
                sums.f[k] += f.sum(0)
                sums.ff[k] += f.square().sum(0)
                sums.fy[k] += (f * shifted).sum(0)
        self._sums.all += weight * self._ranks.summed(sums.all)

    @torch.no_grad()
    def solve_(self) -> None:
        """Set the layer's constants, weight and bias to the best for all tokens so far, if there are any."""
        solution = self._solve()
        if solution is None:
            return
        self._solution = solution
        layer = self.layer
        shape = layer.normalized_shape
        layer.fill_beta_(solution.beta.reshape(shape) if layer.per_channel else solution.beta[:1])
        if self._factor is not None:
            layer.set_factor_(solution.weight)
            if layer.bias is not None:
                layer.bias.copy_(solution.bias.reshape(shape))

    def _solve(self) -> Solution | None:
        if not self._has_started:
            return None
        lines = self._least_squares()
        residual = lines.residual
        score = residual
        if not self.layer.per_channel:
            score = residual.sum(1, keepdim=True).expand_as(residual)
        lowest, chosen = score.min(0)
        # The first estimate, if another is better only by rounding.
        is_as_good = score[self._estimate_index] <= lowest * (1 + 1e-6)
        chosen = chosen.masked_fill(is_as_good, self._estimate_index)
        channel = torch.arange(residual.shape[1], device=residual.device)
        return Solution(
            beta=self._betas[chosen],
            weight=lines.slope[chosen, channel],
            bias=lines.offset[chosen, channel],
            squared_error=lines.squared_error[chosen, channel],
        )

    @property
    def error(self) -> float:
        """Return the root of the layer's squared error over the target's spread; NaN before there is a solution."""
        if self._solution is None:
            return math.nan
        return math.sqrt(float(self._solution.squared_error.sum()) / self.spread)

    @property
    def spread(self) -> float:
        """Return the target's mean square over tokens, summed over channels; about its mean for a layer with a bias."""
        mean_square = self._sums.yy / self._weight_sum
        if self._has_bias:
            mean = self._sums.y / self._weight_sum
            mean_square = mean_square - mean * mean
        return max(float(mean_square.sum()), _TINY)

    def _start(self, x: Tensor) -> None:
        """Choose centre and candidates by the first tokens that have a spread over their channels."""
        layer = self.layer
        logarithms = x.new_zeros(x.shape[1], dtype=torch.float64)
        count = 0
        for chunk in self._chunks(x):
            largest = own_betas(chunk, self.kind, 0.0).amax(1)
            alive = chunk[largest > DEAD * chunk.square().sum(1)]
            beta = own_betas(alive, self.kind, self.eps)
            # Without eps, the only channel of a token that is not 0 has a beta of 0.
            if len(alive):
                beta = beta.clamp_min(DEAD * beta.amax(1, keepdim=True))
            logarithms += beta.log().sum(0, dtype=torch.float64)
            count += len(alive)
        sums = self._ranks.summed(torch.stack([logarithms, torch.full_like(logarithms, count)]))
        if not sums[1].any():
            return
        self._has_started = True
        self._typical = float((sums[0] / sums[1]).mean().exp())
        if self._scales is not None:
            small = _SMALL_FOR_SAMPLE if self.is_sampled else SMALL
            self._scales.least = small * self._typical
        self._set_candidates_(*_DECADES, self._typical, x.device)
        center = x.new_zeros(())
        # With witnesses 0 is the better start (measured: 0.004 of cosine): the bias takes the
        # centre over.
        if layer.center is not None and self.kind == "layernorm" and self._scales is None:
            center = self._mean([x]).mean()
        layer.fill_constants_(self._betas[self._estimate_index], center)
        # As the layer's dtype holds it: the function that is fitted is the one that will be
        # computed.
        self._center = center if layer.center is None else layer.center.flatten()[0].to(x.dtype)

    def _start_sums_(self, x: Tensor, y: Tensor) -> None:
        """Start the sums of least squares, after a choice of witnesses; they go on if nothing changes."""
        if self._scales is None:
            changed = self._updates == 1
        else:
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
        self._weight_sum = 0.0

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
        low, high = _DECADES
        if chosen.channels:
            # If the witnesses explain all, the constant would be 0. A small one stays so that its logarithm exists.
            least = LEAST_BETA
            low, high = _WITNESSED_DECADES
            if scales.is_sample:
                least = _LEAST_BETA_OF_SAMPLE
            elif self._errors_add_up:
                least = _LEAST_BETA_IF_ERRORS_ADD_UP
                low = 0.0
            beta = max(chosen.beta, least * beta)
        self._set_candidates_(low, high, beta, x.device)
        self.layer.fill_beta_(self._betas[self._estimate_index])
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
        centred = x - self._center
        for beta in self._betas:
            self._probe.fill_beta_(beta)
            yield self._probe(centred)

    def _chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tokens in pieces that stay in a CPU's cache, and whose copies need little memory."""
        size = _CHUNK // x.shape[1] if x.device.type == "cpu" else len(x)
        return torch.split(x, max(1, size))

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        """Return the mean of each (tokens, C) over the tokens of all ranks: one exchange for all of them."""
        rows = []
        for tokens in values:
            count = tokens.new_tensor([len(tokens)], dtype=torch.float64)
            rows.append(torch.cat([tokens.sum(0, dtype=torch.float64), count]))
        sums = self._ranks.summed(torch.stack(rows))
        return sums[:, :-1] / sums[:, -1:]

    def _least_squares(self) -> LeastSquares:
        """Return the lines of least squares by the sums."""
        y = self._sums.y / self._weight_sum
        yy = self._sums.yy / self._weight_sum
        f = self._sums.f / self._weight_sum
        ff = self._sums.ff / self._weight_sum
        fy = self._sums.fy / self._weight_sum
        if self._factor is None:
            residual = yy - 2 * fy + ff
            return LeastSquares(torch.ones_like(f), torch.zeros_like(f), residual, residual)
        if self._has_bias:
            mean_f = f + self._f0
            mean_y = y + self._y0
            var_f = ff - f * f
            cov = fy - f * y
            var_y = yy - y * y
        else:
            # A line through the origin: the moments are those about 0.
            mean_f = mean_y = torch.zeros_like(f)
            var_f = ff
            cov = fy
            var_y = yy
        # A function that is constant determines no slope: the norm's weight stays.
        varies = var_f > DEAD * (var_f + mean_f * mean_f)
        optimum = torch.where(varies, cov / var_f.clamp_min(_TINY), 0.0)
        residual = (var_y - optimum * cov).clamp_min(0)
        slope = optimum
        if not self._errors_add_up:
            # The best slope's outputs have |correlation| times the target's spread. The ratio is 0
            # if the target is.
            ratio = torch.where(var_y > _TINY, var_f.clamp_min(0) / var_y.clamp_min(_TINY), 0.0)
            correlation = (slope.abs() * ratio.sqrt()).clamp(1e-2, 1)
            slope = slope * correlation**-_GIVE_BACK
        slope = torch.where(varies, slope, self._factor)
        squared_error = residual + var_f.clamp_min(0) * (slope - optimum).square()
        return LeastSquares(slope, mean_y - slope * mean_f, residual, squared_error)


class SiteChoice:
    """Fits of the layers that a site may get, and their errors on tokens that they were not yet fitted to.

    There is only one, the layer at the site, unless the norm was replaced by "auto". The tokens of
    each :meth:`fit_` first measure the layers as they are, and are then fitted to. So all tokens
    but those of the first call are held out once, and none is lost to the fit. ``place`` is the
    site's number in call order. ``tolerance`` is how far the chosen layer's error may lie above the
    best one, over the target's spread.
    """

    def __init__(
        self,
        layer: PointwiseNorm,
        norm: Replaced,
        ranks: Ranks,
        path: str,
        place: int,
        *,
        errors_add_up: bool,
        tolerance: float,
    ) -> None:
        self.path = path
        self.place = place
        self._layer = layer
        self._norm = norm
        self._ranks = ranks
        self._tolerance = tolerance
        self._fits: dict[str, SiteFit] = {}
        if norm.auto:
            for name, kind, has_witnesses in _SIMPLEST_FIRST:
                if has_witnesses and not norm.witnesses:
                    continue
                count = norm.witnesses if has_witnesses else 0
                self._fits[name] = SiteFit(
                    _of_kind(layer, kind),
                    norm._replace(witnesses=count),
                    ranks,
                    errors_add_up=errors_add_up,
                )
        else:
            name = NAMES.get(type(layer), "")
            self._fits[name] = SiteFit(layer, norm, ranks, errors_add_up=errors_add_up)
        # The simplest layer that is accurate enough so far. The errors are on held-out tokens, if there are any.
        self.name, self.fit = next(iter(self._fits.items()))
        self.errors: dict[str, float] = {}
        self._squares = torch.zeros(len(self._fits), dtype=torch.float64, device="cpu")
        self._weight_sum = 0.0

    @property
    def chooses(self) -> bool:
        """Whether there are several layers to choose from."""
        return len(self._fits) > 1

    @torch.no_grad()
    def fit_(
        self,
        x: Tensor,
        y: Tensor,
        weight: float,
        run: Callable[[PointwiseNorm], Tensor],
        numbers: Tensor,
    ) -> None:
        """Measure all layers, as they are, on new tokens; fit them to these too, and choose one.

        ``run`` returns a layer's outputs for the tokens.
        """
        fits = list(self._fits.values())
        if self.fit.tokens and self.chooses:
            squares = [(run(fit.layer) - y).double().square().sum() for fit in fits]
            count = squares[0].new_tensor(len(y))
            sums = self._ranks.summed(torch.stack([*squares, count])).cpu()
            self._squares += weight * sums[:-1]
            self._weight_sum += weight * float(sums[-1])
        for fit in fits:
            fit.update(x, y, weight, numbers)
            fit.solve_()
        errors = [fit.error for fit in fits]
        if self._weight_sum:
            # Sums of layers with witnesses may have started again; the first one's are of all
            # tokens.
            errors = (self._squares / self._weight_sum / fits[0].spread).sqrt().tolist()
        self.errors = dict(zip(self._fits, errors, strict=True))
        most = min(errors) + self._tolerance
        # Before there is a fit all errors are NaN, and the name stays.
        for name, error in self.errors.items():
            if error <= most:
                self.name = name
                break
        self.fit = self._fits[self.name]

    @torch.no_grad()
    def settle_(self) -> PointwiseNorm:
        """Give the chosen layer the weight and bias, hooks and mode of the one before, and return it."""
        before = self._layer
        chosen = self.fit.layer
        if chosen is before or not self.fit.tokens:
            return before
        for name in ("weight", "bias"):
            parameter = getattr(before, name)
            if parameter is not None:
                # The same parameter, because another module may share it.
                parameter.copy_(getattr(chosen, name))
                setattr(chosen, name, parameter)
        tried = ", ".join(f"{name} {error:.3f}" for name, error in self.errors.items())
        take_over_(chosen, before, self._norm._replace(why=f"{self.name}: errors of {tried}"))
        return chosen


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def _of_kind(layer: PointwiseNorm, kind: type[PointwiseNorm]) -> PointwiseNorm:
    """Return a layer of another kind, without witnesses, with the same arguments, weight and bias."""
    constant = layer.first_constant
    new = kind(**layer.config() | {"witnesses": ()}, device=constant.device, dtype=constant.dtype)
    new.requires_grad_(constant.requires_grad)
    for name in ("weight", "bias"):
        setattr(new, name, copy.deepcopy(getattr(layer, name)))
    return new
