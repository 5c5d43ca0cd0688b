"""Measure the loss of a decoder, SmolLM2-135M-Instruct, after calibration and along a distillation.

``python -m benchmarks.decoder`` writes benchmarks/results/decoder.json. The length is a number of
steps rather than of minutes, so that a busy machine gives the same figures. It needs the packages
of requirements-models.txt.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from functools import partial
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
# A prompt of PROMPT_LENGTH tokens begins every APART tokens of the held-out blocks. The first
# PROMPTS are continued by CONTINUED tokens.
APART = 64
PROMPTS = 200
PROMPT_LENGTH = 32
CONTINUED = 64
# A token is a near tie if the original's second choice is this close, in nats.
NEAR = 0.5


@dataclass
class ConvertedDecoder:
    """The calibrated decoder, its original, and their texts.

    Args:
        pretrained: the decoder, converted and calibrated.
        original: a copy from before the conversion.
        calibration: the batches that it was calibrated on.
        fit: blocks to train on.
        held_out: held-out blocks of each kind of text.
    """

    pretrained: Pretrained
    original: Any
    calibration: Batches
    fit: Blocks
    held_out: dict[str, Blocks]

    def tests(self) -> dict[str, Batches]:
        """Return the batches to measure on, for each kind of text."""
        tests = {}
        for kind, blocks in self.held_out.items():
            measured = blocks[: ABOUT["blocks_measured"]]
            tests[kind] = make_batches(self.pretrained, measured, BATCH)
        return tests

    def prompts(self) -> Blocks:
        """Return the beginnings of held-out passages."""
        prompts = []
        for blocks in self.held_out.values():
            for block in blocks:
                for start in range(0, ABOUT["length"], APART):
                    prompts.append(block[start : start + PROMPT_LENGTH])
        return prompts[:PROMPTS]


def figures(model: Any, original: Any, tests: Batches) -> dict[str, float]:
    """Return the loss above the original's and related figures, over all batches."""
    output = compare(model, original, tests)
    return {name: round(getattr(output, name), 4) for name in FIGURES}


def main() -> None:
    """Calibrate, distil, and add a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=240, help="distillation steps of 1,024 tokens, 0 for none"
    )
    parser.add_argument(
        "--every", type=int, default=60, help="steps from one measurement to the next"
    )
    parser.add_argument("--witnesses", type=int, default=8, help="most witnesses per layer")
    parser.add_argument(
        "--refine", type=int, default=0, help="steps of refinement of a copy, 0 for none"
    )
    parser.add_argument(
        "--float32", action="store_true", help="train in float32, for processors without bfloat16"
    )
    options = parser.parse_args()
    started = time.process_time()
    decoder = converted_decoder(options.witnesses)
    pretrained = decoder.pretrained
    model = pretrained.model
    original = decoder.original
    tests = decoder.tests()
    prompts = decoder.prompts()
    continued = pretrained.greedy(original, prompts, CONTINUED)
    near = near_ties(original, prompts, continued)

    def add(stage: str, steps: int, measured: Any, witnesses: int = options.witnesses) -> None:
        row: Row = {"stage": stage, "witnesses": witnesses, "steps": steps}
        row["tokens"] = steps * BATCH * ABOUT["length"]
        for kind, batches in tests.items():
            row[kind] = figures(measured, original, batches)
        same = pretrained.greedy(measured, prompts, CONTINUED) == continued
        greedy: Row = {
            "prompts": len(prompts),
            "tokens": CONTINUED,
            "equal": round(float(same.float().mean()), 4),
        }
        if not same.all():
            greedy |= first_differences(same, near)
        row["greedy"] = greedy
        seconds = round(time.process_time() - started)
        add_rows(RESULTS, ABOUT, [row | {"cpu_seconds": seconds}])
        print(json.dumps(row), flush=True)

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % options.every == 0:
                add("distilled", state.global_step, model)

    if options.witnesses == 8:
        # The effect of rounding on the greedy tokens.
        in_bfloat16 = copy.deepcopy(original).bfloat16()
        add("the original in bfloat16", 0, in_bfloat16, witnesses=0)
    add("calibrated", 0, model)
    if options.refine:
        refined = copy.deepcopy(model)
        blocks = decoder.fit[: options.refine * BATCH]
        batches = make_batches(pretrained, blocks, BATCH, 0)
        dynorm.refine_(refined, batches, steps=options.refine, bf16=not options.float32)
        add("refined", options.refine, refined)
    if options.steps:
        batches = ShuffledBatches(partial(make_batches, pretrained), decoder.fit, BATCH, 0)
        dynorm.distill_(
            model,
            batches,
            teacher=original,
            steps=options.steps,
            bf16=not options.float32,
            callbacks=[Measure()],
        )


@torch.inference_mode()
def near_ties(original: Any, prompts: Blocks, continued: Tensor) -> Tensor:
    """Return which of the original's tokens, (prompts, CONTINUED), had a second choice about as good.

    The end of the text counts as a choice.
    """
    near = []
    prompt_batches = torch.tensor(prompts).split(BATCH)
    for beginnings, rest in zip(prompt_batches, continued.split(BATCH), strict=True):
        logits = original(torch.cat([beginnings, rest], 1)).logits
        best = logits[:, PROMPT_LENGTH - 1 : -1].topk(2).values
        near.append(best[..., 0] - best[..., 1] < NEAR)
    return torch.cat(near)


def first_differences(same: Tensor, near: Tensor) -> dict[str, float]:
    """Return the median place of the first different token, and how often that is a near tie.

    The share of near ties among all tokens is there for comparison.
    """
    differs = ~same.all(1)
    first = same.long().argmin(1)[differs]
    near_at_first = near[differs].gather(1, first[:, None])
    return {
        "first": int(first.median()) + 1,
        "near_ties": round(float(near_at_first.float().mean()), 4),
        "near_ties_of_all": round(float(near.float().mean()), 4),
    }


def converted_decoder(witnesses: int | None = None) -> ConvertedDecoder:
    """Return the calibrated decoder with its texts, docstrings and Python's language reference."""
    recipe = Recipe(held_out=ABOUT["held_out"], witnesses=witnesses)
    recipe = recipe.filled(language_model=True)
    pretrained = load_pretrained(folder("smollm2"))
    original = copy.deepcopy(pretrained.model)
    docstrings = standard_library_docstrings(whole=True)
    texts_to_fit, texts_held_out = split_texts(docstrings, ABOUT["held_out"])
    fit = encode(pretrained, texts_to_fit, ABOUT["length"])
    held_out = {
        "docstrings": encode(pretrained, texts_held_out, ABOUT["length"]),
        "reference": encode(pretrained, reference(), ABOUT["length"]),
    }
    calibration = make_batches(pretrained, fit[: recipe.calibration], CALIBRATION_BLOCKS, 0)
    calibrate(pretrained.model, calibration, recipe)
    return ConvertedDecoder(pretrained, original, calibration, fit, held_out)


if __name__ == "__main__":
    main()
