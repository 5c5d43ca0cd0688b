"""Fold the norms of a pretrained model into their neighbours, and save it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynorm.errors import ArgumentError, ModelError
from dynorm.fold import FoldReport, fold_
from dynorm.jobs.checkpoint import Checkpoint, model_name
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

    folder = Path(folder)
    out = Path(out)
    require_output(folder, out, overwrite=overwrite)
    checkpoint = Checkpoint(folder, dtype="auto")
    names = checkpoint.config.architectures or [""]
    model_class = getattr(transformers, names[0], checkpoint.auto)
    model, remarks = checkpoint.model(model_class)
    inputs: dict[str, Any] = example_of(model, checkpoint.kind)
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


def example_of(model: PreTrainedModel, kind: str | None) -> dict[str, Tensor]:
    """Return random inputs of a transformers model that takes "texts" or "images"."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    config = model.config
    if kind == "images":
        size = getattr(config, "image_size", 224)
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, config.num_channels, *sides)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return {"pixel_values": pixels.to(model.dtype)}
    if kind != "texts":
        raise ArgumentError(
            f"the model must take texts or images, but {type(model).__name__} takes "
            f"{model.main_input_name}: call dynorm.fold_(model, *example) in Python"
        )
    text = config.get_text_config()
    length = min(_LENGTH, getattr(text, "max_position_embeddings", None) or _LENGTH)
    ids = torch.randint(text.vocab_size, (1, length), generator=generator, device="cpu")
    if config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}
