"""Measure the cost of static int8 scales for the linear layers after the norms of all-MiniLM-L6-v2.

The scales are from the bound (no data), from a number of standard deviations (no data), or from the
outputs on 256 texts; torchao's dynamic quantization is there for comparison. All are compared with
the converted model in float32, on held-out texts. ``python -m benchmarks.deploy`` writes the
figures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.subjects import BATCH, CALIBRATION_TEXTS, HELD_OUT, REFINE, encoder, fitted
from dynorm.jobs.checkpoint import make_batches
from dynorm.layers import PointwiseNorm
from dynorm.quantize import Reader, find_readers, observed_ranges, output_bounds, quantize_
from dynorm.quantize.bounds import Range

SIGMAS = (3.0, 4.0, 6.0, 8.0, 12.0)
QUANTILES = (0.99, 0.999, 0.9999)
Batches = Sequence[dict[str, Tensor]]
Quantize = Callable[[nn.Module], Any]


def study() -> dict[str, Any]:
    """Convert the model, quantize it in every way, and return the figures."""
    subject = encoder(0)
    model = subject.pretrained.model
    tests = subject.tests
    original = embeddings(model, tests)
    with_norms = copy.deepcopy(model)
    for _ in fitted(subject, "dyisru", 0, per_channel=True):
        pass
    batches = make_batches(subject.pretrained, subject.encoded[:CALIBRATION_TEXTS], BATCH, 0)
    readers = []
    for reader in find_readers(model, **batches[0]):
        if reader.refused is None:
            readers.append(reader)
    outputs_of_layers = outputs(model, {reader.layer for reader in readers}, batches)
    converted = embeddings(model, tests)
    ranges = observed_ranges(model, batches)
    rows = []
    for name, quantize in ways(readers, outputs_of_layers, ranges):
        quantized = copy.deepcopy(model)
        quantize(quantized)
        row = {"way": name, **cosines(embeddings(quantized, tests), converted)}
        rows.append(row)
        print(row, flush=True)
    rows += control(with_norms, readers, batches, tests)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return {
        "model": "all-MiniLM-L6-v2, 13 norms replaced by DyISRU (one constant per channel), calibrated and refined",
        "texts": "first paragraphs of the standard library's docstrings",
        "calibration_texts": CALIBRATION_TEXTS,
        "refine_steps": REFINE,
        "held_out": HELD_OUT,
        "linears": len(readers),
        "linears_in_all": len(linears),
        "alone": sum(reader.alone for reader in readers),
        "converted_to_original": cosines(converted, original),
        "rows": rows,
        "layers": [spread(model, path, y) for path, y in outputs_of_layers.items()],
    }


def control(
    original: nn.Module,
    readers: Sequence[Reader],
    batches: Batches,
    tests: Batches,
) -> list[dict[str, Any]]:
    """Quantize the same linear layers of the original, with its norms, and compare it with itself."""
    exact = embeddings(original, tests)
    # The linear layers read norms here, whose outputs have no bounds.
    linears = []
    paths = []
    for reader in readers:
        linears.append(replace(reader, layer=None, alone=False, peers=()))
        paths.append(reader.linear)
    ranges = input_ranges(original, paths, batches)

    def dynamic(model: nn.Module) -> None:
        by_torchao(model, readers, dynamic=True)

    def static(model: nn.Module) -> None:
        quantize_(model, linears, ranges=ranges, per_channel=True)

    ways: dict[str, Quantize] = {
        "dynamic, one scale per token": dynamic,
        "data, least and largest, one scale per channel": static,
    }
    rows = []
    for name, quantize in ways.items():
        quantized = copy.deepcopy(original)
        quantize(quantized)
        row: dict[str, Any] = {"way": f"the original with its norms: {name}"}
        row |= cosines(embeddings(quantized, tests), exact)
        rows.append(row)
        print(row, flush=True)
    return rows


@torch.no_grad()
def input_ranges(
    model: nn.Module,
    paths: Sequence[str],
    batches: Batches,
) -> dict[str, Range]:
    """Return the least and largest input of each channel of linear layers, without padding."""
    ranges: dict[str, Range] = {}
    names = {model.get_submodule(path): path for path in paths}
    for batch in batches:
        mask = batch["attention_mask"].bool()

        def note(module: nn.Module, inputs: tuple[Tensor], mask: Tensor = mask) -> None:
            values = inputs[0][mask]
            path = names[module]
            low = values.amin(0)
            high = values.amax(0)
            if path in ranges:
                low_before, high_before = ranges[path]
                low = torch.minimum(low, low_before)
                high = torch.maximum(high, high_before)
            ranges[path] = (low, high)

        handles = [module.register_forward_pre_hook(note) for module in names]
        model(**batch)
        for handle in handles:
            handle.remove()
    return ranges


def ways(
    readers: Sequence[Reader],
    outputs_of_layers: dict[str, Tensor],
    channel_ranges: dict[str, Range],
) -> list[tuple[str, Quantize]]:
    """Return each way to quantize by its name.

    Args:
        readers: the linear layers.
        outputs_of_layers: the outputs of the layers that they read, by path.
        channel_ranges: the range of each channel of these outputs.
    """
    named: list[tuple[str, Quantize]] = [
        ("weights only", lambda model: by_torchao(model, readers, dynamic=False)),
        ("dynamic, one scale per token", lambda model: by_torchao(model, readers, dynamic=True)),
    ]

    def static(name: str, **options: Any) -> None:
        named.append((name, lambda model: quantize_(model, readers, **options)))

    least_and_largest = {path: extremes(y) for path, y in outputs_of_layers.items()}
    static("bound", sigmas=None)
    static("bound, affine", symmetric=False)
    static("bound, one scale per channel", per_channel=True)
    for k in SIGMAS:
        static(f"{k:g} sigma", sigmas=k)
    for k in SIGMAS:
        static(f"{k:g} sigma, one scale per channel", sigmas=k, per_channel=True)
    static("data, least and largest", ranges=least_and_largest)
    static("data, least and largest, affine", ranges=least_and_largest, symmetric=False)
    for q in QUANTILES:
        ranges = {path: quantile(y, q) for path, y in outputs_of_layers.items()}
        static(f"data, {q:.4g} quantile", ranges=ranges)
    static(
        "data, least and largest, one scale per channel",
        ranges=channel_ranges,
        per_channel=True,
    )
    return named


def by_torchao(model: nn.Module, readers: Sequence[Reader], *, dynamic: bool) -> None:
    """Quantize the same linear layers without static scales."""
    from torchao import quantization

    if dynamic:
        config = quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    else:
        config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    paths = {reader.linear for reader in readers}
    quantization.quantize_(model, config, filter_fn=lambda _, path: path in paths)


@torch.no_grad()
def outputs(
    model: nn.Module,
    paths: set[str],
    batches: Batches,
) -> dict[str, Tensor]:
    """Return the outputs of the layers at these paths for all tokens except padding, of shape (tokens, C)."""
    parts: dict[str, list[Tensor]] = {}
    masks: list[Tensor] = []
    handles = []

    def keep(path: str, layer: nn.Module) -> None:
        parts[path] = []

        def hook(module: nn.Module, args: Any, y: Tensor) -> None:
            parts[path].append(y[masks[-1]])

        handles.append(layer.register_forward_hook(hook))

    for path, module in model.named_modules():
        if path in paths:
            keep(path, module)
    for batch in batches:
        masks.append(batch["attention_mask"].bool())
        model(**batch)
    for handle in handles:
        handle.remove()
    return {path: torch.cat(values) for path, values in parts.items()}


def extremes(y: Tensor) -> Range:
    """Return the least and the largest value."""
    return y.min(), y.max()


def quantile(y: Tensor, q: float) -> Range:
    """Return the range that holds this part of the absolute values."""
    values = y.abs().flatten()
    place = max(1, round(q * values.numel()))
    edge = values.kthvalue(place).values
    return -edge, edge


@torch.no_grad()
def embeddings(model: nn.Module, batches: Batches) -> Tensor:
    """Return the mean-pooled sentence embeddings."""
    parts = []
    for batch in batches:
        mask = batch["attention_mask"].unsqueeze(-1).float()
        hidden = model(**batch)[0]
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(parts)


def cosines(result: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the mean and the least cosine."""
    values = torch.cosine_similarity(result.double(), exact.double())
    return {
        "cosine": round(float(values.mean()), 6),
        "worst": round(float(values.min()), 6),
    }


def spread(model: nn.Module, path: str, y: Tensor) -> dict[str, Any]:
    """Compare the bound of a layer with its outputs."""
    layer = model.get_submodule(path)
    assert isinstance(layer, PointwiseNorm)
    bounds = output_bounds(layer)
    sizes = y.abs()
    ratios = bounds / sizes.amax(0).clamp(min=1e-9)
    _, edge = quantile(y, 0.999)
    return {
        "path": path,
        "bound": round(float(bounds.max()), 3),
        "largest": round(float(sizes.max()), 3),
        "quantile_0.999": round(float(edge), 3),
        "root_mean_square": round(float(y.square().mean().sqrt()), 3),
        "median_channel_ratio": round(float(ratios.median()), 2),
    }
