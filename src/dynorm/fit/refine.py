"""Joint refinement: the constants of all layers together, by gradient steps on every site's squared error."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from dynorm.arguments import check_count, check_positive, upcast
from dynorm.batches import Batch, call, iterate, token_masks
from dynorm.broadcast import layers_from_first_rank_
from dynorm.errors import DataError, ModelError
from dynorm.fit.site_errors import require_gradients, site_errors
from dynorm.guard import (
    autocast,
    recomputing,
    require_plain_model,
    require_trainable,
    unchanged_on_error,
    undisturbed,
)
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.layers.groups import constant_factors
from dynorm.plain import Plain
from dynorm.replace.converted import require_layers, warn_of_defaults
from dynorm.replace.original import Outputs, norm_outputs, recorded


@dataclass(frozen=True)
class RefinementReport(Plain):
    """The result of ``refine_``.

    Args:
        steps: how many gradient steps were taken.
        first_error: the mean relative error of the sites before the first step.
        last_error: the same after the last step, on the same batches; never larger. It is equal if
            the steps did not help, and the layers have their old constants.
    """

    steps: int
    first_error: float
    last_error: float

    def __str__(self) -> str:
        """Return the report as a line."""
        errors = f"mean site error {self.first_error:.3f} -> {self.last_error:.3f}"
        if self.last_error == self.first_error:
            errors += "; the steps did not help, and the old constants are put back"
        return f"{self.steps} steps of joint refinement: {errors}"


def refine_(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int = 50,
    lr: float = 3e-3,
) -> RefinementReport:
    r"""Refine the constants, weights and biases of all point-wise layers together, in place.

    :func:`calibrate_` fits one site at a time and cannot know the cost of an error further on. Here
    all sites are fitted at once: the loss is the mean over the sites of
    ``|f(x) - y|^2 / |y - mean y|^2``, where y is the norm's output in the original model. Each
    batch is one step of Adam on the parameters of the point-wise layers only. No other weight moves
    and no label is needed, so this is still calibration. Each step costs a forward pass of the
    original and a forward and backward pass of the converted model.

    The error is measured before the steps and after them, on the same batches. If the steps have
    not made it smaller, the old constants are put back, and the report says so (more steps or a
    lower ``lr`` may help then). So the error never grows. Each measurement costs a forward pass of
    both models over these batches: two take about as long as one step per batch.

    Under torch.distributed with an initialized group, call it on every rank: rank 0 refines on its
    batches, and the others get its layers.

    Args:
        model: a model that :func:`convert_` converted and :func:`calibrate_` calibrated.
        batches: tensors, tuples or dicts, as for :func:`calibrate_`. At most one per step is read
            and kept; if there are fewer, they are used again.
        steps: how many gradient steps.
        lr: the first learning rate; it warms up over a tenth of the steps and then falls to 0 as a
            cosine.

    Returns:
        The number of steps and the mean relative error before and after, on the same batches.

    Raises:
        ArgumentError: ``steps`` is not a positive integer, or ``lr`` not positive.
        ModelError: the model has no point-wise layer, or one whose norm is not known (a loaded
            model), or one that is still the norm (annealed, at t = 0), whose constants do not influence the
            outputs; or its forward records no gradients.
        DataError: no batch, a wrong one or one without tokens, or a loss that is not finite. The
            parameters are then as they were.

    Warns:
        CalibrationWarning: layers have default constants.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
        >>> data = [torch.randn(64, 8) for _ in range(4)]
        >>> _ = dynorm.calibrate_(model, data)
        >>> dynorm.refine_(model, data, steps=8).steps
        8
    """
    steps = check_count("steps", steps)
    check_positive("lr", lr)
    require_plain_model(model)
    layers = list(require_layers(model, with_norms=True).values())
    require_trainable(model)
    for layer in layers:
        if isinstance(layer, AnnealedNorm) and layer.position == 0:
            raise ModelError(
                "a layer must be point-wise for its constants to be refined, but some are "
                "annealed ones at t = 0, which is the norm: convert_ to the layer they end as, "
                "or call set_anneal_ first"
            )
    warn_of_defaults(model)

    def work() -> RefinementReport:
        used = list(islice(iterate(batches), steps))
        with (
            # In inference mode nothing has a gradient.
            torch.inference_mode(False),
            undisturbed(model, evaluate=True),
            _only_trainable(model, layers),
            autocast(model, bf16=False),
        ):
            return _refine(model, layers, used, steps, lr)

    return layers_from_first_rank_(model, work)


@contextmanager
def _only_trainable(model: nn.Module, layers: list[PointwiseNorm]) -> Iterator[None]:
    """Let only the parameters of these layers require gradients while the context lasts."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.requires_grad_(False)
        for layer in layers:
            layer.requires_grad_(True)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _refine(
    model: nn.Module,
    layers: list[PointwiseNorm],
    batches: list[Batch],
    steps: int,
    lr: float,
) -> RefinementReport:
    """Take the steps, and put the old constants back if the error did not fall."""
    parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
    first = _mean_error(model, batches)
    if not math.isfinite(first):
        raise DataError(
            f"the mean site error must be finite, but is {first}: call calibrate_ first, or look "
            "for an overflow"
        )
    with unchanged_on_error(layers) as put_back:
        _descend(model, layers, parameters, batches, steps, lr)
        last = _mean_error(model, batches, finite=False)
        # NaN is not below, so it counts as worse.
        if last < first:
            return RefinementReport(steps, first, last)
        put_back()
        return RefinementReport(steps, first, first)


