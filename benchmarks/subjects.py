"""What the benchmarks of quality convert, fit and measure: a real encoder, and a small language model made here."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss

import dynorm
from benchmarks.small_model import trained
from dynorm.distill.pretrained import Pretrained, encode, load_pretrained, make_batches
from dynorm.distill.texts import split_texts, standard_library_docstrings
from tools.demo_model import folder

CALIBRATION_TEXTS, BATCH, HELD_OUT, REFINE = 256, 32, 512, 50
Batches = list[dict[str, Tensor]]


@dataclass
class Subject:
    """A model on its way, and what it is fitted to and measured on.

    Args:
        pretrained: what is converted.
        original: the same before.
        encoded: texts to fit on, as token ids.
        tests: batches of held-out texts.
    """

    pretrained: Pretrained
    original: Any
    encoded: list[list[int]]
    tests: Batches

    def figures(self, tests: Batches | None = None) -> dict[str, float]:
        """Return how far the outputs on batches, the held-out ones by default, are from the original's."""
        if self.pretrained.language_model:
            return _language_figures(self.pretrained.model, self.original, tests or self.tests)
        output = dynorm.measure(self.pretrained.model, tests or self.tests, original=self.original).output
        return {"cosine": output.cosine_mean, "worst": output.cosine_min, "spearman": output.spearman}

    def batches(self, texts: list[str]) -> Batches:
        """Return batches of other texts."""
        return make_batches(self.pretrained, encode(self.pretrained, texts), BATCH)


def encoder(seed: int) -> Subject:
    """Return all-MiniLM-L6-v2, and the texts of a seed's split."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, seed)
    return _subject(load_pretrained(folder()), fit, held_out)


def language_model() -> Subject:
    """Return a small GPT-2 over bytes, and the texts that it was trained on, and was not."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, 0)
    return _subject(load_pretrained(trained(1500, fit)), fit, held_out)


def fitted(subject: Subject, to: str, seed: int, **options: Any) -> Iterator[tuple[str, float]]:
    """Convert, calibrate and refine; yield after each stage its name and how long it took."""
    pretrained, encoded = subject.pretrained, subject.encoded
    batches = make_batches(pretrained, encoded[:CALIBRATION_TEXTS], BATCH, seed)
    more = make_batches(pretrained, encoded[CALIBRATION_TEXTS : CALIBRATION_TEXTS + REFINE * BATCH], BATCH, seed)
    sites = dynorm.find_norms(pretrained.model, **batches[0])
    dynorm.convert_(pretrained.model, sites, to, **options)
    started = time.perf_counter()
    dynorm.calibrate_(pretrained.model, batches)
    yield "calibrated", time.perf_counter() - started
    started = time.perf_counter()
    dynorm.refine_(pretrained.model, more, steps=REFINE)
    yield "refined", time.perf_counter() - started


def _subject(pretrained: Pretrained, fit: list[str], held_out: list[str]) -> Subject:
    tests = make_batches(pretrained, encode(pretrained, held_out), BATCH)
    return Subject(pretrained, copy.deepcopy(pretrained.model), encode(pretrained, fit), tests)


@torch.no_grad()
def _language_figures(model: Any, original: Any, tests: Batches) -> dict[str, float]:
    """Mean loss of the next token in nats, before and after, and the divergence of the one from the other."""
    sums = {"original_nats": 0.0, "nats": 0.0, "divergence": 0.0}
    count = 0
    for batch in tests:
        theirs, ours = (log_softmax(m.eval()(**batch).logits[:, :-1].flatten(0, 1), -1) for m in (original, model))
        targets = batch["input_ids"][:, 1:].flatten()
        count += len(targets)
        sums["original_nats"] += float(nll_loss(theirs, targets, reduction="sum"))
        sums["nats"] += float(nll_loss(ours, targets, reduction="sum"))
        sums["divergence"] += float(kl_div(ours, theirs, log_target=True, reduction="sum"))
    return {name: value / count for name, value in sums.items()}
