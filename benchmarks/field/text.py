"""The loss of a language model on a text such as OpenWebText, in blocks."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.field.pair import Figure, Result, of_both
from dynorm.errors import ArgumentError, DataError
from dynorm.jobs.checkpoint import Pretrained, load_pretrained

LAYOUT = (
    "a text file in UTF-8, with <|endoftext|> between documents, or a .bin file of token ids, in 16 "
    "bits up to a vocabulary of 65,536 and else in 32, as nanoGPT's data/openwebtext/prepare.py "
    "writes val.bin"
)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--data", type=Path, required=True, help=LAYOUT)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a block")
    parser.add_argument(
        "--blocks", type=int, default=1000, help="blocks at most, evenly spread over the file"
    )
    parser.add_argument("--batch", type=int, default=4)


def run(sources: tuple[str, str], options: Namespace) -> Result:
    """Return loss and perplexity of both models, and the block whose loss grew most."""
    if options.length < 2 or options.blocks < 2 or options.batch < 1:
        raise ArgumentError(
            "length and blocks must be at least 2, and batch at least 1, got "
            f"{options.length}, {options.blocks} and {options.batch}"
        )
    if not options.data.is_file():
        raise DataError(f"the data must be {LAYOUT}, but {options.data} is not a file")
    load = partial(load_pretrained, device=options.device)
    original, converted = of_both(load, partial(losses, options=options), sources)
    if original.shape != converted.shape:
        raise DataError(
            "both models must have the same tokenizer, but their texts have "
            f"{len(original)} and {len(converted)} blocks"
        )
    first = float(original.mean())
    second = float(converted.mean())
    figures = [
        Figure("loss, nats per token", first, second, False),
        Figure("perplexity", math.exp(first), math.exp(second), False),
    ]
    parts = []
    pairs = zip(original.tolist(), converted.tolist(), strict=True)
    for number, (before, after) in enumerate(pairs):
        parts.append(Figure(f"block {number}, nats per token", before, after, False))
    # The blocks of both models are the same, so the noise of their difference is small.
    difference = converted - original
    error = float(difference.std() / math.sqrt(len(original)))
    facts = {
        "data": options.data.name,
        "blocks": len(original),
        "length": options.length,
        "standard_error_of_the_difference": round(error, 6),
    }
    return Result(figures, parts, facts)


@torch.inference_mode()
def losses(pretrained: Pretrained, options: Namespace) -> Tensor:
    """Return the mean loss of each block in nats per token, in float64 on the CPU."""
    model = pretrained.model
    if not pretrained.language_model:
        raise ArgumentError(f"the models must be language models, got {type(model).__name__}")
    positions = pretrained.within_positions(options.length)
    if positions < options.length:
        raise ArgumentError(
            f"length must be at most the model's {positions} positions, got {options.length}"
        )
    device = next(model.parameters()).device
    rows = []
    blocks = blocks_of(_tokens(pretrained, options.data), options.length, options.blocks)
    for part in blocks.split(options.batch):
        ids = part.to(device)
        output = model(input_ids=ids[:, :-1], use_cache=False)
        logits = output.logits.float().transpose(1, 2)
        by_token = cross_entropy(logits, ids[:, 1:], reduction="none")
        rows.append(by_token.double().mean(1).cpu())
    return torch.cat(rows)


def blocks_of(ids: np.ndarray, length: int, most: int) -> Tensor:
    """Return blocks of ``length`` tokens and the one after them, evenly spread.

    Every token of a block is predicted, and so is the next one, from all tokens before it.
    """
    count = (len(ids) - 1) // length
    if count < 2:
        raise DataError(
            f"the text must fill two blocks of {length} tokens, but has {len(ids)} tokens: give a "
            "longer one"
        )
    numbers = np.linspace(0, count - 1, min(count, most)).round()
    rows = []
    for number in numbers.astype(int):
        start = length * number
        rows.append(ids[start : start + length + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _tokens(pretrained: Pretrained, path: Path) -> np.ndarray:
    size = pretrained.model.get_input_embeddings().num_embeddings
    if path.suffix == ".bin":
        dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
        if path.stat().st_size % dtype.itemsize:
            raise DataError(f"the data must be {LAYOUT}, but {path} has half a token at its end")
        ids = np.fromfile(path, dtype)
    else:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"the data must be {LAYOUT}, but {path} is not UTF-8") from error
        encoded = pretrained.tokenizer(text, add_special_tokens=False, verbose=False)
        ids = np.array(encoded["input_ids"], np.int64)
    if ids.size and int(ids.max()) >= size:
        raise DataError(
            f"token ids must be below the model's vocabulary of {size}, but {path} has "
            f"{ids.max()}: it was made with another tokenizer"
        )
    return ids
