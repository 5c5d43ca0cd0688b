"""Measure the loss of a model of speech, Whisper tiny.en, after calibration and a short distillation.

``python -m benchmarks.speech`` writes benchmarks/results/speech.json. The length is a number of
steps rather than of minutes, so that a busy machine gives the same figures. It needs the packages
of requirements-models.txt.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

import dynorm
from benchmarks.subjects import Row, add_rows, calibrate
from dynorm.jobs.audio import Clip, find_audio
from dynorm.jobs.checkpoint import ShuffledBatches, load_pretrained
from dynorm.jobs.inputs import audio_inputs
from dynorm.jobs.job import CALIBRATION_BLOCKS
from dynorm.jobs.means import fold_means_
from dynorm.jobs.speech import Listener, word_errors
from dynorm.jobs.texts import split_audio
from dynorm.recipe import LayerOptions, Recipe
from dynorm.report.conversion import compare
from dynorm.stream.tensors import mapped
from tools.demo_model import folder
from tools.speech import gather

RESULTS = Path(__file__).parent / "results" / "speech.json"
FIGURES = ("loss_original", "loss_difference", "kl", "agreement")
CHANNELS = 384
ABOUT = {
    "model": "Whisper tiny.en, 22 LayerNorms",
    "held_out": 48,
    "batch": 4,
    "witnesses": LayerOptions().filled(CHANNELS).most_witnesses,
}


def median_agreement(transcripts: list[str], correct: list[str]) -> float:
    """Return the median over the files of one minus the word error rate.

    One transcript that repeats itself has as many words as several files. It counts as one here.
    """
    shares = [agreement([text], [other]) for text, other in zip(transcripts, correct, strict=True)]
    return round(median(shares), 4)


def in_bfloat16(tensor: Tensor) -> Tensor:
    """Cast a floating-point tensor."""
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def rounded(model: Any) -> Any:
    """Return a copy of a speech model in bfloat16, which takes features in any dtype."""
    copy = deepcopy(model).bfloat16()

    def cast(encoder: Any, args: Any, kwargs: Any) -> Any:
        return mapped((args, kwargs), in_bfloat16)

    copy.get_encoder().register_forward_pre_hook(cast, with_kwargs=True)
    return copy


def agreement(transcripts: list[str], correct: list[str]) -> float:
    """Return one minus the word error rate of transcripts, compared with the correct ones."""
    errors = 0
    words = 0
    for pair in zip(transcripts, correct, strict=True):
        new_errors, new_words = word_errors(*pair)
        errors += new_errors
        words += new_words
    return round(1 - errors / words, 4)


def spoken(clip: Clip) -> str:
    """Return the words that a file speaks."""
    return clip.file.with_suffix(".txt").read_text()


def main() -> None:
    """Calibrate, distil, and add a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[56],
        help="steps of 4 files; one distillation per number",
    )
    parser.add_argument(
        "--float32", action="store_true", help="train in float32, for processors without bfloat16"
    )
    options = parser.parse_args()
    pretrained = load_pretrained(folder("whisper"))
    clips, _ = find_audio([gather(Path("build/speech"))])
    model = pretrained.model
    original = deepcopy(model)
    recipe = Recipe().filled(False, "audio")
    listener = Listener(pretrained, original)
    inputs = audio_inputs(listener, *split_audio(clips, ABOUT["held_out"]), {})
    started = time.process_time()

    parts = inputs.batches(inputs.held_out, ABOUT["batch"]).parts

    def transcripts(of_model: Any) -> list[str]:
        texts = []
        for part in parts:
            for ids in listener.write(of_model, listener.batch(part)):
                texts.append(listener.text(ids))
        return texts

    speech = []
    for part in parts:
        for clip in part:
            speech.append(spoken(clip))
    before = transcripts(original)
    right_before = agreement(before, speech)

    def add(stage: str, of_model: Any, steps: int = 0) -> None:
        held_out = inputs.batches(inputs.held_out, ABOUT["batch"])
        output = compare(of_model, original, held_out)
        now = transcripts(of_model)
        row: Row = {
            "stage": stage,
            "steps": steps,
            "files": steps * ABOUT["batch"],
        }
        for name in FIGURES:
            row[name] = round(getattr(output, name), 4)
        row["word_agreement"] = agreement(now, before)
        row["word_agreement_median"] = median_agreement(now, before)
        row["words_right"] = agreement(now, speech)
        row["words_right_original"] = right_before
        seconds = round(time.process_time() - started)
        add_rows(RESULTS, ABOUT, [row | {"cpu_seconds": seconds}])
        print(json.dumps(row), flush=True)

    # The effect of rounding on the words.
    add("the original in bfloat16", rounded(original))
    calibration = inputs.batches(inputs.fit[: recipe.calibration], CALIBRATION_BLOCKS, 0)
    fold_means_(model, calibration[0])
    calibrate(model, calibration, recipe)
    add("calibrated", model)
    weights = deepcopy(model.state_dict())
    for count in options.steps:
        model.load_state_dict(weights)
        batches = ShuffledBatches(inputs.batches, inputs.fit, ABOUT["batch"], 0)
        dynorm.distill_(
            model,
            batches,
            teacher=original,
            steps=count,
            bf16=not options.float32,
            quiet=True,
        )
        add("distilled", model, count)


if __name__ == "__main__":
    main()
