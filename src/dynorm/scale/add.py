"""``add_scale_channel_``: free a channel of a model's residual stream for the size of each token."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import check_count
from dynorm.batches import Batch, arguments, call, iterate
from dynorm.errors import DataError, ModelError, listed
from dynorm.fold.fold import fold_
from dynorm.fold.report import FOLDED, NOTHING
from dynorm.guard import (
    edited_parts,
    require_plain_model,
    require_trainable,
    unchanged_on_error,
    undisturbed,
)
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.outputs import output_tensor
from dynorm.replace.channel import ScaleChannel, set_scale_channel_
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.edits import give_bias_
from dynorm.replace.swap import swap_, take_over_
from dynorm.scale.edit import (
    choose_basis,
    clear_last_,
    fill_tables_,
    rotate_,
    row_writer,
)
from dynorm.stream.find import ResidualStream, find_streams
from dynorm.table import Column, Plain, Table

# How many channels the layers read themselves by default, but at most a quarter of all.
_FIXED = 128
# The axes are chosen on this number of batches at most.
_BATCHES = 8
# In an exact edit the outputs may differ by rounding, relative to their size. In a float64 model a
# norm of transformers still computes in float32.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-3}
_ROUNDING_OF_HALVES = 0.1


@dataclass(frozen=True)
class FreedStream:
    """One residual stream with a scale channel.

    Args:
        norms: the paths of the norms that read it, in call order.
        channel: the position of the scale channel.
        fixed: the number of channels whose squares the layers read from the stream itself.
        fixed_energy: their part of a token's sum of squares, on average.
        lost_energy: the part that was in the direction that became the channel; 0 if the edit is
            exact.
        writers: the linear layers whose row for the channel ``calibrate_`` fits.
    """

    norms: list[str]
    channel: int
    fixed: int
    fixed_energy: float
    lost_energy: float
    writers: list[str]


@dataclass(frozen=True)
class ScaleChannelReport(Plain):
    """The result of ``add_scale_channel_``, one row per residual stream.

    Args:
        streams: those that have a scale channel now.
        refused: the first norm of each other stream, with the reason why it has none.
        change: how far the outputs moved on the first batch, relative to their size.
    """

    streams: list[FreedStream]
    refused: dict[str, str]
    change: float

    def __str__(self) -> str:
        """Return the report as a table."""
        columns: list[str | Column] = [
            "first norm",
            "norms",
            "channel",
            "rows",
            Column("fixed", ".0%", note="part of a token's sum that the layers read themselves"),
            Column("lost", ".2g", note="part that was in the direction of the channel"),
        ]
        rows = []
        for stream in self.streams:
            rows.append(
                (
                    stream.norms[0],
                    len(stream.norms),
                    stream.channel,
                    len(stream.writers),
                    stream.fixed_energy,
                    stream.lost_energy,
                )
            )
        notes = [f"{path}: no scale channel, {reason}" for path, reason in self.refused.items()]
        streams = "1 stream" if len(rows) == 1 else f"{len(rows)} streams"
        title = f"{streams} with a scale channel; the outputs changed by {self.change:.1e}"
        return str(Table(columns, rows, notes, title))


def add_scale_channel_(
    model: nn.Module, batches: Iterable[Batch], *, fixed: int | None = None
) -> ScaleChannelReport:
    r"""Free one channel of each residual stream, in place, so that the network can keep each token's size in it.

    A point-wise layer lacks one number per token, the sum :math:`S = \sum_k x_k^2`. In a pre-norm
    model linear maps write everything that changes the stream, and so they can write a change of S
    too. This call edits the weights and leaves the norms; :func:`convert_` then gives each layer on
    the stream the channel as a witness, and :func:`calibrate_` fits one row of each writer, which
    keeps

    .. math:: x_w \approx \sqrt{S - \sum_{k \in F} x_k^2}

    up to date from layer to layer, F being the ``fixed`` channels. The layer is a
    :class:`dynorm.DyISRU` with the witnesses (w, F):

    .. math:: y_i = \sqrt{C} \, x_i / \sqrt{\beta + g_w x_w^2 + \sum_{k \in F} g_k x_k^2 + x_i^2}

    The edit has three steps, all in float64. :func:`fold_` puts the norms' weights into their
    readers and takes the means out of the writers. An orthogonal map, :math:`W \to Q^T W` in the
    writers and :math:`W \to W Q` in the readers, turns the stream to its principal axes: the first
    ones become F, and the last one becomes w. Nothing is written into w or read from it any more.
    For a LayerNorm that is exact, because nothing has a part along :math:`1 / \sqrt{C}` after the
    fold. An RMSNorm's stream loses the direction of least energy.

    Args:
        model: the original, with its norms, in eval mode; plain: neither wrapped, compiled,
            quantized nor sharded.
        batches: real inputs, from which the axes are chosen, at most 8 batches.
        fixed: how many principal axes the layers read themselves, fewer than there are channels.
            None means 128, but at most a quarter of the channels.

    Returns:
        A report with one row per stream, and the reasons for the streams that stay as they are.

    Raises:
        ArgumentError: ``fixed`` is negative.
        ModelError: no stream can be edited (the message has the reasons), the model has a scale
            channel already, cannot be traced, or its outputs changed. It is then as it was.
        DataError: there is no batch, or the model cannot be run on one.

    Example:
        >>> torch.manual_seed(0)
        <...>
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
        >>> batches = [torch.randint(50, (4, 6)) for _ in range(4)]
        >>> report = dynorm.add_scale_channel_(model, batches, fixed=2)
        >>> report.streams[0].norms, report.streams[0].channel, report.change < 1e-5
        (['1'], 7, True)
        >>> _ = dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
        >>> model[1].witness_channels
        (7, 0, 1)

    Reference:
        The rotation is that of S. Ashkboos et al., "SliceGPT", arXiv 2401.15024.
    """
    if fixed is not None:
        fixed = check_count("fixed", fixed, 0)
    require_plain_model(model)
    _require_no_channel(model)
    require_trainable(model)
    looked_at = list(islice(iterate(batches), _BATCHES))
    args, kwargs = arguments(model, looked_at[0])
    # The last batch may take another branch than the first, which is traced.
    compared = [looked_at[0], looked_at[-1]] if len(looked_at) > 1 else looked_at
    before = [_outputs(model, batch) for batch in compared]
    _require_a_stream(find_streams(model, *args, untie=True, **kwargs))
    freed: list[FreedStream] = []
    refused: dict[str, str] = {}
    tensors = [*model.parameters(), *model.buffers()]
    with unchanged_on_error(edited_parts(model), tensors):
        is_trained = _trained_norms(model)
        not_folded = _fold_(model, args, kwargs)
        seen: set[str] = set()
        while True:
            # Found again after each edit, which may have untied a table that two streams share.
            streams = find_streams(model, *args, untie=True, **kwargs)
            left = [stream for stream in streams if stream.sites[0].path not in seen]
            if not left:
                break
            stream = left[0]
            seen.add(stream.sites[0].path)
            channels = stream.sites[0].normalized_shape[0]
            count = min(_FIXED, channels // 4) if fixed is None else fixed
            reason = _refusal(stream, not_folded, count)
            if reason is None:
                # The stream before may have lost a direction.
                now = [_outputs(model, batch) for batch in compared] if freed else before
                require_same = partial(_require_same, model, compared, now)
                freed.append(_edit_(model, stream, looked_at, count, require_same, is_trained))
            else:
                refused[stream.sites[0].path] = reason
        if not freed:
            raise ModelError(f"no residual stream can be edited: {_listed(refused)}")
        change = _change(before[0], _outputs(model, looked_at[0]))
        if not math.isfinite(change):
            raise ModelError("the outputs must stay finite, but did not; everything was put back")
        if all(stream.lost_energy == 0 for stream in freed):
            _require_same(model, compared, before)
    return ScaleChannelReport(freed, refused, change)


def _require_same(model: nn.Module, batches: Sequence[Batch], before: Sequence[Tensor]) -> None:
    """Refuse an edit that must keep the outputs for some batches, but did not."""
    for batch, outputs in zip(batches, before, strict=True):
        change = _change(outputs, _outputs(model, batch))
        allowed = _ROUNDING.get(outputs.dtype, _ROUNDING_OF_HALVES)
        if not change <= allowed:
            raise ModelError(
                f"the outputs must stay the same, but changed by {change:.1e}; everything was put "
                "back. A branch that the first batch does not take may read or write the stream"
            )


def _require_no_channel(model: nn.Module) -> None:
    """Refuse a converted model, and one with a scale channel: a second rotation would mix it with the others."""
    converted = dynorm_layers(model)
    if converted:
        raise ModelError(
            f"the model must have its norms, but {listed(converted)} are point-wise layers: call "
            "add_scale_channel_ before convert_, on a copy of the original"
        )
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm) and module.without is not None:
            raise ModelError(
                f"the model must not have a scale channel yet, but {path!r} leaves one out: call "
                "add_scale_channel_ once, on a copy of the original"
            )


def _require_a_stream(streams: Sequence[ResidualStream]) -> None:
    """Refuse a model none of whose streams can be edited, before anything is."""
    reasons = {stream.sites[0].path: stream.refused for stream in streams if stream.refused}
    if len(reasons) == len(streams):
        raise ModelError(
            "the model must have a residual stream that only linear maps write, and only norms or "
            f"linear maps read, but has none: {_listed(reasons)}; use witnesses instead"
        )


def _listed(reasons: dict[str, str]) -> str:
    listed = [f"at {path}, {reason}" for path, reason in reasons.items()]
    return "; ".join(listed) or "no norm reads one"


def _trained_norms(model: nn.Module) -> dict[str, bool]:
    """Return, by its path, whether a module with parameters has one that is trained."""
    trained = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters:
            trained[path] = any(parameter.requires_grad for parameter in parameters)
    return trained


def _fold_(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Fold the norms into their neighbours; return those with a weight or bias left, with the reason."""
    report = fold_(model, *args, constants=False, add_bias=True, untie=True, **kwargs)
    reasons = {}
    for site in report.sites:
        if site.affine.state not in (FOLDED, NOTHING):
            reasons[site.path] = site.affine.reason or "its weight cannot be folded"
        elif site.kind == "layernorm" and site.center.state != FOLDED:
            reasons[site.path] = site.center.reason or "its mean cannot be folded"
    return reasons