def _mean_error(model: nn.Module, batches: list[Batch], *, finite: bool = True) -> float:
    """Return the root of the mean loss of the batches; DataError if ``finite`` and a loss is not."""
    total = 0.0
    with undisturbed(model):
        # A model that draws numbers draws the same ones each time.
        torch.manual_seed(0)
        for number, batch in enumerate(batches):
            loss = _loss(model, batch, norm_outputs(model, batch))
            if finite:
                _require_finite("loss", loss, f"batch {number}")
            total += float(loss)
    return math.sqrt(total / len(batches))


def _loss(model: nn.Module, batch: Batch, targets: Outputs) -> Tensor:
    """Return the mean of the squared errors of the sites that a batch reaches; ``targets`` are the norms' outputs."""
    with recorded({layer: layer for layer in targets}) as outputs:
        call(model, batch)
    require_gradients(model, outputs)
    return site_errors(targets, outputs, token_masks(batch)).mean()


def _descend(
    model: nn.Module,
    layers: list[PointwiseNorm],
    parameters: list[nn.Parameter],
    batches: list[Batch],
    steps: int,
    lr: float,
) -> None:
    """Take the steps of Adam."""
    rates: dict[nn.Parameter, float] = {}
    for layer in layers:
        rates |= constant_factors(layer, log_factor=1.0)
    # In half precision small steps would be lost, and Adam's eps would be 0.
    masters = [nn.Parameter(upcast(p.detach()).clone()) for p in parameters]
    options = []
    for parameter, master in zip(parameters, masters, strict=True):
        options.append({"params": [master], "lr": lr * rates.get(parameter, 1.0)})
    optimizer = torch.optim.Adam(options, lr=lr)
    warm_up = max(1, steps // 10)

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / warm_up) * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, batch in enumerate(islice(cycle(batches), steps)):
        gradients = _gradients(model, parameters, batch, step)
        for master, gradient in zip(masters, gradients, strict=True):
            # Without a gradient Adam leaves it as it is.
            master.grad = None if gradient is None else gradient.to(master.dtype)
        _require_finite("gradient", torch.nn.utils.clip_grad_norm_(masters, 1.0), f"step {step}")
        # With another default device torch 2.10 would count its steps there.
        with torch.device("cpu"):
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)


def _gradients(
    model: nn.Module, parameters: list[nn.Parameter], batch: Batch, step: int
) -> tuple[Tensor | None, ...]:
    """Return the gradient of a batch's loss by each parameter; None if it does not depend on it."""
    targets = norm_outputs(model, batch)
    with torch.enable_grad(), recomputing(model):
        loss = _loss(model, batch, targets)
    _require_finite("loss", loss, f"step {step}")
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _require_finite(what: str, value: Tensor, place: str) -> None:
    if not value.isfinite():
        raise DataError(
            f"the {what} must be finite, but is {value.item()} in {place}: lower lr, call "
            "calibrate_ first, or look for NaN in the batch"
        )
