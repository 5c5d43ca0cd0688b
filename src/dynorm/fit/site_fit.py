"""The least-squares fit of one point-wise layer to the norm it replaces, and the choice of the simplest that holds.

The fit is streamed: its memory is O(C), however many tokens there are.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dynorm import functional
from dynorm.family import NAMES
from dynorm.fit.witnesses import DEAD, SMALL, TokenScales, Witnesses
from dynorm.layers import AnnealedNorm, DyISRU, LinearControl, PointwiseNorm
from dynorm.ranks import Ranks
from dynorm.replace.specs import Replaced, take_over_
from dynorm.theory import own_betas

# Candidates for beta, in units of the closed form's: from a tenth, where all but the smallest
# values saturate, to a thousand, where the function is a straight line.
_DECADES = (-1.0, 3.0)
_PER_DECADE = 4
# With witnesses beta is measured beside them, and less remains to be found.
_WITNESSED_DECADES = (-1.0, 1.0)
# Of a layer's typical sum: the least constant beside witnesses. A token whose witnesses are all
# small would come out of the layer too large, and in a pre-norm decoder larger from layer to layer;
# a careful fit leaves it a constant.
LEAST, _CAREFUL = 1e-4, 0.3
# Least squares shrinks outputs that it cannot predict, and site after site the shrinkage
# multiplies. Half of it is given back, except to layers that do not repair those before them: they
# had better add less of what is not known.
_GIVE_BACK = 0.5
# So many values at a time stay in the cache of a CPU core.
_CHUNK = 1 << 18
_TINY = torch.finfo(torch.float64).tiny
# From the simplest on. A linear layer folds away; with witnesses it leaves one number per token.
_SIMPLEST_FIRST = [
    (f"{NAMES[kind]}{words}", kind, bool(words))
    for kind in (LinearControl, DyISRU)
    for words in ("", " with witnesses")
]
# Over the target's spread. 7 of the 13 norms of all-MiniLM-L6-v2 become lines, at no cost after 200
# steps of training; at 0.08 there are 10, for 0.001 of rank correlation.
TOLERANCE = 0.05


class SiteFit:
    r"""Running sums from which the constants of one layer follow in closed form.

    For each candidate beta of a grid and each channel, with f the layer's function without affine
    map and y the target, the sums of f, f^2, f y, y and y^2 are kept. From them follow, per
    channel, the weight and bias of least squares and the residual; the beta with the smallest
    residual wins, for all channels together or one by one. The grid is centred on closed form 5
    with the leave-one-out variance, ``exp(mean log(C v_i))``.

    A layer that may have witnesses gets them first, from :class:`dynorm.fit.witnesses.TokenScales`.
    They are chosen anew after 1, 2, 4, 8, ... batches, from all tokens so far; where that changes
    the function, the sums start anew.

    Of an annealed layer only the constants are fitted, to the core of its norm. All ``ranks`` add
    their own tokens, at the same time. A ``careful`` fit rather has outputs too small than too
    large, for layers whose errors add up.
    """

    def __init__(
        self, layer: PointwiseNorm, norm: Replaced, ranks: Ranks, *, careful: bool = False
    ) -> None:
        self.layer = layer
        self.kind, self.eps = norm.site.kind, norm.site.eps
        self.tokens = 0
        self._residual = math.nan
        self._ranks = ranks
        self._function = layer.target if isinstance(layer, AnnealedNorm) else type(layer)
        weight = None if isinstance(layer, AnnealedNorm) else layer.factor()
        self._weight = (
            None if weight is None else weight.detach().to(torch.float64, copy=True).flatten()
        )
        self._has_bias = weight is not None and layer.bias is not None
        self._weight_sum = 0.0
        self._betas: Tensor | None = None
        self._updates = 0
        self._most = norm.witnesses
        self._careful = careful
        self.witnesses: Witnesses | None = None
        # Channels that an earlier calibration chose are chosen anew.
        fixed = None if norm.witnesses else layer.witness_channels or None
        wanted = norm.witnesses or fixed
        self._scales = None
        if wanted:
            count = norm.witnesses if fixed is None else len(fixed)
            self._scales = TokenScales(
                self.kind, self.eps, fixed, self._ranks, robust_for=count if careful else 0
            )

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, weight: float = 1.0) -> None:
        """Add tokens x (tokens, C), finite, with the outputs y that the layer should return, and how much they count.

        Until one has a spread over its channels, nothing can be fitted and nothing is added.
        """
        if isinstance(self.layer, AnnealedNorm):
            y = (functional.layer_norm if self.kind == "layernorm" else functional.rms_norm)(
                x, eps=self.eps
            )
        if self._betas is None:
            self._start(x)
        if self._betas is None:
            return
        self._updates += 1
        counts = self._ranks.exchange(len(x))
        if self._scales is not None:
            # The tokens of one process in the order of the ranks.
            self._scales.update(x - self._center, self.tokens + sum(counts[: self._ranks.rank]))
        # The first tokens, and powers of two: at least half of all tokens are in the last sums.
        if self._updates & (self._updates - 1) == 0:
            self._choose_(x, y)
        self.tokens += sum(counts)
        self._weight_sum += weight * sum(counts)
        sums = torch.zeros_like(self._sums)
        for some, wanted in zip(self._chunks(x), self._chunks(y), strict=True):
            wanted = wanted - self._y0
            sums[0, :2] += torch.stack([wanted.sum(0), wanted.square().sum(0)])
            for row, f, f0 in zip(sums[1:], self._functions(some), self._f0, strict=True):
                f = f - f0
                row += torch.stack([f.sum(0), f.square().sum(0), (f * wanted).sum(0)])
        self._sums += weight * self._ranks.summed(sums)

    @torch.no_grad()
    def solve_(self) -> None:
        """Set the layer's constants, weight and bias to the best for all tokens so far, where there are any."""
        if self._betas is None:
            return
        slope, offset, residual = self._least_squares()
        score = (
            residual
            if self.layer.per_channel
            else residual.sum(1, keepdim=True).expand_as(residual)
        )
        lowest, best = score.min(0)
        # The closed form's beta, where another is better by rounding alone.
        best = best.masked_fill(score[self._closed_form] <= lowest * (1 + 1e-6), self._closed_form)
        channel = torch.arange(residual.shape[1], device=residual.device)
        beta, (weight, bias, left) = (
            self._betas[best],
            (each[best, channel] for each in (slope, offset, residual)),
        )
        self._residual = float(left.sum())
        layer, shape = self.layer, self.layer.normalized_shape
        layer.fill_slope_(beta.reshape(shape) if layer.per_channel else beta[:1])
        if self._weight is not None:
            layer.set_factor_(weight)
            if layer.bias is not None:
                layer.bias.copy_(bias.reshape(shape))

    @property
    def error(self) -> float:
        """Return the root of residual over spread of the target, at the last solution; NaN before there is one."""
        return math.sqrt(self._residual / self.spread) if self.tokens else math.nan

    @property
    def spread(self) -> float:
        """Return the target's mean square over tokens, summed over channels; about its mean for a layer with a bias."""
        y, yy = self._sums[0, :2] / self._weight_sum
        return max(float(((yy - y * y) if self._has_bias else yy).sum()), _TINY)

    def _start(self, x: Tensor) -> None:
        """Choose centre and candidates by the first tokens that have a spread over their channels."""
        layer = self.layer
        log_betas = x.new_zeros(2, x.shape[1], dtype=torch.float64)
        for chunk in self._chunks(x):
            spread = own_betas(chunk, self.kind, 0.0).amax(1)
            alive = chunk[spread > DEAD * chunk.square().sum(1)]
            beta = own_betas(alive, self.kind, self.eps)
            # Without eps, the only channel of a token that is not 0 has a beta of 0.
            if len(alive):
                beta = beta.clamp_min(DEAD * beta.amax(1, keepdim=True))
            log_betas[0] += beta.log().sum(0, dtype=torch.float64)
            log_betas[1] += len(alive)
        log_betas = self._ranks.summed(log_betas)
        if not log_betas[1].any():
            return
        self._typical = (log_betas[0] / log_betas[1]).mean().exp()
        if self._scales is not None:
            self._scales.least = SMALL * float(self._typical)
        self._betas = self._grid(*_DECADES, x) * self._typical
        # With witnesses 0 is the better start (measured: 0.004 of cosine): the bias takes the
        # centre over.
        centred = layer.center is not None and self.kind == "layernorm" and self._scales is None
        center = self._mean([x]).mean() if centred else x.new_zeros(())
        layer.fill_constants_(self._betas[self._closed_form], center)
        # As the layer's dtype holds it: the function that is fitted is the one that will be
        # computed.
        self._center = center if layer.center is None else layer.center.flatten()[0].to(x.dtype)

    def _choose_(self, x: Tensor, y: Tensor) -> None:
        """Give the layer its witnesses, and start the sums of least squares; they go on where nothing changes."""
        layer = self.layer
        if self._scales is not None:
            found = self._scales.choose(self._most)
            before, self.witnesses = self.witnesses, found
            if before is not None and (before.channels, before.gains) == (
                found.channels,
                found.gains,
            ):
                return
            layer.set_witnesses_(found.channels, found.gains)
            # Where the witnesses tell all, the constant beside them is 0: a small one stays, for
            # its logarithm.
            least = (_CAREFUL if self._careful else LEAST) * float(self._typical)
            beta = max(found.beta, least) if found.channels else float(self._typical)
            low, high = _WITNESSED_DECADES if found.channels else _DECADES
            self._betas = (
                self._grid(0.0 if self._careful and found.channels else low, high, x) * beta
            )
            layer.fill_slope_(self._betas[self._closed_form])
        elif self._updates > 1:
            return
        constant = getattr(layer, layer.constants[0])
        self._probe = self._function(
            x.shape[1],
            elementwise_affine=False,
            scale=layer.scale,
            device=x.device,
            dtype=constant.dtype,
        )
        if self.witnesses is not None:
            self._probe.set_witnesses_(self.witnesses.channels, self.witnesses.gains)
        # Sums of differences from the first means keep the digits that sums of squares would lose.
        self._y0 = self._mean([y])[0].to(y.dtype) * self._has_bias
        self._f0 = self._mean(self._functions(x)).to(x.dtype) * self._has_bias
        # In the first row y and y^2, then for each candidate f, f^2 and f y: one tensor, summed
        # over ranks at once.
        self._sums = torch.zeros(
            1 + len(self._f0), 3, x.shape[1], dtype=torch.float64, device=x.device
        )
        self._weight_sum = 0.0

    def _grid(self, low: float, high: float, like: Tensor) -> Tensor:
        """Return candidates for beta in units of a first estimate, whose place is kept."""
        count = round(_PER_DECADE * (high - low)) + 1
        grid = torch.logspace(low, high, count, dtype=torch.float64, device=like.device)
        if isinstance(self.layer, LinearControl) and self._weight is not None:
            # Its weight takes the slope; beta would only be a second name for it.
            grid = grid.new_ones(1)
        self._closed_form = int(grid.log().abs().argmin())
        return grid

    def _functions(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the layer's function of tokens for each candidate beta."""
        assert self._betas is not None
        centred = x - self._center
        for beta in self._betas:
            self._probe.fill_slope_(beta)
            yield self._probe(centred)

    def _chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Return the tokens in pieces that stay in a CPU's cache, and whose copies need little memory."""
        size = _CHUNK // x.shape[1] if x.device.type == "cpu" else len(x)
        return torch.split(x, max(1, size))

    def _mean(self, values: Iterable[Tensor]) -> Tensor:
        """Return the mean of each (tokens, C) over the tokens of all ranks: one exchange for all of them."""
        rows = [
            torch.cat(
                [
                    each.sum(0, dtype=torch.float64),
                    each.new_tensor([len(each)], dtype=torch.float64),
                ]
            )
            for each in values
        ]
        sums = self._ranks.summed(torch.stack(rows))
        return sums[:, :-1] / sums[:, -1:]

    def _least_squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return slope, offset and mean squared residual of every candidate and channel, (candidates, C)."""
        f, ff, fy = (self._sums[1:] / self._weight_sum).unbind(1)
        y, yy = self._sums[0, :2] / self._weight_sum
        if self._weight is None:
            return torch.ones_like(f), torch.zeros_like(f), yy - 2 * fy + ff
        mean_f, mean_y = f + self._f0, y + self._y0
        if not self._has_bias:
            # Through the origin: moments about 0 take the place of those about the mean.
            f = y = mean_f = mean_y = torch.zeros_like(f)
        var_f, cov, var_y = ff - f * f, fy - f * y, yy - y * y
        # A function that is constant says nothing of its slope: the norm's weight stays.
        moves = var_f > DEAD * (var_f + mean_f * mean_f)
        slope = torch.where(moves, cov / var_f.clamp_min(_TINY), 0.0)
        residual = (var_y - slope * cov).clamp_min(0)
        # Least squares shrank the slope by |correlation|.
        correlation = (slope.abs() * (var_f.clamp_min(0) / var_y.clamp_min(_TINY)).sqrt()).clamp(
            1e-2, 1
        )
        slope = torch.where(
            moves, slope * correlation ** -(0.0 if self._careful else _GIVE_BACK), self._weight
        )
        return slope, mean_y - slope * mean_f, residual


class SiteChoice:
    """Fits of the layers that a site may get, and their errors on tokens that they were not yet fitted to.

    There is only one, the layer that stands there, unless the norm was replaced by "auto". Each
    batch measures the constants that the batches before gave, so all tokens but the first batch's
    are held out once, and none is lost to the fit. ``tolerance`` is how far the chosen layer's
    error may lie above the best one, over the target's spread.
    """

    def __init__(
        self,
        layer: PointwiseNorm,
        norm: Replaced,
        ranks: Ranks,
        path: str,
        *,
        careful: bool,
        tolerance: float,
    ) -> None:
        self.path = path
        self._place, self._norm, self._ranks, self._tolerance = layer, norm, ranks, tolerance
        candidates = {NAMES.get(type(layer), ""): (layer, norm)}
        if norm.auto:
            candidates = {
                name: (_alike(layer, kind), norm._replace(witnesses=norm.witnesses * witnessed))
                for name, kind, witnessed in _SIMPLEST_FIRST
                if norm.witnesses or not witnessed
            }
        self._fits = {
            name: SiteFit(*each, ranks, careful=careful) for name, each in candidates.items()
        }
        # The simplest layer that holds so far. The errors are on held-out tokens, if there are any.
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
        self, x: Tensor, y: Tensor, weight: float, run: Callable[[PointwiseNorm], Tensor]
    ) -> None:
        """Measure all layers, as they are, on new tokens, whose outputs ``run`` returns; then fit them to these too."""
        fits = self._fits.values()
        if self.fit.tokens and len(fits) > 1:
            found = [(run(fit.layer) - y).double().square().sum() for fit in fits]
            sums = self._ranks.summed(torch.stack([*found, found[0].new_tensor(len(y))])).cpu()
            self._squares += weight * sums[:-1]
            self._weight_sum += weight * float(sums[-1])
        for fit in fits:
            fit.update(x, y, weight)
            fit.solve_()
        errors = [fit.error for fit in fits]
        if self._weight_sum:
            # The sums of witnessed layers may have started anew; the first one's are of all tokens.
            spread = next(iter(fits)).spread
            errors = (self._squares / self._weight_sum / spread).sqrt().tolist()
        self.errors = dict(zip(self._fits, errors, strict=True))
        most = min(errors) + self._tolerance
        # Before there is a fit all errors are NaN.
        self.name = next((name for name, error in self.errors.items() if error <= most), self.name)
        self.fit = self._fits[self.name]

    @torch.no_grad()
    def settled(self) -> PointwiseNorm:
        """Return the chosen layer, to stand for the one before with its weight and bias, hooks and mode."""
        before, chosen = self._place, self.fit.layer
        if chosen is before or not self.fit.tokens:
            return before
        for name in ("weight", "bias"):
            own, fitted = getattr(before, name), getattr(chosen, name)
            if own is not None:
                # The same parameter, for another module may share it.
                own.copy_(fitted)
                setattr(chosen, name, own)
        tried = ", ".join(f"{name} {error:.3f}" for name, error in self.errors.items())
        take_over_(chosen, before, self._norm._replace(why=f"{self.name}: errors of {tried}"))
        return chosen


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def _alike(layer: PointwiseNorm, kind: type[PointwiseNorm]) -> PointwiseNorm:
    """Return a layer of another kind, without witnesses, with the same arguments, weight and bias."""
    like = getattr(layer, layer.constants[0])
    new = kind(**layer.config() | {"witnesses": ()}, device=like.device, dtype=like.dtype)
    new.requires_grad_(like.requires_grad)
    for name in ("weight", "bias"):
        setattr(new, name, copy.deepcopy(getattr(layer, name)))
    return new
