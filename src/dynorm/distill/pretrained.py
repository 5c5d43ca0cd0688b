"""Pretrained models of transformers in folders: load one, turn texts into its batches, write a changed one."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.distill.card import write_card
from dynorm.errors import ArgumentError, DataError, DynormError, StorageError, require_library
from dynorm.files import replaced_directory, write_text
from dynorm.hub.contents import is_changed, listed

# fmt: off
_WEIGHTS = frozenset([
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".onnx_data", ".xml", ".msgpack", ".ot", ".gguf",
    ".tflite",
])
# fmt: on
_TOKENIZER = re.compile(r"tokenizer|vocab|merges|spiece|spm|sentencepiece|tekken|.*\.(?:model|spm)$")


@dataclass(frozen=True)
class Pretrained:
    """A model with the tokenizer that turns texts into its inputs.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        language_model: whether it predicts the next token; else it is taken for an encoder.
        source: the folder or file it came from.
        remarks: a sentence for each part of the checkpoint that is not in the model, or of the model that is not in it.
    """

    model: nn.Module
    tokenizer: Any
    language_model: bool
    source: Path
    remarks: tuple[str, ...] = ()


def load_pretrained(source: str | Path, device: str = "cpu", dtype: str = "float32") -> Pretrained:
    """Load a transformers model and its tokenizer from a folder or a GGUF file, without the network.

    Args:
        source: a folder as ``save_pretrained`` writes it, or a ``.gguf`` file, whose weights are dequantized.
        device: where the model goes.
        dtype: of the weights: "float32", "bfloat16" and the like, or "auto" for the checkpoint's own. Small steps of a
            distillation are lost in 16 bits.

    Returns:
        The model, as the causal language model that its config names, else as the bare encoder.

    Raises:
        ArgumentError: torch cannot use the device, there is no such dtype, or a GGUF file needs the library gguf.
        StorageError: the source does not exist, holds no model and tokenizer that transformers can read, or lacks
            weights of the model, or has layers that its config does not.

    Example:
        >>> load_pretrained("/nowhere")
        Traceback (most recent call last):
        dynorm.errors.StorageError: the model must be a folder with a config.json, but /nowhere has none: ...
    """
    source = Path(source)
    found = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ArgumentError(f"dtype must be auto or a floating point dtype of torch, such as float32, got {dtype!r}")
    require_device(device)
    language_model = require_config(source)
    tokenizer = _tokenizer_of(source)
    folder, options = _place(source)
    with _readable(source):
        from transformers import AutoModel, AutoModelForCausalLM

        auto = AutoModelForCausalLM if language_model else AutoModel
        model, info = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    remarks = _require_same_parts(source, model, info)
    if tokenizer.pad_token is None:
        # Any token will do: the mask hides it.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if folder != source:
        # Dequantized, yet transformers takes it for quantized still, and would not save it.
        model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
        vars(model.config).pop("quantization_config", None)
    return Pretrained(model.eval().to(device), tokenizer, language_model, source, remarks)


def require_device(device: str) -> None:
    """Check that torch can use a device.

    Raises:
        ArgumentError: it cannot.
    """
    try:
        torch.empty(0, device=device)
    # What torch raises for a device that it does not know, was not built for, or does not find.
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device must be one that torch can use here, got {device!r}: {error}") from error


def require_config(source: Path, globs: Iterable[str] = ()) -> bool:
    """Check a model's config, and that each glob matches one of its modules; tell whether it is a language model.

    Raises:
        ArgumentError: a glob matches no module, or a GGUF file needs the library gguf.
        StorageError: there is no model.
    """
    folder, options = _place(source)
    with _readable(source):
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, **options)
        names = config.architectures or ["ForCausalLM" if folder != source else ""]
        language_model = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
        if globs:
            with torch.device("meta"):
                model = (AutoModelForCausalLM if language_model else AutoModel).from_config(config)
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path, _ in model.named_modules(remove_duplicate=False)):
            raise ArgumentError(
                f"the glob {glob!r} must match the path of a norm, but matches no module of {type(model).__name__}"
            )
    return language_model


def _place(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the options of ``from_pretrained`` for a folder or a GGUF file."""
    if not (source.suffix == ".gguf" and source.is_file()):
        return source, {"local_files_only": True}
    require_library("gguf", "reading a GGUF file", "gguf")
    return source.parent, {"local_files_only": True, "gguf_file": source.name}