def _refusal(stream: ResidualStream, not_folded: dict[str, str], fixed: int) -> str | None:
    """Return why a stream of a folded model cannot have a scale channel, or None."""
    if stream.refused is not None:
        return stream.refused
    if stream.copied is not None:
        return f"{stream.copied} reads a copy of it, and the stream goes on without the copy"
    for site in stream.sites:
        if site.path in not_folded:
            return f"{site.path}: {not_folded[site.path]}"
        if site.kind != "rmsnorm" or site.dim != -1:
            return f"{site.path} does not normalize over the last axis"
    channels = stream.sites[0].normalized_shape[0]
    if fixed >= channels:
        return f"it has {channels} channels, and {fixed} of them cannot be fixed"
    return None


def _edit_(
    model: nn.Module,
    stream: ResidualStream,
    batches: list[Batch],
    fixed: int,
    require_same: Callable[[], None],
    is_trained: dict[str, bool],
) -> FreedStream:
    """Give one stream a scale channel; ``require_same`` is called after its exact part."""
    norms = [model.get_submodule(site.path) for site in stream.sites]
    gram = _gram(model, norms, batches)
    basis = choose_basis(stream, gram)
    rotate_(stream, basis)
    # Also for an RMSNorm's stream, whose outputs change only when the last direction goes.
    require_same()
    clear_last_(stream)
    channel = len(gram) - 1
    positions = tuple(range(fixed))
    if stream.entry in ("embedding", "sum of embeddings"):
        fill_tables_(stream, channel, positions)
    weight = stream.writers[0].weight.slot.tensor
    replacements: dict[nn.Module, nn.Module] = {}
    rows: dict[int, str] = {}
    for site, norm, written in zip(stream.sites, norms, stream.written, strict=True):
        # The layer's weight is 1, and 0 in the channel.
        layer = RMSNorm(
            channel + 1,
            site.eps,
            dim=-1,
            without=channel,
            output_dtype=site.output_rule,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.requires_grad_(is_trained.get(site.path, True))
        take_over_(layer, norm, None)
        writers = []
        for place in written:
            writer = row_writer(stream.writers[place])
            if writer is not None and place not in rows:
                rows[place] = writer.path
                writers.append(writer)
                if model.get_submodule(writer.path).bias is None:
                    give_bias_(model, writer.path)
        set_scale_channel_(layer, ScaleChannel(channel, positions, tuple(writers)))
        replacements[norm] = layer
    swap_(model, replacements)
    return FreedStream(
        norms=[site.path for site in stream.sites],
        channel=channel,
        fixed=fixed,
        fixed_energy=float(basis.energy[:fixed].sum()),
        lost_energy=float(basis.energy[-1]),
        writers=list(rows.values()),
    )


@torch.no_grad()
def _gram(model: nn.Module, norms: Sequence[nn.Module], batches: Sequence[Batch]) -> Tensor:
    """Return the sum of x x^T / x^T x over the tokens at all norms, (C, C) in float64."""
    total: list[Tensor] = []

    def add(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        x = x if x.dtype == torch.float64 else x.float()
        x = nn.functional.normalize(x, dim=-1)
        product = (x.T @ x).to("cpu", torch.float64)
        if not product.isfinite().all():
            raise DataError(
                "activations must be finite, but a norm of the stream saw NaN, inf or values whose "
                "squares overflow: look for an overflow (float16?) or bad inputs"
            )
        total[:] = [total[0] + product if total else product]

    handles = [norm.register_forward_pre_hook(add) for norm in norms]
    try:
        with undisturbed(model, batches, evaluate=True):
            for batch in batches:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not total:
        raise DataError("the batches must reach the norms of the stream, but none did")
    return total[0]


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the main output of a model for a batch."""
    with torch.no_grad(), undisturbed(model, batch, evaluate=True):
        return output_tensor(call(model, batch), batch)[1]


def _change(before: Tensor, after: Tensor) -> float:
    scale = before.double().norm()
    return float((after.double() - before.double()).norm() / scale.clamp_min(1e-30))
