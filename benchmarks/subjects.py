"""Provide the models that the benchmarks of quality convert and measure, and keep their results.

The models are a real encoder, and a small pre-norm GPT-2 over bytes that is trained here in a few
minutes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import dynorm
from dynorm.files import write_text
from dynorm.jobs import Pretrained, encode, load_pretrained, make_batches
from dynorm.jobs.job import library_versions
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.report.conversion import compare
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
CALIBRATION_TEXTS = 256
# Texts per batch.
BATCH = 32
# Held-out texts.
HELD_OUT = 512
# Steps of refinement.
REFINE = 50
# The small model is trained on this number of blocks per step, of this number of bytes each.
BLOCKS = 16
LENGTH = 128
Row = dict[str, Any]
Batches = list[dict[str, Tensor]]


@dataclass
class Subject:
    """A model that is being converted, with its data for fitting and measuring.

    Args:
        pretrained: the model to convert.
        original: a copy from before the conversion.
        encoded: texts to fit on, as token ids.
        tests: batches of held-out texts.
    """

    pretrained: Pretrained
    original: Any
    encoded: list[list[int]]
    tests: Batches

    def figures(self, tests: Batches | None = None) -> dict[str, float]:
        """Return how far the outputs are from the original's, on the held-out batches by default."""
        model = self.pretrained.model
        tests = tests or self.tests
        if self.pretrained.language_model:
            output = compare(model, self.original, tests)
            assert output.loss_original is not None
            assert output.loss_now is not None
            assert output.kl is not None
            return {
                "original_nats": output.loss_original,
                "nats": output.loss_now,
                "divergence": output.kl,
            }
        output = dynorm.measure(model, tests, original=self.original).output
        return {
            "cosine": output.cosine_mean,
            "worst": output.cosine_min,
            "spearman": output.spearman,
        }

    def batches(self, texts: list[str]) -> Batches:
        """Return batches of other texts."""
        return make_batches(self.pretrained, encode(self.pretrained, texts), BATCH)


def encoder(seed: int) -> Subject:
    """Return all-MiniLM-L6-v2, and the texts of a seed's split."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, seed)
    return _subject(load_pretrained(folder()), fit, held_out)


def language_model() -> Subject:
    """Return a small GPT-2 over bytes, with the texts that it was trained on and held-out ones."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, 0)
    return _subject(load_pretrained(trained(1500, fit)), fit, held_out)


def fitted(
    subject: Subject,
    to: str,
    seed: int,
    **options: Any,
) -> Iterator[tuple[str, float]]:
    """Convert, calibrate and refine; yield the name and the seconds of each stage after it."""
    pretrained = subject.pretrained
    model = pretrained.model
    texts_to_calibrate = subject.encoded[:CALIBRATION_TEXTS]
    texts_to_refine = subject.encoded[CALIBRATION_TEXTS : CALIBRATION_TEXTS + REFINE * BATCH]
    to_calibrate = make_batches(pretrained, texts_to_calibrate, BATCH, seed)
    to_refine = make_batches(pretrained, texts_to_refine, BATCH, seed)
    sites = dynorm.find_norms(model, **to_calibrate[0])
    layer = {"per_channel": False, "witnesses": 0, **options}
    dynorm.convert_(model, sites, to, **layer)
    started = time.perf_counter()
    dynorm.calibrate_(model, to_calibrate)
    yield "calibrated", time.perf_counter() - started
    started = time.perf_counter()
    dynorm.refine_(model, to_refine, steps=REFINE)
    yield "refined", time.perf_counter() - started


def calibrate(model: Any, calibration: Batches, recipe: Any) -> None:
    """Convert a model by a filled recipe, and fit its constants site by site."""
    sites = dynorm.find_norms(model, **calibration[0])
    dynorm.convert_(model, sites, per_channel=recipe.per_channel, witnesses=recipe.witnesses)
    dynorm.calibrate_(model, calibration)


def _subject(pretrained: Pretrained, fit: list[str], held_out: list[str]) -> Subject:
    tests = make_batches(pretrained, encode(pretrained, held_out), BATCH)
    original = copy.deepcopy(pretrained.model)
    return Subject(pretrained, original, encode(pretrained, fit), tests)


def trained(steps: int, texts: list[str]) -> Path:
    """Return the folder of a model that was trained on these texts, and train it if there is none."""
    # The name depends on the texts, because one caller may hold out what another trains on.
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    out = ROOT / "build" / f"small-pre-norm-{steps}-{digest[:12]}"
    if not (out / "training.json").exists():
        summary = train(steps, texts, out)
        text = json.dumps(summary, indent=1) + "\n"
        (out / "training.json").write_text(text, "utf-8")
    return out


def train(steps: int, texts: list[str], out: Path) -> dict[str, Any]:
    """Train a model, save it with its tokenizer, and return a record of the training."""
    from transformers import (
        ByT5Tokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    pretrained = Pretrained(model, tokenizer, True, out)
    blocks = torch.tensor(encode(pretrained, texts, LENGTH))
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=BLOCKS,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        optim="adamw_torch_fused",
        logging_steps=steps,
        seed=0,
    )

    def collate(rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([row[0] for row in rows])
        return {"input_ids": ids, "labels": ids}

    trainer = Trainer(model, arguments, train_dataset=TensorDataset(blocks), data_collator=collate)
    done = trainer.train()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "architecture": "GPT-2, 4 layers, C = 128, 4 heads, bytes",
        "steps": steps,
        "batch": f"{BLOCKS} x {LENGTH} bytes",
        "seconds": round(done.metrics["train_runtime"], 1),
        "mean_training_loss": round(done.training_loss, 3),
    }


def rows_so_far(results: Path) -> list[Row]:
    """Return the rows that earlier runs have measured; delete the file to measure them again."""
    if not results.exists():
        return []
    return list(json.loads(results.read_text("utf-8"))["rows"])


def add_rows(
    results: Path,
    about: dict[str, Any],
    new: list[Row],
    order: Callable[[Row], Any] | None = None,
) -> None:
    """Add rows, each with the versions that made it; if the write fails, the old file stays.

    Args:
        results: the file.
        about: the facts that hold for all rows.
        new: the rows.
        order: the key to sort all rows by; None leaves them in the order of their measurement.
    """
    made_with = library_versions() | {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    rows = rows_so_far(results)
    for row in new:
        rows.append(row | {"made_with": made_with})
    if order is not None:
        rows.sort(key=order)
    results.parent.mkdir(exist_ok=True)
    document = {**about, "rows": rows}
    write_text(results, json.dumps(document, indent=1) + "\n")