def _tokenizer_of(source: Path) -> Any:
    folder, options = _place(source)
    if folder == source and not any(_TOKENIZER.match(file.name) for file in folder.iterdir()):
        raise StorageError(
            f"{source} must hold the model's tokenizer, but has none of its files (tokenizer.json, vocab.txt, ...): "
            "copy them there; convert a model of images or audio in Python, with dynorm.find_norms and convert_"
        )
    with _readable(source, f"the tokenizer in {source}"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    # Of characters or bytes it needs no vocabulary; without the file of one, transformers makes one up.
    names = {*type(tokenizer).vocab_files_names.values(), "tokenizer.json"}
    if folder == source and type(tokenizer).vocab_files_names and not any((folder / name).is_file() for name in names):
        raise StorageError(
            f"{source} must hold the model's tokenizer, but has none of {listed(names)}: copy them there"
        )
    return tokenizer


def load_model(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """Load the model that a folder's config names, in its own dtype and eval mode, without the network.

    Returns:
        The model, and the remarks of :class:`Pretrained`.

    Raises:
        StorageError: there is none that transformers can read, or it lacks weights.
    """
    with _readable(folder):
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        cls = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
        model, info = cls.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
    return model.eval(), _require_same_parts(folder, model, info)


@contextmanager
def _readable(source: Path, what: str | None = None) -> Iterator[None]:
    if not (source.is_file() and source.suffix == ".gguf") and not (source / "config.json").is_file():
        raise StorageError(
            f"the model must be a folder with a config.json, but {source} has none: give what save_pretrained wrote, "
            "or a .gguf file"
        )
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    weights = next((file for file in files if file.suffix in _WEIGHTS), source)
    try:
        if weights.suffix == ".safetensors":
            from dynorm.hub.transformers import require_whole_weights

            require_whole_weights(source)
        yield
    except DynormError:
        raise
    # transformers raises whatever its files make it raise.
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        what = what or f"{weights} and its config"
        raise StorageError(f"transformers must be able to read {what}, but {found:.500}") from error


def _require_same_parts(source: Path, model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Check that a checkpoint has all of a model's weights and no layer beyond it; return remarks on the rest."""
    name = type(model).__name__
    # transformers fills what is missing with random numbers. A bare encoder's pooler is no part of its hidden states.
    missing, beyond = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lost := [key for key in missing if "pooler" not in key or model.base_model is not model]:
        raise StorageError(
            f"{source} must hold all weights of {name}, but lacks {listed(lost)}: is it a checkpoint of another class, "
            "or of a part?"
        )
    if layers := [key for key in beyond if _in_a_layer(model, key.removeprefix(f"{model.base_model_prefix}."))]:
        raise StorageError(
            f"{source / 'config.json'} must have all layers of its checkpoint, but {name} leaves out {listed(layers)}: "
            "correct the number of layers"
        )
    remarks = [f"Not in the checkpoint, and random here: {listed(missing)}. Do not use the pooler."] * bool(missing)
    return (*remarks, *[f"Left out of the checkpoint: {listed(beyond)}. {name} has no such part."] * bool(beyond))


def _in_a_layer(model: Any, key: str) -> bool:
    """Tell whether a tensor would belong to one more module of a list that the model, or its base, has."""
    module = model.base_model
    for name in key.split("."):
        if isinstance(module, nn.ModuleList) and name.isdecimal() and int(name) >= len(module):
            return True
        module = getattr(module, name, None)
    return False


def require_known_words(tokenizer: Any, encoded: Sequence[list[int]], size: int | None = None) -> None:
    """Check that a tokenizer knows the texts that it encoded, and the model, of a vocabulary of ``size``, its tokens.

    Raises:
        DataError: most of them became nothing, or unknown tokens; or an id is beyond the vocabulary.
    """
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer must give ids below the model's vocab_size of {size}, but gave {largest}: take the one "
            "that belongs to the model"
        )
    # The part that splits words may know a token that tokenizer_config.json does not declare.
    splitter = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = tokenizer.unk_token_id
    if unknown is None and (word := getattr(splitter, "unk_token", None)) is not None:
        unknown = tokenizer.convert_tokens_to_ids(word)
    special = {*tokenizer.all_special_ids, unknown}
    lost = sum(sum(i not in special for i in ids) <= ids.count(unknown) for ids in encoded)
    if 2 * lost > len(encoded):
        raise DataError(
            f"the tokenizer must know the texts, but {lost} of {len(encoded)} became nothing or unknown tokens: "
            "give texts in the model's language, or the tokenizer that belongs to the model"
        )


def within_positions(pretrained: Pretrained, max_length: int) -> int:
    """Return ``max_length``, or the number of the model's positions where it has fewer."""
    return min(max_length, getattr(pretrained.model.config, "max_position_embeddings", None) or max_length)


def encode(pretrained: Pretrained, texts: Sequence[str], max_length: int = 128) -> list[list[int]]:
    """Turn texts into token ids: one list per text for an encoder, full blocks of joined texts for a language model.

    Args:
        pretrained: whose tokenizer is used.
        texts: any number.
        max_length: the longest text, and the size of a block; :func:`within_positions` says what the model can take.

    Returns:
        One list of token ids per text, or per block.

    Raises:
        DataError: there is no text, too little for a block, or most of it is unknown to the tokenizer or the model.
    """
    max_length = within_positions(pretrained, max_length)
    size = getattr(pretrained.model.config, "vocab_size", None)
    if not texts:
        raise DataError("there must be at least one text, got none")
    tokenizer = pretrained.tokenizer
    if not pretrained.language_model:
        encoded: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
        require_known_words(tokenizer, encoded, size)
        return encoded
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    require_known_words(tokenizer, parts, size)
    joined = [token for part in parts for token in part + end]
    blocks = [joined[i : i + max_length] for i in range(0, len(joined) - max_length + 1, max_length)]
    if not blocks:
        raise DataError(f"texts must fill a block of {max_length} tokens, but they are {len(joined)} tokens: give more")
    return blocks


def collate(pretrained: Pretrained, encoded: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return one padded batch."""
    batch = pretrained.tokenizer.pad({"input_ids": list(encoded)}, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def make_batches(
    pretrained: Pretrained, encoded: Sequence[list[int]], batch_size: int = 32, seed: int | None = None
) -> list[dict[str, Tensor]]:
    """Return padded batches of texts of about equal length, so that little is padding.

    Args:
        pretrained: whose tokenizer pads.
        encoded: the lists that :func:`encode` returned.
        batch_size: texts per batch.
        seed: shuffles the batches; None leaves them from short to long.
    """
    by_length = sorted(encoded, key=len)
    starts = range(0, len(by_length), batch_size)
    batches = [collate(pretrained, by_length[start : start + batch_size]) for start in starts]
    if seed is not None:
        random.Random(seed).shuffle(batches)
    return batches


@dataclass
class ShuffledBatches:
    """The batches of :func:`make_batches`, of other texts and in another order at each pass.

    Args:
        pretrained: whose tokenizer pads.
        encoded: the lists that :func:`encode` returned.
        batch_size: texts per batch.
        seed: of the first pass.
    """

    pretrained: Pretrained
    encoded: Sequence[list[int]]
    batch_size: int
    seed: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Begin the next pass."""
        texts = random.Random(self.seed).sample(self.encoded, len(self.encoded))
        self.seed += 1
        return iter(make_batches(self.pretrained, texts, self.batch_size, self.seed))


@torch.no_grad()
def greedy(pretrained: Pretrained, model: Any, prompts: Sequence[list[int]], tokens: int) -> Tensor:
    """Return the likeliest continuations of prompts of one length, ``tokens`` long, whatever the model would end at."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    pad = pretrained.tokenizer.pad_token_id
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=pad, **length)
    assert isinstance(found, Tensor)
    return found[:, ids.shape[1] :].cpu()


def on_device(batch: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the batch where the model's parameters are."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def library_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import transformers

    from dynorm import __version__

    return {
        "dynorm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def require_apart(source: Path, out: Path, names: Sequence[str] = ("model",)) -> None:
    """Refuse an output that would replace the model that it is made from.

    Raises:
        ArgumentError: it would.
    """
    for name in names:
        if source.resolve().is_relative_to((out / name).resolve()):
            raise ArgumentError(f"the output must not replace its own source, but {out / name} holds {source}")


def require_free(out: Path, overwrite: bool, names: Sequence[str] = ("model", "report.json")) -> None:
    """Refuse before the work an output folder that could not be written after it."""
    for file in (out / name for name in names if name.endswith((".json", ".html"))):
        if file.is_dir():
            raise StorageError(f"{file} must be a file, but is a folder: choose another output folder")
    if (found := [out / name for name in names if (out / name).exists()]) and not overwrite:
        raise StorageError(f"{found[0]} exists already: choose another folder, or pass --overwrite")
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(f"the output must go into a folder that can be written, but {parent} cannot")


def write_out(
    model: nn.Module, source: Path, out: Path, report: dict[str, Any], facts: Sequence[str], overwrite: bool
) -> None:
    """Write a changed model, with the other files of its old folder, to ``out/model``, and ``out/report.json``.

    ``facts`` are the paragraphs of the model's card.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the output folder {out} must be writable, but: {error}") from error
    write_model(model, source, out / "model", overwrite, facts)
    write_text(out / "report.json", json.dumps(report, indent=1) + "\n")


def write_model(model: Any, source: Path, folder: Path, overwrite: bool, facts: Sequence[str] | None = None) -> None:
    """Write a model with the other files of its old folder, or the tokenizer of its GGUF file; if changed, a card."""
    with replaced_directory(folder, overwrite=overwrite, keep_others=False) as new:
        model.save_pretrained(os.fspath(new))
        if source.is_file():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(new)
        else:
            _copy_rest(source.absolute(), new)
        if facts is not None:
            write_card(new, source, facts, type(model).__name__, needs_dynorm=is_changed(model))


def _copy_rest(source: Path, target: Path) -> None:
    """Copy the other files of the model's folder: tokenizer, card, and the modules of sentence-transformers.

    Left out are its weights in any format, which are the original's, hidden files, and those of an earlier run.
    """
    parts, out = folders_of_modules(source), target.parent.absolute()
    # The source may stand in the output folder, or be it.
    earlier = out / "model" if source.is_relative_to(out) else out
    for file in sorted(source.rglob("*")):
        name, there = file.relative_to(source), target / file.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parent.parts)
        part = any(name.is_relative_to(folder) for folder in parts)
        weights = not part and (file.suffix in _WEIGHTS or name.name.endswith(".index.json"))
        written = any(file.is_relative_to(folder) for folder in (earlier, target.absolute())) or there.exists()
        if file.is_file() and not (hidden or weights or written):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)


def folders_of_modules(source: Path) -> list[str]:
    """Return the folders of a sentence-transformers model's other modules, which have weights of their own (a Dense).

    Raises:
        StorageError: modules.json does not list them.
    """
    file = source / "modules.json"
    if not file.is_file():
        return []
    try:
        return [str(entry["path"]) for entry in json.loads(file.read_text("utf-8")) if entry["path"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{file} must be a list of modules with their paths, but: {error!r}") from error
