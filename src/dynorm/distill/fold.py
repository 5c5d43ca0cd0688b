"""A pretrained model in, the same model with its norms folded out."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.distill.folders import copy_rest, require_free
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.files import write_text
from dynorm.fold import FoldReport, fold_
from dynorm.hub._atomic import replaced_directory

# Positions of the example; the graph does not depend on how many.
_LENGTH = 16


def fold_pretrained(
    folder: str | Path,
    out: str | Path,
    *,
    affine: bool = True,
    center: bool = True,
    add_bias: bool = False,
    untie: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    modules: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> FoldReport:
    """Fold the transformers model in a folder and save it, with its report, in another.

    Args:
        folder: as ``save_pretrained`` writes it.
        out: the new folder; ``model`` and ``report.json`` go there.
        affine: fold weights and biases.
        center: fold means.
        add_bias: give linear layers the biases that they lack.
        untie: untie tied weights where a fold needs it.
        only: globs of the norms to fold.
        skip: globs of the norms to leave alone.
        modules: without a graph; affine maps only.
        overwrite: replace a model that is in ``out`` already.
        say: called with a line at the start of each stage.

    Returns:
        The report.

    Raises:
        DynormError: bad arguments, model or folder, or nothing can be folded; nothing is written then.
    """
    folder, out = Path(folder), Path(out)
    require_free(out, overwrite)
    model = load_model(folder)
    inputs = example_of(model)
    say(f"{type(model).__name__} from {folder}, traced with {', '.join(inputs)}")
    options: dict[str, Any] = dict(inputs)
    report = fold_(
        model,
        affine=affine,
        center=center,
        add_bias=add_bias,
        untie=untie,
        only=only or None,
        skip=skip or None,
        trace="modules" if modules else "export",
        **options,
    )
    if not any(report.count(name) for name in ("affine", "center", "constants")):
        raise ModelError(f"at least one norm must be foldable, but none is; nothing was written\n{report}")
    _write(model, folder, out, report, overwrite)
    say(f"saved {out / 'model'} and {out / 'report.json'}")
    return report


def load_model(folder: Path) -> Any:
    """Load the model that a folder's config names, in its own dtype and eval mode, without the network.

    Raises:
        StorageError: there is none that transformers can read.
    """
    if not (folder / "config.json").is_file():
        raise StorageError(
            f"the model must be a folder with a config.json, but {folder} has none: give what save_pretrained wrote"
        )
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        cls = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
        return cls.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(f"transformers must be able to read the model in {folder}, but: {error}") from error


def example_of(model: Any) -> dict[str, Tensor]:
    """Return random inputs of a transformers model, by the names that its forward knows.

    Raises:
        ArgumentError: it takes none of the usual ones.
    """
    names = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(0)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    config = model.config

    def ids() -> Tensor:
        text = getattr(config, "text_config", config)
        limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
        length = min([_LENGTH, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
        return torch.randint(min(4, text.vocab_size - 1), text.vocab_size, (1, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    found: dict[str, Tensor] = {}
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        found["pixel_values"] = noise(1, getattr(vision, "num_channels", 3), height, width)
    if "input_ids" in names and (getattr(config, "vocab_size", None) or hasattr(config, "text_config")):
        found["input_ids"] = ids()
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        found["input_features"] = noise(1, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 64))
    if "input_values" in names and not found:
        found["input_values"] = noise(1, 4000)
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids()
    if not found:
        raise ArgumentError(
            f"an example input must be known for {type(model).__name__}, but its forward takes none of input_ids, "
            "pixel_values, input_features and input_values: call dynorm.fold_(model, *example) in Python"
        )
    return found


def _write(model: nn.Module, folder: Path, out: Path, report: FoldReport, overwrite: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the output folder {out} must be writable, but: {error}") from error
    with replaced_directory(out / "model", overwrite=overwrite) as new:
        model.save_pretrained(os.fspath(new))  # type: ignore[operator]
        copy_rest(folder, new)
    write_text(out / "report.json", json.dumps(report.to_dict(), indent=1) + "\n")
