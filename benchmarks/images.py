"""Collect the loss of an encoder of images from the reports of ``dynorm convert``.

``python -m benchmarks.images build/dinov2-calibrated/report.json
build/dinov2-distilled/report.json`` writes benchmarks/results/images.json; ``make images`` makes
both reports first.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.subjects import Row
from dynorm.files import write_text
from dynorm.jobs import load_pretrained
from dynorm.jobs.images import find_images
from dynorm.jobs.inputs import image_inputs
from dynorm.jobs.texts import split_texts
from dynorm.report.conversion import compare

RESULTS = Path(__file__).parent / "results" / "images.json"
FIGURES = ("cosine_mean", "cosine_median", "cosine_min", "spearman", "neighbours")


def row(report: dict[str, Any]) -> Row:
    """Return the stages, and how far the images' embeddings are from the original's."""
    meta = report["meta"]
    training = meta["stages"].get("distill", {})
    figures: Row = {
        "witnesses": max(len(site["witnesses"]) for site in report["sites"]),
        "refined": meta["recipe"]["refine"],
    }
    for name in ("steps", "samples", "lr"):
        figures[name] = training.get(name, 0)
    for name in FIGURES:
        figures[name] = report["output"][name]
    return figures


def moved(original: Path, meta: dict[str, Any]) -> Row:
    """Return how far the original is from itself on images moved by one pixel, the scale of the figures."""
    pretrained = load_pretrained(original)
    recipe = meta["recipe"]
    images, _ = find_images(meta["images"])
    parts = split_texts(images, recipe["held_out"], recipe["seed"])
    inputs = image_inputs(pretrained, *parts, {})
    on_moved = copy.deepcopy(pretrained.model)
    on_moved.register_forward_pre_hook(to_the_right, with_kwargs=True)
    held_out = inputs.batches(inputs.held_out, recipe["batch"])
    output = compare(on_moved, pretrained.model, held_out)
    return {name: getattr(output, name) for name in FIGURES}


def to_the_right(
    model: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Move a model's images by one pixel; the first column stays."""
    pixels = kwargs["pixel_values"]
    first_column = pixels[..., :1]
    moved_pixels = torch.cat((first_column, pixels[..., :-1]), -1)
    return args, kwargs | {"pixel_values": moved_pixels}


def main() -> None:
    """Read the reports, measure the original, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    paths = parser.parse_args().reports
    reports = [json.loads(path.read_text("utf-8")) for path in paths]
    names = ("model", "recipe", "versions", "threads", "images_to_fit", "crops", "images_held_out")
    meta = reports[-1]["meta"]
    document = {name: meta[name] for name in names}
    document["rows"] = [row(report) for report in reports]
    document["moved"] = moved(paths[-1].parent / "original", meta)
    write_text(RESULTS, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
