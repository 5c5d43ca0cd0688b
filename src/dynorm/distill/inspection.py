"""A pretrained model in, what its norms do to outliers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from dynorm.distill.pretrained import encode, library_versions, load_pretrained, make_batches, on_device
from dynorm.distill.texts import read_texts, split_texts, standard_library_docstrings
from dynorm.errors import ArgumentError
from dynorm.find import find_norms
from dynorm.report import InspectionReport, inspect_norms
from dynorm.site import select_sites

Batches = Sequence[dict[str, Tensor]]
_BATCH = 32


def inspect_pretrained(
    folder: str | Path,
    *,
    texts: Sequence[str | Path] = (),
    samples: int = 256,
    max_length: int = 128,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    seed: int = 0,
    name: str | None = None,
    device: str = "cpu",
    track: Callable[[Batches, str], Iterable[dict[str, Tensor]]] = lambda batches, description: batches,
) -> InspectionReport:
    """Inspect the norms of the pretrained model in a folder: :func:`dynorm.inspect_norms` on texts.

    Args:
        folder: a transformers model with its tokenizer.
        texts: files and folders of texts; the docstrings of Python's standard library by default.
        samples: how many texts (of a language model: blocks) to fit on at most, and how many texts to measure on.
        max_length: the longest text, and the size of a block, in tokens.
        only: globs of the paths to inspect.
        skip: globs of the paths to leave out.
        seed: of the split of texts and of the samples.
        name: what the report calls the model; the folder's name by default.
        device: "cpu", "cuda", ...
        track: wraps the batches, to show a progress bar; given them and a description.

    Returns:
        The report.

    Raises:
        DynormError: bad arguments, texts, model or folder.
    """
    if samples < 1 or max_length < 2:
        raise ArgumentError(f"samples must be at least 1 and max_length at least 2, got {samples}, {max_length}")
    fit, held_out = split_texts(read_texts(texts) if texts else standard_library_docstrings(), samples, seed)
    pretrained = load_pretrained(folder, device)
    fitted, tests = (
        make_batches(pretrained, encode(pretrained, part, max_length)[:samples], _BATCH) for part in (fit, held_out)
    )
    sites = find_norms(pretrained.model, **on_device(fitted[0], pretrained.model))
    sites = select_sites(sites, only or None, skip or None)
    meta = {
        "model": name or Path(folder).name,
        "texts": [str(path) for path in texts] or "docstrings of the standard library",
        "texts_held_out": len(held_out),
        "max_length": max_length,
        "seed": seed,
        "versions": library_versions(),
    }
    return inspect_norms(
        pretrained.model,
        track(tests, "measuring"),
        sites=sites,
        fit_on=track(fitted, "fitting"),
        seed=seed,
        meta=meta,
    )
