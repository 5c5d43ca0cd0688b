"""The models that the benchmarks of quality convert, fit and measure, and the rows of results that they leave.

A real encoder, and a small pre-norm GPT-2 over bytes, trained on the spot in a minute or a few.
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
from dynorm.fit.site_fit import TOLERANCE
from dynorm.jobs.checkpoint import (
    Pretrained,
    encode,
    library_versions,
    load_pretrained,
    make_batches,
)
from dynorm.jobs.texts import split_texts, standard_library_docstrings
from dynorm.report.conversion import compare
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
CALIBRATION_TEXTS, BATCH, HELD_OUT, REFINE = 256, 32, 512, 50
# Of the small model: blocks per step, and bytes of a block.
BLOCKS, LENGTH = 16, 128
Row = dict[str, Any]
Batches = list[dict[str, Tensor]]


@dataclass
class Subject:
    """A model on its way, with its data for fitting and measuring.

    Args:
        pretrained: the model to convert.
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
            out = compare(self.pretrained.model, self.original, tests or self.tests)
            assert out.loss_original is not None
            assert out.loss_now is not None
            assert out.kl is not None
            return {"original_nats": out.loss_original, "nats": out.loss_now, "divergence": out.kl}
        output = dynorm.measure(
            self.pretrained.model, tests or self.tests, original=self.original
        ).output
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
    """Return a small GPT-2 over bytes, and the texts that it was trained on, and was not."""
    fit, held_out = split_texts(standard_library_docstrings(), HELD_OUT, 0)
    return _subject(load_pretrained(trained(1500, fit)), fit, held_out)


def fitted(
    subject: Subject, to: str, seed: int, *, tolerance: float = TOLERANCE, **options: Any
) -> Iterator[tuple[str, float]]:
    """Convert, calibrate and refine; yield after each stage its name and how long it took."""
    pretrained, encoded = subject.pretrained, subject.encoded
    batches = make_batches(pretrained, encoded[:CALIBRATION_TEXTS], BATCH, seed)
    more = make_batches(
        pretrained, encoded[CALIBRATION_TEXTS : CALIBRATION_TEXTS + REFINE * BATCH], BATCH, seed
    )
    sites = dynorm.find_norms(pretrained.model, **batches[0])
    dynorm.convert_(pretrained.model, sites, to, **options)
    started = time.perf_counter()
    dynorm.calibrate_(pretrained.model, batches, tolerance=tolerance)
    yield "calibrated", time.perf_counter() - started
    started = time.perf_counter()
    dynorm.refine_(pretrained.model, more, steps=REFINE)
    yield "refined", time.perf_counter() - started


def calibrate(model: Any, calibration: Batches, recipe: Any) -> None:
    """Convert a model as a filled recipe says, and fit its constants site by site."""
    sites = dynorm.find_norms(model, **calibration[0])
    dynorm.convert_(model, sites, per_channel=recipe.per_channel, witnesses=recipe.witnesses)
    dynorm.calibrate_(model, calibration, lean=recipe.lean)


def _subject(pretrained: Pretrained, fit: list[str], held_out: list[str]) -> Subject:
    tests = make_batches(pretrained, encode(pretrained, held_out), BATCH)
    return Subject(pretrained, copy.deepcopy(pretrained.model), encode(pretrained, fit), tests)


def trained(steps: int, texts: list[str]) -> Path:
    """Return the folder of a model that was trained for so many steps on these texts; train it where there is none."""
    # By the texts, too: what one caller trains on another may hold out.
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    out = ROOT / "build" / f"small-pre-norm-{steps}-{digest}"
    if not (out / "training.json").exists():
        summary = train(steps, texts, out)
        (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
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
        vocab_size=len(tokenizer), n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    blocks = torch.tensor(encode(Pretrained(model, tokenizer, True, out), texts, LENGTH))
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=BLOCKS, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=50, weight_decay=0.1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, optim="adamw_torch_fused", logging_steps=steps, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=TensorDataset(blocks),
        data_collator=lambda rows: {
            "input_ids": (ids := torch.stack([row[0] for row in rows])),
            "labels": ids,
        },
    )
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
    """Return what earlier runs have measured; delete the file to measure all anew."""
    return list(json.loads(results.read_text("utf-8"))["rows"]) if results.exists() else []


def add_rows(
    results: Path, about: dict[str, Any], new: list[Row], order: Callable[[Row], Any] | None = None
) -> None:
    """Add rows, each with the versions that made it; a write that fails leaves the old file.

    Args:
        results: the file.
        about: the facts of all rows.
        new: the rows.
        order: the key by which all rows are sorted; None leaves them as they came.
    """
    made_with = library_versions() | {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    rows = rows_so_far(results) + [row | {"made_with": made_with} for row in new]
    if order is not None:
        rows.sort(key=order)
    results.parent.mkdir(exist_ok=True)
    write_text(results, json.dumps(about | {"rows": rows}, indent=1) + "\n")
