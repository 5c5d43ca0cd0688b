"""The loss of a model of speech: Whisper tiny.en after calibration, and after a short distillation.

``python -m benchmarks.speech`` writes benchmarks/results/speech.json. Steps and files are given,
not minutes, so that a busy machine gives the same figures. It needs the packages of
requirements-models.txt.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

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


def agreement(pairs: Iterable[tuple[str, str]]) -> float:
    """Return one minus the word error rate of transcripts, each with the wanted one."""
    wrong, words = (sum(each) for each in zip(*(word_errors(*pair) for pair in pairs), strict=True))
    return round(1 - wrong / words, 4)


def spoken(clip: Clip) -> str:
    """Return the words of a file."""
    return clip.file.with_suffix(".txt").read_text()


def main() -> None:
    """Calibrate, distil, and add a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[24], help="of a distillation each, of 4 files"
    )
    parser.add_argument(
        "--float32", action="store_true", help="train in float32: for processors without bfloat16"
    )
    options = parser.parse_args()
    pretrained, (clips, _) = (
        load_pretrained(folder("whisper")),
        find_audio([gather(Path("build/speech"))]),
    )
    model, original = pretrained.model, deepcopy(pretrained.model)
    recipe = Recipe().filled(False, "audio")
    listener = Listener(pretrained, original)
    inputs = audio_inputs(listener, *split_audio(clips, ABOUT["held_out"]), {})
    started = time.process_time()

    def transcripts(of: Any) -> dict[Clip, str]:
        batches = inputs.batches(inputs.held_out, ABOUT["batch"])
        return {
            clip: listener.text(ids)
            for part in batches.parts
            for clip, ids in zip(part, listener.write(of, listener.batch(part)), strict=True)
        }

    before = transcripts(original)
    right = agreement((before[clip], spoken(clip)) for clip in before)

    def add(stage: str, done: int) -> None:
        out, now = (
            compare(model, original, inputs.batches(inputs.held_out, ABOUT["batch"])),
            transcripts(model),
        )
        row: Row = {"stage": stage, "steps": done, "files": done * ABOUT["batch"]}
        row |= {name: round(getattr(out, name), 4) for name in FIGURES}
        row |= {"word_agreement": agreement((now[clip], before[clip]) for clip in now)}
        row |= {
            "words_right": agreement((now[clip], spoken(clip)) for clip in now),
            "words_right_original": right,
        }
        add_rows(RESULTS, ABOUT, [row | {"cpu_seconds": round(time.process_time() - started)}])
        print(json.dumps(row), flush=True)

    calibration = inputs.batches(inputs.fit[: recipe.calibration], CALIBRATION_BLOCKS, 0)
    fold_means_(model, calibration[0])
    calibrate(model, calibration, recipe)
    add("calibrated", 0)
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
        add("distilled", count)


if __name__ == "__main__":
    main()
