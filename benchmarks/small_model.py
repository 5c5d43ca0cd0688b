"""A small pre-norm GPT-2 over the bytes of texts, trained on the spot in a minute or a few."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from dynorm.distill.pretrained import Pretrained, encode

ROOT = Path(__file__).parent.parent
BATCH, LENGTH = 16, 128


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
    """Train a model, save it with its tokenizer, and return what was done."""
    from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    blocks = torch.tensor(encode(Pretrained(model, tokenizer, True, out), texts, LENGTH))
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=50, weight_decay=0.1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, optim="adamw_torch_fused", logging_steps=steps, seed=0,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=TensorDataset(blocks),
        data_collator=lambda rows: {"input_ids": (ids := torch.stack([row[0] for row in rows])), "labels": ids},
    )
    done = trainer.train()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "architecture": "GPT-2, 4 layers, C = 128, 4 heads, bytes",
        "steps": steps,
        "batch": f"{BATCH} x {LENGTH} bytes",
        "seconds": round(done.metrics["train_runtime"], 1),
        "mean_training_loss": round(done.training_loss, 3),
    }
