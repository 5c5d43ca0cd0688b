r"""The rows of the writers that keep a scale channel up to date, by least squares.

At each layer the channel should hold

.. math:: r = \sqrt{S - \sum_{k \in F} x_k^2}

with S the norm's own sum over the token's channels and F the fixed channels. Whatever changed the
token since the layer before was written by linear maps, so r is estimated from the inputs of these
maps, and the estimate is one more row of each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dynorm.fit.lockstep import LayerCall
from dynorm.layers import PointwiseNorm
from dynorm.ranks import Ranks
from dynorm.replace.channel import ScaleChannel, scale_channel_of
from dynorm.replace.converted import replaced_by

# The ridge, as a part of the mean square of the features.
_RIDGE = 1e-3
# The number of tokens whose products are summed in float32.
_CHUNK_TOKENS = 4096
# The least part of the sum that the channel should hold.
_LEAST = 1e-3
_TINY = 1e-30


class Run(Protocol):
    """A batch on its way through the model, which waits at a layer."""

    @property
    def call(self) -> LayerCall | None:
        """The call of a layer that it has come to."""

    def features(self, module: nn.Module) -> Tensor | None:
        """Return the input of a linear layer at its last call, or None."""

    def counted(self, x: Tensor) -> Tensor:
        """Return a value of the stream, or a feature, as (tokens, channels), without padding."""


class _Writer:
    """A linear layer that writes into the stream, and its row for the scale channel."""

    def __init__(self, module: nn.Module, scale: float, channel: int) -> None:
        self.module = module
        self._scale = scale
        weight = module._parameters["weight"]
        bias = module._parameters["bias"]
        assert weight is not None
        assert bias is not None
        # The weight of transformers' Conv1D is transposed.
        values = weight.detach()
        self.row = values[channel] if isinstance(module, nn.Linear) else values[:, channel]
        self._bias = bias.detach()[channel : channel + 1]

    @property
    def width(self) -> int:
        """The number of features that it reads."""
        return len(self.row)

    def clear_(self) -> None:
        """Write nothing into the channel."""
        self.row.zero_()
        self._bias.zero_()

    def set_(self, row: Tensor) -> None:
        """Set the row, and the constant that is its last number, to make a change of the channel."""
        row = row / self._scale
        self.row.copy_(row[:-1])
        self._bias.copy_(row[-1:])

    def change(self, features: Tensor) -> Tensor:
        """Return the change of the channel for features (..., H), as the layer computes it."""
        row = self.row.to(features.dtype)
        return self._scale * (features @ row + self._bias.to(features.dtype))


@dataclass
class _Site:
    """One layer that reads the channel, and the writers since the layer before."""

    channel: ScaleChannel
    eps: float
    writers: list[_Writer]
    is_fitted: bool = False

    def wanted(self, x: Tensor) -> Tensor:
        """Return the value r that the channel of each token (tokens, C) should have."""
        squares = x.square()
        squares[:, self.channel.channel] = 0.0
        total = squares.sum(1) + x.shape[1] * self.eps
        rest = total - squares[:, list(self.channel.fixed)].sum(1)
        return torch.maximum(rest, _LEAST * total).sqrt()


class ScaleRows:
    """Fits the rows of the writers of scale channels, layer after layer."""

    def __init__(self, model: nn.Module, layers: Iterable[PointwiseNorm], ranks: Ranks) -> None:
        self._ranks = ranks
        self._sites: dict[PointwiseNorm, _Site] = {}
        # Paths of the writers whose rows stay 0, because no token was followed through them.
        self.not_followed: list[str] = []
        for layer in layers:
            norm = replaced_by(layer)
            channel = None if norm is None else scale_channel_of(norm.module)
            if norm is None or channel is None:
                continue
            writers = []
            for writer in channel.writers:
                module = model.get_submodule(writer.path)
                writers.append(_Writer(module, writer.scale, channel.channel))
            self._sites[layer] = _Site(channel, norm.site.eps, writers)

    @property
    def modules(self) -> list[nn.Module]:
        """The linear layers whose rows are fitted."""
        modules = []
        for site in self._sites.values():
            modules += [writer.module for writer in site.writers]
        return modules

    @torch.no_grad()
    def clear_(self) -> None:
        """Write nothing into the channels: the rows of an earlier calibration go."""
        for site in self._sites.values():
            for writer in site.writers:
                writer.clear_()

    @torch.no_grad()
    def fit_(self, layer: PointwiseNorm, runs: Sequence[Run]) -> None:
        """Fit the rows before a layer to the tokens of the runs that wait at it, and correct these.

        The rows are fitted once, to the first tokens: the runs that follow come with them.
        """
        site = self._sites.get(layer)
        if site is None or site.is_fitted or not site.writers:
            return
        site.is_fitted = True
        inputs = []
        for run in runs:
            inputs.append([run.features(writer.module) for writer in site.writers])
        rows, is_followed = self._solve(site, runs, inputs)
        if not is_followed:
            self.not_followed += [writer.path for writer in site.channel.writers]
        for writer, row in zip(site.writers, rows, strict=True):
            writer.set_(row)
        for run, features in zip(runs, inputs, strict=True):
            assert run.call is not None
            x = run.call.x
            for writer, value in zip(site.writers, features, strict=True):
                if value is not None and _has_same_tokens(value, x):
                    change = writer.change(value).reshape(x.shape[:-1])
                    # The token itself and not a copy, because the model goes on with it.
                    x[..., site.channel.channel] += change

    def _solve(
        self, site: _Site, runs: Sequence[Run], inputs: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Tensor], bool]:
        """Return each writer's row with its constant, and whether a token was followed; if not, they are 0."""
        widths = [writer.width for writer in site.writers]
        size = sum(widths) + 2
        products = torch.zeros(size, size, dtype=torch.float64, device=site.writers[0].row.device)
        for run, features in zip(runs, inputs, strict=True):
            assert run.call is not None
            values = [value for value in features if value is not None]
            # A layer on some tokens, such as the first one, does not show which they are.
            is_followed = all(_has_same_tokens(value, run.call.x) for value in values)
            if len(values) < len(features) or not is_followed:
                continue
            x = run.counted(run.call.x)
            columns = [run.counted(value) for value in values]
            if any(len(column) != len(x) for column in columns):
                continue
            wanted = site.wanted(x)
            change = wanted - x[:, site.channel.channel]
            table = torch.cat([*columns, torch.ones_like(x[:, :1]), change[:, None]], 1)
            # The error that matters is the relative one.
            products += _products(table / wanted[:, None])
        products = self._ranks.summed(products)
        gram = products[:-1, :-1]
        # The sum of the squared weights of the tokens.
        count = float(gram[-1, -1])
        # The ridge is on the features, and not on the constant.
        ridge = _RIDGE * gram.diagonal()[:-1].mean()
        gram.diagonal()[:-1] += ridge
        gram.diagonal().clamp_min_(_TINY)
        solution = torch.linalg.solve(gram, products[:-1, -1])
        rows = []
        for part in torch.split_with_sizes(solution[:-1], widths):
            rows.append(torch.cat([part, part.new_zeros(1)]))
        # The layers' constants add up, so that one of them is enough.
        rows[-1][-1] = solution[-1]
        return rows, count > 0


def _has_same_tokens(features: Tensor, x: Tensor) -> bool:
    """Return whether features and a value of the stream are of the same tokens, in the same order.

    A model may flatten its tokens between the two, as OPT does, but (batch, time) and (time, batch)
    are different orders.
    """
    tokens = features.shape[:-1]
    tokens_of_x = x.shape[:-1]
    if tokens == tokens_of_x:
        return True
    is_flat = len(tokens) == 1 or len(tokens_of_x) == 1
    return is_flat and tokens.numel() == tokens_of_x.numel()


def _products(table: Tensor) -> Tensor:
    """Return the products of all columns of a table (tokens, columns), in float64."""
    columns = table.shape[1]
    products = torch.zeros(columns, columns, dtype=torch.float64, device=table.device)
    for first in range(0, len(table), _CHUNK_TOKENS):
        part = table[first : first + _CHUNK_TOKENS]
        products += part.T @ part
    return products
