"""Compare static and dynamic int8 on a decoder and a model of images by the loss on their tasks.

SmolLM2-135M-Instruct and DINOv2-small are converted and calibrated, without distillation. Every way
quantizes the same converted model, and is measured on held-out texts or photographs. The weights
are in int8 by torchao, with one scale per row. ``python -m
benchmarks.deploy --only decoder images`` writes the figures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from benchmarks.decoder import ABOUT, converted_decoder
from benchmarks.int8 import by_torchao
from benchmarks.subjects import Row, calibrate
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import image_inputs
from dynorm.quantize import Reader, find_readers, observed_ranges, quantize_
from dynorm.quantize.bounds import Range
from dynorm.recipe import Recipe
from dynorm.train.distill import output_loss
from tools.demo_model import folder

POWER = 0.75
# Photographs that are held out, and those that give the ranges.
PHOTOGRAPHS = 48
SEEN = 64
Batches = Sequence[dict[str, Tensor]]
Way = Callable[[nn.Module], Any]


def decoder() -> dict[str, Any]:
    """Return the loss of the decoder, of its conversion, and of that in int8."""
    converted = converted_decoder()
    model = converted.pretrained.model
    calibration = converted.calibration
    tests = converted.tests()
    readers = find_readers(model, **calibration[0])
    paths = [reader.linear for reader in readers if reader.ndim]
    ranges = observed_ranges(model, calibration, inputs_of=paths)
    loss_original = {}
    loss_converted = {}
    plain_losses = {}
    plain_logits = {}
    for kind, batches in tests.items():
        # The logits are large, and are not kept.
        loss_original[kind] = round(losses(converted.original, batches)[0], 4)
    for kind, batches in tests.items():
        plain_losses[kind], plain_logits[kind] = losses(model, batches)
        loss_converted[kind] = round(plain_losses[kind], 4)
    rows = []
    for linears, way, quantize in ways(readers, ranges, kept="down_proj"):
        quantized = copy.deepcopy(model)
        count = quantize(quantized)
        row: Row = {"linears": linears, "way": way, "count": count}
        for kind, batches in tests.items():
            loss, logits = losses(quantized, batches)
            row[kind] = {
                "loss": round(loss - plain_losses[kind], 4),
                "kl": round(divergence(plain_logits[kind], logits), 4),
            }
        rows.append(row)
        print(row, flush=True)
    return {
        "model": ABOUT["model"],
        "tokens": {kind: count_tokens(batches) for kind, batches in tests.items()},
        "calibration_tokens": count_tokens(calibration),
        "loss_original": loss_original,
        "loss_converted": loss_converted,
        "widest_over_median_channel": widest_over_median(ranges),
        "rows": rows,
    }


def count_tokens(batches: Batches) -> int:
    """Return the number of tokens in batches, padding included."""
    return sum(batch["input_ids"].numel() for batch in batches)


def widest_over_median(ranges: dict[str, Range]) -> dict[str, float]:
    """Return the range of the widest channel over the median one, for the six worst linear layers."""
    ratios = {}
    for path, (low, high) in ranges.items():
        largest = torch.maximum(low.abs(), high.abs())
        ratio = largest.max() / largest.median()
        ratios[path] = round(float(ratio), 1)
    worst = sorted(ratios, key=lambda path: -ratios[path])
    return {path: ratios[path] for path in worst[:6]}


def images() -> dict[str, Any]:
    """Return how near the class tokens of photographs stay to those of the converted model."""
    pretrained = load_pretrained(folder("dinov2"))
    model = pretrained.model
    recipe = Recipe().filled(False, "images")
    files, _ = find_images(["build/pictures"])
    source = image_inputs(pretrained, files[PHOTOGRAPHS:], files[:PHOTOGRAPHS], {})
    files_to_fit = source.fit[: recipe.calibration]
    calibration = [dict(batch) for batch in source.batches(files_to_fit, recipe.batch)]
    tests = [dict(batch) for batch in source.batches(source.held_out, recipe.batch)]
    original = class_tokens(model, tests)
    calibrate(model, calibration, recipe)
    converted = class_tokens(model, tests)
    readers = find_readers(model, **tests[0])
    paths = [reader.linear for reader in readers if reader.ndim]
    ranges = observed_ranges(model, calibration[: SEEN // recipe.batch], inputs_of=paths)
    rows = []
    for linears, way, quantize in ways(readers, ranges, kept="fc2"):
        quantized = copy.deepcopy(model)
        count = quantize(quantized)
        cosines = cosine_similarity(class_tokens(quantized, tests), converted)
        row = {
            "linears": linears,
            "way": way,
            "count": count,
            "cosine": round(float(cosines.mean()), 5),
            "worst": round(float(cosines.min()), 4),
        }
        rows.append(row)
        print(row, flush=True)
    to_original = cosine_similarity(converted, original)
    return {
        "model": "DINOv2-small, 25 LayerNorms",
        "photographs": len(converted),
        "converted_to_original": round(float(to_original.mean()), 5),
        "rows": rows,
    }


def ways(
    readers: Sequence[Reader],
    ranges: dict[str, Range],
    kept: str,
) -> Iterable[tuple[str, str, Way]]:
    """Yield the linear layers in words, the way in words, and a function that quantizes and counts them.

    Dynamic scales are by torchao, one per token. In one of the ways only the layers whose paths end
    with ``kept`` have dynamic scales, and the others static ones.
    """
    all_readers = [reader for reader in readers if reader.ndim]
    after_norms = [reader for reader in all_readers if reader.refused is None]
    dynamic_ones = [reader for reader in all_readers if reader.linear.endswith(kept)]
    static_ones = [reader for reader in all_readers if not reader.linear.endswith(kept)]

    def static(chosen: Sequence[Reader], per_channel: float) -> Way:
        return lambda model: len(quantize_(model, chosen, ranges=ranges, per_channel=per_channel))

    def dynamic(chosen: Sequence[Reader], *, weights_only: bool = False) -> Way:
        def quantize(model: nn.Module) -> int:
            by_torchao(model, chosen, dynamic=not weights_only)
            return len(chosen)

        return quantize

    def both(model: nn.Module) -> int:
        static_count = static(static_ones, POWER)(model)
        return static_count + dynamic(dynamic_ones)(model)

    for linears, chosen in (("all", all_readers), ("after a norm", after_norms)):
        yield linears, "dynamic", dynamic(chosen)
        yield linears, f"static, power {POWER}", static(chosen, POWER)
        if chosen is all_readers:
            yield linears, f"static, power {POWER}; {kept} dynamic", both
        yield linears, "static, one scale per channel", static(chosen, 1.0)
        yield linears, "static, one scale", static(chosen, 0.0)
        yield linears, "weights only", dynamic(chosen, weights_only=True)


@torch.no_grad()
def losses(model: Any, batches: Batches) -> tuple[float, Tensor]:
    """Return the mean loss per token, and the logits of all."""
    parts = []
    for batch in batches:
        output = model(**batch, use_cache=False)
        parts.append(output.logits)
    logits = torch.cat(parts)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    predictions = logits[:, :-1].flatten(0, 1)
    loss = cross_entropy(predictions, ids[:, 1:].flatten())
    return float(loss), logits


def divergence(want: Tensor, got: Tensor) -> float:
    """Return the mean divergence of the predictions from the others, in nats per token."""
    divergences = []
    # One block at a time, because the logits of all are large.
    for wanted, block in zip(want, got, strict=True):
        student = {"logits": block[None]}
        teacher = {"logits": wanted[None]}
        loss = output_loss(student, teacher, {})
        divergences.append(float(loss))
    return fmean(divergences)


@torch.no_grad()
def class_tokens(model: nn.Module, batches: Batches) -> Tensor:
    """Return the last state of each image's class token."""
    tokens = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state
        tokens.append(hidden[:, 0])
    return torch.cat(tokens)
