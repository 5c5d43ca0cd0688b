"""What static int8 scales cost on a real encoder: all-MiniLM-L6-v2 converted, its linear layers after a norm in int8.

Scales from the bound (no data), from so many standard deviations (no data), and from what 256 texts
gave, beside torchao's dynamic quantization. Everything is compared with the converted model in
float32, on held-out texts; ``python -m benchmarks.deploy`` writes the figures.
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


def study() -> dict[str, Any]:
    """Convert the model, quantize it in every way, and return the figures."""
    subject = encoder(0)
    model, tests = subject.pretrained.model, subject.tests
    original = embeddings(model, tests)
    with_norms = copy.deepcopy(model)
    for _ in fitted(subject, "dyisru", 0, per_channel=True):
        pass
    batches = make_batches(subject.pretrained, subject.encoded[:CALIBRATION_TEXTS], BATCH, 0)
    readers = [reader for reader in find_readers(model, **batches[0]) if reader.refused is None]
    seen = outputs(model, {reader.layer for reader in readers}, batches)
    want = embeddings(model, tests)
    rows = []
    for name, quantize in ways(readers, seen, observed_ranges(model, batches)):
        quantized = copy.deepcopy(model)
        quantize(quantized)
        rows.append({"way": name, **cosines(embeddings(quantized, tests), want)})
        print(rows[-1], flush=True)
    rows += control(with_norms, readers, batches, tests)
    return {
        "model": "all-MiniLM-L6-v2, 13 norms replaced by DyISRU (one constant per channel), calibrated and refined",
        "texts": "first paragraphs of the standard library's docstrings",
        "calibration_texts": CALIBRATION_TEXTS,
        "refine_steps": REFINE,
        "held_out": HELD_OUT,
        "linears": len(readers),
        "linears_in_all": sum(type(module) is nn.Linear for module in model.modules()),
        "alone": sum(reader.alone for reader in readers),
        "converted_to_original": cosines(want, original),
        "rows": rows,
        "layers": [spread(model, path, values) for path, values in seen.items()],
    }


def control(
    original: nn.Module, readers: Sequence[Reader], batches: Batches, tests: Batches
) -> list[dict[str, Any]]:
    """Quantize the same linear layers of the original, with its norms, and compare it with itself."""
    want = embeddings(original, tests)
    inputs = [replace(reader, layer=None, alone=False, peers=()) for reader in readers]
    ranges = input_ranges(original, [reader.linear for reader in readers], batches)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "dynamic, one scale per token": lambda model: by_torchao(model, readers, dynamic=True),
        "data, least and largest, one scale per channel": lambda model: quantize_(
            model, inputs, ranges=ranges, per_channel=True
        ),
    }
    rows = []
    for name, quantize in ways.items():
        quantized = copy.deepcopy(original)
        quantize(quantized)
        row = {"way": f"the original with its norms: {name}"}
        rows.append({**row, **cosines(embeddings(quantized, tests), want)})
        print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def input_ranges(model: nn.Module, paths: Sequence[str], batches: Batches) -> dict[str, Range]:
    """Return the least and largest input of each channel of linear layers, without padding."""
    ranges: dict[str, Range] = {}
    names = {model.get_submodule(path): path for path in paths}
    for batch in batches:
        mask = batch["attention_mask"].bool()

        def note(module: nn.Module, inputs: tuple[Tensor], mask: Tensor = mask) -> None:
            values = inputs[0][mask]
            path = names[module]
            low, high = values.amin(0), values.amax(0)
            if path in ranges:
                low = torch.minimum(low, ranges[path][0])
                high = torch.maximum(high, ranges[path][1])
            ranges[path] = low, high

        handles = [module.register_forward_pre_hook(note) for module in names]
        model(**batch)
        for handle in handles:
            handle.remove()
    return ranges


def ways(
    readers: Sequence[Reader], seen: dict[str, Tensor], ranges: dict[str, Range]
) -> list[tuple[str, Callable[[nn.Module], Any]]]:
    """Return each way to quantize by its name; ``ranges`` are those of each channel."""
    found: list[tuple[str, Callable[[nn.Module], Any]]] = [
        ("weights only", lambda model: by_torchao(model, readers, dynamic=False)),
        ("dynamic, one scale per token", lambda model: by_torchao(model, readers, dynamic=True)),
    ]

    def static(name: str, **options: Any) -> None:
        found.append((name, lambda model: quantize_(model, readers, **options)))

    static("bound", sigmas=None)
    static("bound, affine", symmetric=False)
    static("bound, one scale per channel", per_channel=True)
    for k in SIGMAS:
        static(f"{k:g} sigma", sigmas=k)
    for k in SIGMAS:
        static(f"{k:g} sigma, one scale per channel", sigmas=k, per_channel=True)
    static("data, least and largest", ranges={path: extremes(y) for path, y in seen.items()})
    static(
        "data, least and largest, affine",
        ranges={path: extremes(y) for path, y in seen.items()},
        symmetric=False,
    )
    for q in QUANTILES:
        static(f"data, {q:.4g} quantile", ranges={path: quantile(y, q) for path, y in seen.items()})
    static(
        "data, least and largest, one scale per channel",
        ranges=ranges,
        per_channel=True,
    )
    return found


def by_torchao(model: nn.Module, readers: Sequence[Reader], *, dynamic: bool) -> None:
    """Quantize the same linear layers without static scales."""
    from torchao import quantization

    kind = (
        quantization.Int8DynamicActivationInt8WeightConfig
        if dynamic
        else quantization.Int8WeightOnlyConfig
    )
    names = {reader.linear for reader in readers}
    quantization.quantize_(
        model, kind(set_inductor_config=False), filter_fn=lambda _, path: path in names
    )


@torch.no_grad()
def outputs(model: nn.Module, paths: set[str], batches: Batches) -> dict[str, Tensor]:
    """Return the outputs of the layers at these paths for all tokens except padding, of shape (tokens, C)."""
    kept: dict[str, list[Tensor]] = {path: [] for path, _ in model.named_modules() if path in paths}
    for batch in batches:
        mask = batch["attention_mask"].bool()
        handles = [
            model.get_submodule(path).register_forward_hook(
                lambda _, __, y, mine=mine, m=mask: mine.append(y[m])
            )
            for path, mine in kept.items()
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
    return {path: torch.cat(parts) for path, parts in kept.items()}


def extremes(y: Tensor) -> Range:
    """Return the least and the largest value."""
    return y.min(), y.max()


def quantile(y: Tensor, q: float) -> Range:
    """Return the range that holds this part of the absolute values."""
    values = y.abs().flatten()
    edge = values.kthvalue(max(1, round(q * values.numel()))).values
    return -edge, edge


@torch.no_grad()
def embeddings(model: nn.Module, batches: Batches) -> Tensor:
    """Return the mean-pooled sentence embeddings."""
    parts = []
    for batch in batches:
        mask = batch["attention_mask"].unsqueeze(-1).float()
        parts.append((model(**batch)[0] * mask).sum(1) / mask.sum(1))
    return torch.cat(parts)


def cosines(got: Tensor, want: Tensor) -> dict[str, float]:
    """Return the mean and the least cosine."""
    found = torch.cosine_similarity(got.double(), want.double())
    return {"cosine": round(float(found.mean()), 6), "worst": round(float(found.min()), 6)}


def spread(model: nn.Module, path: str, y: Tensor) -> dict[str, Any]:
    """Compare the bound of a layer with its outputs."""
    layer = model.get_submodule(path)
    assert isinstance(layer, PointwiseNorm)
    bounds = output_bounds(layer)
    seen = y.abs()
    return {
        "path": path,
        "bound": round(float(bounds.max()), 3),
        "largest": round(float(seen.max()), 3),
        "quantile_0.999": round(float(quantile(y, 0.999)[1]), 3),
        "root_mean_square": round(float(y.square().mean().sqrt()), 3),
        "median_channel_ratio": round(float((bounds / seen.amax(0).clamp(min=1e-9)).median()), 2),
    }
