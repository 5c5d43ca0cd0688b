"""Does the paper's claim hold on real activations? ``python -m benchmarks.activations`` inspects two models.

One is all-MiniLM-L6-v2, the other a small pre-norm GPT-2 that is trained here for about a minute on bytes of the
standard library's docstrings. It writes benchmarks/results/inspection.json and docs/images/inspection-*.png.
"""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib
import torch
from matplotlib.figure import Figure
from torch.utils.data import TensorDataset

import dynorm
from dynorm.integrations.inspection import inspect_pretrained
from dynorm.integrations.pretrained import Pretrained, encode
from dynorm.surgery.report.inspection_html import drawing
from dynorm.surgery.report.picture import DAYLIGHT, draw
from dynorm.surgery.report.text import short_path
from dynorm.texts import split_texts, standard_library_docstrings
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "inspection.json"
TRAINED = ROOT / "build" / "small-pre-norm"
STEPS, BATCH, LENGTH, SAMPLES = 300, 16, 128, 256


def train() -> dict[str, Any]:
    """Train the small pre-norm model on texts that the inspection does not measure on, and save it."""
    from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    texts, _ = split_texts(standard_library_docstrings(), SAMPLES, 0)
    blocks = torch.tensor(encode(Pretrained(model, tokenizer, True, TRAINED), texts, LENGTH))
    arguments = TrainingArguments(
        output_dir=str(TRAINED), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=50, weight_decay=0.1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, optim="adamw_torch_fused", logging_steps=STEPS, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=TensorDataset(blocks),
        data_collator=lambda rows: {"input_ids": (ids := torch.stack([row[0] for row in rows])), "labels": ids},
    )
    done = trainer.train()
    model.save_pretrained(TRAINED)
    tokenizer.save_pretrained(TRAINED)
    return {
        "architecture": "GPT-2, 4 layers, C = 128, 4 heads, bytes",
        "steps": STEPS,
        "batch": f"{BATCH} x {LENGTH} bytes",
        "seconds": round(done.metrics["train_runtime"], 1),
        "mean_training_loss": round(done.training_loss, 3),
    }


def save_picture(report: dynorm.InspectionReport, path: Path) -> None:
    """Draw all norms of a model: its outliers, and the functions fitted to them."""
    columns = 5 if len(report.sites) > 9 else 3
    rows = math.ceil(len(report.sites) / columns)
    figure = Figure(figsize=(2.6 * columns, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, site in zip(panels, report.sites, strict=False):
        draw(axes, drawing(site))
        residuals = site.outliers.residuals
        figures = "  ".join(f"{short} {residuals[name]:.2f}" for name, short in LABELS.items())
        axes.set_title(f"{short_path(site.path, 34)}\n{figures}", fontsize=7.5)
        axes.tick_params(labelsize=7)
        axes.set_xlabel(axes.get_xlabel(), fontsize=8)
        axes.set_ylabel(axes.get_ylabel(), fontsize=8)
    for axes in panels[len(report.sites) :]:
        axes.axis("off")
    add_legend(figure)
    # Simplified, the dots would be gone: each is a line of no length.
    with matplotlib.rc_context({"path.simplify": False}):
        figure.savefig(path, dpi=100)


LABELS = {"linear": "linear", "dyt": "DyT", "dyisru": "DyISRU"}


def add_legend(figure: Figure) -> None:
    """Say what the colours are."""
    from matplotlib.lines import Line2D

    styles = {"linear": ":", "dyt": "--", "dyisru": "-"}
    handles = [Line2D([], [], color=DAYLIGHT[n], linestyle=styles[n], label=label) for n, label in LABELS.items()]
    handles += [
        Line2D([], [], color=DAYLIGHT[n], marker="o", linestyle="", markersize=4, label=label)
        for n, label in (("outlier", "outlier of a token"), ("point", "other channels"))
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)


def main() -> None:
    """Train, inspect both models, and write the file and the pictures."""
    training = train()
    models = {"all-MiniLM-L6-v2": folder(), "small-pre-norm": TRAINED}
    document: dict[str, Any] = {
        "command": "python -m benchmarks.activations",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "training": training,
        "models": {},
    }
    for name, path in models.items():
        report = inspect_pretrained(path, samples=SAMPLES, max_length=LENGTH, name=name)
        print(report, end="\n\n")
        document["models"][name] = report.to_dict()
        save_picture(report, ROOT / "docs" / "images" / f"inspection-{name}.png")
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
