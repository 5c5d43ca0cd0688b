"""The loss of a decoder: SmolLM2-135M-Instruct after calibration, and along a distillation.

``python -m benchmarks.decoder`` writes benchmarks/results/decoder.json. Steps and tokens are given,
not minutes, so that a busy machine gives the same figures. It needs the packages of
requirements-models.txt.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

import dynorm
from benchmarks.distillation import reference
from benchmarks.subjects import Batches, Row, add_rows, calibrate
from dynorm.jobs.checkpoint import (
    Pretrained,
    ShuffledBatches,
    encode,
    load_pretrained,
    make_batches,
)
from dynorm.jobs.job import CALIBRATION_BLOCKS
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.recipe import LANGUAGE, Recipe
from dynorm.report.conversion import compare
from tools.demo_model import folder

RESULTS = Path(__file__).parent / "results" / "decoder.json"
# One list of token ids per block.
Blocks = list[list[int]]
FIGURES = (
    "loss_original",
    "loss_difference",
    "kl",
    "accuracy_original",
    "accuracy_now",
    "agreement",
)
ABOUT = {
    "model": "SmolLM2-135M-Instruct, 61 RMSNorms",
    "held_out": 96,
    "blocks_measured": 8,
    "length": 256,
}
# Blocks in a batch, measured or trained on.
BATCH = LANGUAGE.batch
# A prompt of GIVEN tokens begins every APART tokens of the held-out blocks. The first PROMPTS are
# continued by ASKED.
APART, PROMPTS, GIVEN, ASKED = 64, 200, 32, 64
# A token is a near tie where the original's second choice is so close, in nats.
NEAR = 0.5


def figures(model: Any, original: Any, tests: Batches) -> dict[str, float]:
    """Return the loss above the original's and related figures, over all batches."""
    out = compare(model, original, tests)
    return {name: round(getattr(out, name), 4) for name in FIGURES}


def main() -> None:
    """Calibrate, distil, and add a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=240, help="distillation steps of 1,024 tokens, 0 for none"
    )
    parser.add_argument(
        "--every", type=int, default=60, help="steps from one measurement to the next"
    )
    parser.add_argument("--witnesses", type=int, default=8, help="per layer, at most")
    parser.add_argument(
        "--refine", type=int, default=0, help="steps of refinement, of a copy; 0 for none"
    )
    parser.add_argument(
        "--float32", action="store_true", help="train in float32: for processors without bfloat16"
    )
    options = parser.parse_args()
    steps, every, witnesses = options.steps, options.every, options.witnesses
    started = time.process_time()
    pretrained, original, _, fit, kinds = converted_decoder(witnesses)
    model, length = pretrained.model, ABOUT["length"]
    tests = {name: blocks(pretrained, some) for name, some in kinds.items()}
    prompts = [
        block[i : i + GIVEN] for block in chain(*kinds.values()) for i in range(0, length, APART)
    ][:PROMPTS]
    continued = pretrained.greedy(original, prompts, ASKED)
    near = near_ties(original, prompts, continued)

    def add(stage: str, done: int, other: Any, witnesses: int = witnesses) -> None:
        row: Row = {"stage": stage, "witnesses": witnesses, "steps": done}
        row["tokens"] = done * BATCH * length
        row |= {name: figures(other, original, batches) for name, batches in tests.items()}
        same = pretrained.greedy(other, prompts, ASKED) == continued
        row["greedy"] = {
            "prompts": len(prompts),
            "tokens": ASKED,
            "equal": round(float(same.float().mean()), 4),
        }
        row["greedy"] |= {} if same.all() else first_differences(same, near)
        add_rows(RESULTS, ABOUT, [row | {"cpu_seconds": round(time.process_time() - started)}])
        print(json.dumps(row), flush=True)

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every == 0:
                add("distilled", state.global_step, model)

    if witnesses == 8:
        # The effect of rounding on the greedy tokens.
        add("the original in bfloat16", 0, copy.deepcopy(original).bfloat16(), witnesses=0)
    add("calibrated", 0, model)
    if options.refine:
        refined = copy.deepcopy(model)
        batches = make_batches(pretrained, fit[: options.refine * BATCH], BATCH, 0)
        dynorm.refine_(refined, batches, steps=options.refine, bf16=not options.float32)
        add("refined", options.refine, refined)
    if steps:
        batches = ShuffledBatches(partial(make_batches, pretrained), fit, BATCH, 0)
        dynorm.distill_(
            model,
            batches,
            teacher=original,
            steps=steps,
            bf16=not options.float32,
            quiet=True,
            callbacks=[Measure()],
        )


@torch.inference_mode()
def near_ties(original: Any, prompts: Blocks, continued: Tensor) -> Tensor:
    """Return at which of its tokens (prompts, ASKED) the original had a second choice about as good, an end counted."""
    found = []
    for some, rest in zip(torch.tensor(prompts).split(BATCH), continued.split(BATCH), strict=True):
        first, second = (
            original(torch.cat([some, rest], 1)).logits[:, GIVEN - 1 : -1].topk(2).values.unbind(-1)
        )
        found.append(first - second < NEAR)
    return torch.cat(found)


def first_differences(same: Tensor, near: Tensor) -> dict[str, float]:
    """Return where a continuation first differs, in the median, and how often that is a near tie; all tokens beside."""
    first = same.long().argmin(1)[~same.all(1)]
    there = near[~same.all(1)].gather(1, first[:, None])
    shares = {"near_ties": there, "near_ties_of_all": near}
    return {"first": int(first.median()) + 1} | {
        k: round(float(v.float().mean()), 4) for k, v in shares.items()
    }


def converted_decoder(
    witnesses: int | None = None,
) -> tuple[Pretrained, Any, Batches, Blocks, dict[str, Blocks]]:
    """Return the calibrated decoder, the original, calibration batches, blocks to train on, and two kinds held out."""
    recipe = Recipe(held_out=ABOUT["held_out"], witnesses=witnesses).filled(language_model=True)
    pretrained = load_pretrained(folder("smollm2"))
    model, original = pretrained.model, copy.deepcopy(pretrained.model)
    parts = split_texts(standard_library_docstrings(whole=True), ABOUT["held_out"])
    fit, docstrings, prose = (
        encode(pretrained, part, ABOUT["length"]) for part in (*parts, reference())
    )
    calibration = make_batches(pretrained, fit[: recipe.calibration], CALIBRATION_BLOCKS, 0)
    calibrate(model, calibration, recipe)
    return pretrained, original, calibration, fit, {"docstrings": docstrings, "reference": prose}


def blocks(pretrained: Pretrained, encoded: Blocks) -> Batches:
    """Return the blocks that are measured."""
    return make_batches(pretrained, encoded[: ABOUT["blocks_measured"]], BATCH)


if __name__ == "__main__":
    main()
