"""The rows of reports: one record per norm."""

from dataclasses import dataclass, field

from dynorm.family import FAMILY
from dynorm.report.values import CurveFit, Picture

# An activation is called massive if its channel makes a token larger than usual by this factor.
_MASSIVE = 3.0


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """One replaced norm.

    Args:
        path: the path of the norm.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        layer: the layer that replaced the norm: "dyisru", "dyt", "derf" or "linear".
        error_now: the error of the layer in the converted model against the norm in the original:
            root of the squared distance of their outputs over that of the norm's outputs from their
            channel's mean. 1 is as bad as a constant. None if the two cannot be paired.
        beta: the layer's constant, as the inverse square of its slope (if each channel has one,
            their median).
        witnesses: the channels that the layer reads besides each value's own.
        annealing: whether the layer is still a norm in part.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    layer: str
    error_now: float | None
    beta: float
    witnesses: tuple[int, ...]
    annealing: bool = False


@dataclass(frozen=True, kw_only=True)
class InspectedSite:
    """One norm before its replacement.

    The core of a norm is its output without weight and bias: ``(x - mean) / sigma`` or ``x / rms``.

    Args:
        path: the path of the norm.
        kind: "layernorm" or "rmsnorm".
        channels: C.
        tokens: how many tokens the norm saw, padding not counted.
        outlier: the largest value of the core: ``|x - mean|`` in sigmas of its own token, at most
            sqrt(C - 1) (for an RMSNorm ``|x|`` in the token's rms, at most sqrt(C)).
        sigma_spread: standard deviation of the natural logarithm of the tokens' sigma (an RMSNorm's
            rms). At 0 all tokens are alike, and a constant serves as well as the norm; at 0.5 they
            commonly differ by a factor of 1.6.
        core: curves of one constant, fitted to a sample of the core's values.
        outliers: the same, fitted only to outliers: the channel of each token that is farthest from
            the mean (for an RMSNorm from 0), as in section 4.2.
        picture: the points of its picture; not in the JSON of a report.
        largest: sigma (an RMSNorm's rms) of the largest token over the typical one.
        channel: the largest channel of that token.
        share: the part of its sum of squares that this channel holds.
        explained: the share of the variation of the tokens' sizes that the best 1 and 4 channels
            explain; a constant explains 0.
    """

    path: str
    kind: str
    channels: int
    tokens: int
    outlier: float
    sigma_spread: float
    core: CurveFit = field(repr=False)
    outliers: CurveFit = field(repr=False)
    picture: Picture = field(repr=False)
    largest: float
    channel: int
    share: float
    explained: dict[int, float]

    def caption(self) -> str:
        """Return the relative errors of the curves."""
        return " · ".join(f"{FAMILY[name].title} {e:.3f}" for name, e in self.core.errors.items())

    @property
    def massive(self) -> bool:
        """Whether one channel holds most of the largest token, and that is over 3 times the usual size."""
        return self.largest > _MASSIVE and self.share > 0.5

    @property
    def ratio(self) -> float:
        """Return DyT's error on outliers over DyISRU's: above 1 if the paper's claim holds."""
        return self.outliers.errors["dyt"] / max(self.outliers.errors["dyisru"], 1e-300)
