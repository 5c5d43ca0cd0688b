"""Fold the norms of a pretrained model into their neighbours, and save it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynorm.errors import ArgumentError, ModelError, listed
from dynorm.fold import FoldReport, fold_
from dynorm.jobs.checkpoint import Checkpoint, local_source, model_name
from dynorm.jobs.write import require_output, write_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Length of the example; the graph does not depend on it.
_LENGTH = 16


def fold_pretrained(
    folder: str | Path,
    out: str | Path,
    options: dict[str, Any],
    *,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> FoldReport:
    """Fold the transformers model in a folder, and save it with its report in another folder.

    The arguments are those of ``convert_pretrained``, the ``options`` those of
    :func:`dynorm.fold_`. After an error nothing is written.
    """
    import transformers

    folder = local_source(folder)
    out = Path(out)
    require_output(folder, out, overwrite=overwrite)
    checkpoint = Checkpoint(folder, dtype="auto")
    names = checkpoint.config.architectures or [""]
    model_class = getattr(transformers, names[0], checkpoint.auto)
    model, remarks = checkpoint.model(model_class)
    inputs: dict[str, Any] = example_of(model)
    say(f"{type(model).__name__} from {folder}, traced with {', '.join(inputs)}")
    for remark in remarks:
        say(remark)
    report = fold_(model, **(inputs | options))
    if not any(report.count(name) for name in ("affine", "center")):
        raise ModelError(
            f"at least one norm must be foldable, but none is; nothing was written\n{report}"
        )
    write_out(
        model,
        folder,
        out,
        overwrite,
        report,
        template="fold.jinja",
        name=model_name(folder),
        remarks=remarks,
    )
    say(f"saved {out / 'model'} and {out / 'report.json'}")
    return report


def example_of(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Return random inputs of a transformers model, by the names of its forward's arguments."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    generator = torch.Generator(device="cpu").manual_seed(0)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def ids() -> Tensor:
        text = getattr(config, "text_config", config)
        length = _LENGTH
        limit = getattr(text, "max_position_embeddings", None)
        if isinstance(limit, int) and limit > 0:
            length = min(length, limit)
        # The first ids are often special tokens.
        first = min(4, text.vocab_size - 1)
        return torch.randint(first, text.vocab_size, (1, length), generator=generator, device="cpu")

    inputs: dict[str, Tensor] = {}
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, getattr(vision, "num_channels", 3), *sides)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        inputs["pixel_values"] = pixels.to(dtype)
    has_vocabulary = getattr(config, "vocab_size", None) or hasattr(config, "text_config")
    if "input_ids" in names and has_vocabulary:
        inputs["input_ids"] = ids()
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids()
    if not inputs:
        raise ArgumentError(
            f"the model must take texts or images, but {type(model).__name__} takes "
            f"{listed(names)}: call dynorm.fold_(model, *example) in Python"
        )
    return inputs
