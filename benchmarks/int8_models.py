"""Static and dynamic int8 on a decoder and a model of images, compared by the loss on their tasks.

SmolLM2-135M-Instruct and DINOv2-small, converted with eight witnesses per layer and calibrated,
without distillation. Every way quantizes the same converted model, and is measured on held-out
texts or photographs; the weights are in int8 by torchao, with one scale per row. ``python -m
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

from benchmarks.decoder import ABOUT, blocks, converted_decoder
from benchmarks.int8 import by_torchao
from benchmarks.subjects import calibrate
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import image_inputs
from dynorm.jobs.recipe import Recipe
from dynorm.quantize import Reader, find_readers, observed_ranges, quantize_
from dynorm.quantize.bounds import Range
from dynorm.train.distill import output_loss
from tools.demo_model import folder

POWER = 0.75
PHOTOGRAPHS, SEEN = 48, 64
Batches = Sequence[dict[str, Tensor]]
Way = Callable[[nn.Module], Any]


def decoder() -> dict[str, Any]:
    """Return the loss of the decoder, of its conversion, and of that in int8."""
    pretrained, original, calibration, _, kinds = converted_decoder()
    model, tests = (
        pretrained.model,
        {name: blocks(pretrained, some) for name, some in kinds.items()},
    )
    readers = find_readers(model, **calibration[0])
    ranges = observed_ranges(
        model, calibration, inputs_of=[reader.linear for reader in readers if reader.ndim]
    )
    largest = {path: torch.maximum(low.abs(), high.abs()) for path, (low, high) in ranges.items()}
    widths = {
        path: round(float(values.max() / values.median()), 1) for path, values in largest.items()
    }
    before = {name: losses(original, batches)[0] for name, batches in tests.items()}
    plain = {name: losses(model, batches) for name, batches in tests.items()}
    rows = []
    for what, way, quantize in ways(readers, ranges, kept="down_proj"):
        quantized = copy.deepcopy(model)
        count = quantize(quantized)
        row: dict[str, Any] = {"linears": what, "way": way, "count": count}
        for name, batches in tests.items():
            loss, logits = losses(quantized, batches)
            row[name] = {
                "loss": round(loss - plain[name][0], 4),
                "kl": round(divergence(plain[name][1], logits), 4),
            }
        rows.append(row)
        print(row, flush=True)
    return {
        "model": ABOUT["model"],
        "tokens": {
            name: sum(batch["input_ids"].numel() for batch in batches)
            for name, batches in tests.items()
        },
        "calibration_tokens": sum(batch["input_ids"].numel() for batch in calibration),
        "loss_original": {name: round(loss, 4) for name, loss in before.items()},
        "loss_converted": {name: round(loss, 4) for name, (loss, _) in plain.items()},
        "widest_over_median_channel": dict(sorted(widths.items(), key=lambda item: -item[1])[:6]),
        "rows": rows,
    }


def images() -> dict[str, Any]:
    """Return how near the class tokens of photographs stay to those of the converted model in float32."""
    pretrained = load_pretrained(folder("dinov2"))
    model, recipe = pretrained.model, Recipe().filled(False, "images")
    files, _ = find_images(["build/pictures"])
    source = image_inputs(pretrained, files[PHOTOGRAPHS:], files[:PHOTOGRAPHS], {})
    calibration = [
        dict(batch) for batch in source.batches(source.fit[: recipe.calibration], recipe.batch)
    ]
    tests = [dict(batch) for batch in source.batches(source.held_out, recipe.batch)]
    original = class_tokens(model, tests)
    calibrate(model, calibration, recipe)
    want, rows = class_tokens(model, tests), []
    readers = find_readers(model, **tests[0])
    some = calibration[: SEEN // recipe.batch]
    ranges = observed_ranges(
        model, some, inputs_of=[reader.linear for reader in readers if reader.ndim]
    )
    for what, way, quantize in ways(readers, ranges, kept="fc2"):
        quantized = copy.deepcopy(model)
        count = quantize(quantized)
        found = cosine_similarity(class_tokens(quantized, tests), want)
        row = {"linears": what, "way": way, "count": count, "cosine": round(float(found.mean()), 5)}
        rows.append(row | {"worst": round(float(found.min()), 4)})
        print(rows[-1], flush=True)
    return {
        "model": "DINOv2-small, 25 LayerNorms",
        "photographs": len(want),
        "converted_to_original": round(float(cosine_similarity(want, original).mean()), 5),
        "rows": rows,
    }


def ways(
    readers: Sequence[Reader], ranges: dict[str, Range], kept: str
) -> Iterable[tuple[str, str, Way]]:
    """Yield which linear layers are quantized, how, and the function that does it and returns their number.

    Dynamic scales are by torchao, one per token. ``kept`` ends the paths of those that stay dynamic
    beside static ones.
    """
    every = [reader for reader in readers if reader.ndim]
    first = [reader for reader in every if reader.refused is None]
    rest = [reader for reader in every if reader.linear.endswith(kept)]

    def static(chosen: Sequence[Reader], per_channel: float) -> Way:
        return lambda model: len(quantize_(model, chosen, ranges=ranges, per_channel=per_channel))

    def dynamic(chosen: Sequence[Reader], *, weights_alone: bool = False) -> Way:
        def quantize(model: nn.Module) -> int:
            by_torchao(model, chosen, dynamic=not weights_alone)
            return len(chosen)

        return quantize

    def both(model: nn.Module) -> int:
        others = [reader for reader in every if reader not in rest]
        return static(others, POWER)(model) + dynamic(rest)(model)

    for what, chosen in (("all", every), ("after a norm", first)):
        yield what, "dynamic", dynamic(chosen)
        yield what, f"static, power {POWER}", static(chosen, POWER)
        if chosen is every:
            yield what, f"static, power {POWER}; {kept} dynamic", both
        yield what, "static, one scale per channel", static(chosen, 1.0)
        yield what, "static, one scale", static(chosen, 0.0)
        yield what, "weights only", dynamic(chosen, weights_alone=True)


@torch.no_grad()
def losses(model: Any, batches: Batches) -> tuple[float, Tensor]:
    """Return the mean loss per token, and the logits of all."""
    logits = torch.cat([model(**batch, use_cache=False).logits for batch in batches])
    ids = torch.cat([batch["input_ids"] for batch in batches])
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())), logits


def divergence(want: Tensor, got: Tensor) -> float:
    """Return the mean divergence of the predictions from the others, in nats per token."""
    # A block at a time: the logits of all are large.
    return fmean(
        float(output_loss({"logits": b[None]}, {"logits": a[None]}, {}))
        for a, b in zip(want, got, strict=True)
    )


@torch.no_grad()
def class_tokens(model: nn.Module, batches: Batches) -> Tensor:
    """Return the last state of each image's class token."""
    return torch.cat([model(**batch).last_hidden_state[:, 0] for batch in batches])
