"""Choose the simplest layer that holds at a site: linear or DyISRU, each without witnesses or with them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from dynorm.family import NAMES
from dynorm.fit.ranks import Ranks
from dynorm.fit.site_fit import SiteFit
from dynorm.layers import DyISRU, LinearControl, PointwiseNorm
from dynorm.replace.specs import Replaced, take_over_

# From the simplest on. A linear layer folds away; with witnesses it leaves one number per token.
_SIMPLEST_FIRST = [
    (f"{NAMES[kind]}{words}", kind, bool(words))
    for kind in (LinearControl, DyISRU)
    for words in ("", " with witnesses")
]
# Over the target's spread. 7 of the 13 norms of all-MiniLM-L6-v2 become lines, at no cost after 200 steps of training;
# at 0.08 there are 10, for 0.001 of rank correlation.
TOLERANCE = 0.05


class SiteChoice:
    """Fits of the layers that a site may get, and their errors on tokens that they were not yet fitted to.

    There is only one, the layer that stands there, unless the norm was replaced by "auto". Each batch measures the
    constants that the batches before gave, so all tokens but the first batch's are held out once, and none is lost to
    the fit.

    The arguments are those of :class:`SiteFit`, where ``layer`` stands at the site, at ``path``, until the choice is
    made, and ``tolerance``: by how much the error of the layer to choose may exceed the best one, over the target's
    spread.
    """

    def __init__(
        self, layer: PointwiseNorm, norm: Replaced, ranks: Ranks, path: str, *, careful: bool, tolerance: float
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
        self._fits = {name: SiteFit(*each, ranks, careful=careful) for name, each in candidates.items()}
        self._squares = torch.zeros(len(self._fits), dtype=torch.float64)
        self._weight_sum = 0.0

    @property
    def fit(self) -> SiteFit:
        """Return the fit of the simplest layer that holds so far."""
        return self._fits[self.name]

    @property
    def name(self) -> str:
        """Return the name of the simplest layer that holds so far."""
        errors = self.errors
        most = min(errors.values()) + self._tolerance
        # Before there is a fit all errors are NaN.
        return next((name for name, error in errors.items() if error <= most), next(iter(errors)))

    @property
    def errors(self) -> dict[str, float]:
        """Return each layer's root of squared error over spread of the target, on held-out tokens if there are any."""
        if not self._weight_sum:
            return {name: fit.error for name, fit in self._fits.items()}
        # The sums of witnessed layers may have started anew; the first one's are of all tokens.
        spread = next(iter(self._fits.values())).spread
        return dict(zip(self._fits, (self._squares / self._weight_sum / spread).sqrt().tolist(), strict=True))

    @torch.no_grad()
    def fit_(self, x: Tensor, y: Tensor, weight: float, run: Callable[[PointwiseNorm], Tensor]) -> None:
        """Measure all layers, as they are, on new tokens, whose outputs ``run`` returns; then fit them to these too."""
        fits = self._fits.values()
        if self.fit.tokens and len(fits) > 1:
            errors = [(run(fit.layer) - y).double().square().sum() for fit in fits]
            sums = self._ranks.summed(torch.stack([*errors, errors[0].new_tensor(len(y))])).cpu()
            self._squares += weight * sums[:-1]
            self._weight_sum += weight * float(sums[-1])
        for fit in fits:
            fit.update(x, y, weight)
            fit.solve_()

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


def _alike(layer: PointwiseNorm, kind: type[PointwiseNorm]) -> PointwiseNorm:
    """Return a layer of another kind, without witnesses, with the same arguments, weight and bias."""
    like = getattr(layer, layer.constants[0])
    new = kind(**layer.config() | {"witnesses": ()}, device=like.device, dtype=like.dtype)
    new.requires_grad_(like.requires_grad)
    for name in ("weight", "bias"):
        setattr(new, name, copy.deepcopy(getattr(layer, name)))
    return new
