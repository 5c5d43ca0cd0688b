"""Pretrained models of transformers in folders: load one, and turn texts into its batches."""

import platform
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, DataError, StorageError, listed, readable, require_library
from dynorm.jobs.write import WEIGHTS
from dynorm.site import any_match

KINDS = {
    "input_ids": "texts",
    "pixel_values": "images",
    "input_features": "audio",
    "input_values": "audio",
}
"""What a user gives for a model's main input."""
_TOKENIZER = re.compile(
    r"tokenizer|vocab|merges|spiece|spm|sentencepiece|tekken|.*\.(?:model|spm)$"
)


@dataclass(frozen=True)
class Pretrained:
    """A model with the tokenizer that turns texts into its inputs, or the processor that does so with images or audio.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer, image processor, or processor or feature extractor of audio.
        language_model: whether it predicts the next token; else it is taken for an encoder.
        source: the folder or file it came from.
        remarks: a sentence for each part of the checkpoint that is not in the model, or of the
            model that is not in it.
    """

    model: nn.Module
    tokenizer: Any
    language_model: bool
    source: Path
    remarks: tuple[str, ...] = ()

    def padded(self, ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return a batch of texts that :func:`encode` returned."""
        found = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def within_positions(self, max_length: int) -> int:
        """Return ``max_length``, or the number of the model's positions where it has fewer."""
        config = _text_config(self.model)
        return min(max_length, getattr(config, "max_position_embeddings", None) or max_length)

    @torch.no_grad()
    def greedy(self, model: Any, prompts: Sequence[list[int]], tokens: int) -> Tensor:
        """Return a model's likeliest continuations of prompts of one length, ``tokens`` long, even past its end."""
        from transformers import GenerationConfig

        ids = torch.tensor(prompts, device=next(model.parameters()).device)
        own, pad = model.generation_config, self.tokenizer.pad_token_id
        # Its own may ask for samples, beams, penalties, or another kind of answer.
        model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=pad)
        try:
            length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            found: Tensor = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, **length
            )
        finally:
            model.generation_config = own
        return found[:, ids.shape[1] :].cpu()


def _text_config(model: Any) -> Any:
    """Return a model's config, or the part of it that is of the text model."""
    return getattr(model.config, "text_config", model.config)


def load_pretrained(source: str | Path, device: str = "cpu", dtype: str = "float32") -> Pretrained:
    """Load a transformers model from a folder or a GGUF file, with its tokenizer or processor; no network.

    Args:
        source: a folder as ``save_pretrained`` writes it, or a ``.gguf`` file, whose weights are
            dequantized.
        device: where the model goes.
        dtype: of the weights: "float32", "bfloat16" and the like, or "auto" for the checkpoint's
            own. Small steps of a distillation are lost in 16 bits.

    Returns:
        The model with the head that its config names, where that is for language, speech, or
        classes of images or audio; else the bare encoder.

    Raises:
        ArgumentError: torch cannot use the device, there is no such dtype, or a GGUF file needs the
            library gguf.
        StorageError: the source does not exist, holds no model and tokenizer or processor that
            transformers can read, or lacks weights of the model, or has layers that its config does
            not.

    Example:
        >>> load_pretrained("/nowhere")
        Traceback (most recent call last):
        dynorm.errors.StorageError: the model must be a folder with a config.json, but /nowhere has none: ...
    """
    return Checkpoint(source, device, dtype).load()


def require_place(device: str, dtype: str) -> None:
    """Check that torch knows a dtype and can use a device, or raise ArgumentError."""
    found = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ArgumentError(
            f"dtype must be auto or a floating point dtype of torch, such as float32, got {dtype!r}"
        )
    try:
        torch.empty(0, device=device)
    # What torch raises for a device that it does not know, was not built for, or does not find.
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"device must be one that torch can use here, got {device!r}: {error}"
        ) from error


class Checkpoint:
    """The folder of a model, or its GGUF file, as transformers reads it: its config at once, the rest on demand."""

    def __init__(self, path: str | Path, device: str = "cpu", dtype: str = "float32") -> None:
        import transformers

        require_place(device, dtype)
        source, self.device, self.dtype = Path(path), device, dtype
        self.source, self.gguf = source, source.suffix == ".gguf" and source.is_file()
        if self.gguf:
            require_library("gguf", "reading a GGUF file", "gguf")
        elif not (source / "config.json").is_file():
            raise StorageError(
                f"the model must be a folder with a config.json, but {source} has none: give what "
                "save_pretrained "
                "wrote, or a .gguf file"
            )
        files = [source] if self.gguf else sorted(source.iterdir())
        self.weights = next((file for file in files if file.suffix in WEIGHTS), source)
        if self.weights.suffix == ".safetensors":
            from dynorm.hub.transformers import require_whole_weights

            require_whole_weights(source)
        self.config = self._read(transformers.AutoConfig)
        names = self.config.architectures or ["ForCausalLM" if self.gguf else ""]
        self.language_model = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
        known = transformers.MODEL_MAPPING.get(type(self.config), None)
        self.takes: str = getattr(
            known[0] if isinstance(known, tuple) else known, "main_input_name", "input_ids"
        )
        self.kind = KINDS.get(self.takes)
        heads = {
            "ForCausalLM": transformers.AutoModelForCausalLM,
            "LMHeadModel": transformers.AutoModelForCausalLM,
            "ForImageClassification": transformers.AutoModelForImageClassification,
        }
        if self.kind == "audio":
            heads = {
                "ForConditionalGeneration": transformers.AutoModelForSpeechSeq2Seq,
                "ForCTC": transformers.AutoModelForCTC,
                "ForAudioClassification": transformers.AutoModelForAudioClassification,
                "ForSequenceClassification": transformers.AutoModelForAudioClassification,
            }
        # Images are optional to such a model: with texts only, it is a language model.
        with_images = (
            self.kind == "texts"
            and type(self.config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and not self.config.is_encoder_decoder
            and names[0].endswith("ForConditionalGeneration")
        )
        if with_images:
            heads["ForConditionalGeneration"] = transformers.AutoModelForImageTextToText
            self.language_model = True
        found = (auto for end, auto in heads.items() if any(name.endswith(end) for name in names))
        self.auto = next(found, transformers.AutoModel)

    def load(self) -> Pretrained:
        """Return the model and its tokenizer or processor, ready for batches."""
        tokenizer = self.tokenizer() if self.kind == "texts" else self.processor()
        model, remarks = self.model(self.auto)
        if self.kind == "texts" and tokenizer.pad_token is None:
            # Any token will do: the mask hides it.
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        if self.gguf:
            # Dequantized, yet transformers takes it for quantized still, and would not save it.
            model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
            vars(model.config).pop("quantization_config", None)
        return Pretrained(
            model.to(self.device), tokenizer, self.language_model, self.source, remarks
        )

    def require_kind(self, given: Mapping[str, Sequence[Any]]) -> str:
        """Check that the texts, images or audio that are given are of the model's kind, and return which that is."""
        name = (self.config.architectures or [type(self.config).__name__])[0]
        if (kind := self.kind) is None:
            raise ArgumentError(
                f"the model must take one of {listed(KINDS)}, but {name} takes {self.takes}: "
                "convert it in Python, "
                "with dynorm.convert_model"
            )
        others = [other for other, paths in given.items() if other != kind and paths]
        # Texts there are with every Python.
        if others or (kind != "texts" and not given.get(kind)):
            raise ArgumentError(
                f"{kind} must be given for {name}, got {others[0] if others else 'none'}"
            )
        return kind

    def require_modules(self, globs: Iterable[str]) -> None:
        """Check that each glob matches a module of the model, which needs no weights for that."""
        if not globs:
            return
        with (
            readable(f"transformers must be able to read {self.weights} and its config"),
            torch.device("meta"),
        ):
            model = self.auto.from_config(self.config)
        for glob in globs:
            if not any_match(
                (path for path, _ in model.named_modules(remove_duplicate=False)), [glob]
            ):
                raise ArgumentError(
                    f"the glob {glob!r} must match the path of a norm, but matches no module of "
                    f"{type(model).__name__}"
                )

    def model(self, cls: Any) -> tuple[Any, tuple[str, ...]]:
        """Return the model in eval mode, and the remarks of :class:`Pretrained`; refuse one that lacks weights."""
        model, info = self._read(cls, dtype=self.dtype, output_loading_info=True)
        remarks = _require_same_parts(self.source, model, info)
        if self.kind == "images" and any("pooler" in key for key in info["missing_keys"]):
            # Random, it would come between the class token and the figures.
            model.pooler = None
        return model.eval(), remarks

    def tokenizer(self) -> Any:
        """Return the tokenizer, or raise StorageError where there is none of the model's own."""
        from transformers import AutoTokenizer

        missing = f"{self.source} must hold the model's tokenizer, but has none of"
        if not (self.gguf or any(_TOKENIZER.match(file.name) for file in self.source.iterdir())):
            raise StorageError(
                f"{missing} its files (tokenizer.json, vocab.txt, ...): copy them there, or "
                "convert the model in "
                "Python, with dynorm.convert_model"
            )
        tokenizer = self._read(AutoTokenizer, f"the tokenizer in {self.source}")
        # Of characters or bytes it needs no vocabulary; without the file of one, transformers makes
        # one up.
        names = {*type(tokenizer).vocab_files_names.values(), "tokenizer.json"}
        own = self.gguf or not type(tokenizer).vocab_files_names
        if not (own or any((self.source / name).is_file() for name in names)):
            raise StorageError(f"{missing} {listed(names)}: copy them there")
        return tokenizer

    def processor(self) -> Any:
        """Return the processor of images or audio, or raise StorageError where it is missing or lacks a tokenizer."""
        import transformers

        what, cls = "image processor", transformers.AutoImageProcessor
        if self.kind == "audio":
            what, cls = "feature extractor", transformers.AutoFeatureExtractor
        names = ("preprocessor_config.json", "processor_config.json")
        if not any((self.source / name).is_file() for name in names):
            raise StorageError(
                f"{self.source} must hold the model's {what}, but has none of {listed(names)}: "
                "copy it"
            )
        if self.auto in (transformers.AutoModelForSpeechSeq2Seq, transformers.AutoModelForCTC):
            # Only to see that there is one.
            self.tokenizer()
            what, cls = "processor", transformers.AutoProcessor
        return self._read(cls, f"the {what} in {self.source}")

    def _read(self, cls: Any, what: str | None = None, **options: Any) -> Any:
        place, more = (
            (self.source.parent, {"gguf_file": self.source.name})
            if self.gguf
            else (self.source, {})
        )
        with readable(
            f"transformers must be able to read {what or f'{self.weights} and its config'}"
        ):
            return cls.from_pretrained(place, local_files_only=True, **more, **options)


def _require_same_parts(source: Path, model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Check that a checkpoint has all of a model's weights and no layer beyond it; return remarks on the rest."""
    name = type(model).__name__
    # transformers fills what is missing with random numbers. A bare encoder's pooler is no part of
    # its hidden states.
    missing, beyond = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if lost := [key for key in missing if "pooler" not in key or model.base_model is not model]:
        raise StorageError(
            f"{source} must hold all weights of {name}, but lacks {listed(lost)}: is it a "
            "checkpoint of another class, "
            "or of a part?"
        )
    if layers := [
        key for key in beyond if _in_a_layer(model, key.removeprefix(f"{model.base_model_prefix}."))
    ]:
        raise StorageError(
            f"{source / 'config.json'} must have all layers of its checkpoint, but {name} leaves "
            f"out {listed(layers)}: "
            "correct the number of layers"
        )
    remarks = [
        f"Not in the checkpoint, and random here: {listed(missing)}. Do not use the pooler."
    ] * bool(missing)
    return (
        *remarks,
        *[f"Left out of the checkpoint: {listed(beyond)}. {name} has no such part."] * bool(beyond),
    )


def _in_a_layer(model: Any, key: str) -> bool:
    """Tell whether a tensor would belong to one more module of a list that the model, or its base, has."""
    module = model.base_model
    for name in key.split("."):
        if isinstance(module, nn.ModuleList) and name.isdecimal() and int(name) >= len(module):
            return True
        module = getattr(module, name, None)
    return False


def require_known_words(
    tokenizer: Any, encoded: Sequence[list[int]], size: int | None = None
) -> None:
    """Check that a tokenizer knows the texts it encoded, and the model, of a vocabulary of ``size``, its tokens."""
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer must give ids below the model's vocab_size of {size}, but gave "
            f"{largest}: take the one "
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
            f"the tokenizer must know the texts, but {lost} of {len(encoded)} became nothing or "
            "unknown tokens: "
            "give texts in the model's language, or the tokenizer that belongs to the model"
        )


def encode(pretrained: Pretrained, texts: Sequence[str], max_length: int = 128) -> list[list[int]]:
    """Turn texts into token ids: one list per text for an encoder, full blocks of joined texts for a language model.

    Args:
        pretrained: whose tokenizer is used.
        texts: any number.
        max_length: the longest text, and the size of a block; no more than the model's positions
            are used.

    Returns:
        One list of token ids per text, or per block.

    Raises:
        DataError: there is no text, too little for a block, or most of it is unknown to the
            tokenizer or the model.
    """
    if not texts:
        raise DataError("there must be at least one text, got none")
    max_length, tokenizer = pretrained.within_positions(max_length), pretrained.tokenizer
    whole = (
        {"add_special_tokens": False}
        if pretrained.language_model
        else {"truncation": True, "max_length": max_length}
    )
    encoded: list[list[int]] = tokenizer(list(texts), **whole)["input_ids"]
    config = _text_config(pretrained.model)
    require_known_words(tokenizer, encoded, getattr(config, "vocab_size", None))
    if not pretrained.language_model:
        return encoded
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined = [token for part in encoded for token in part + end]
    blocks = [
        joined[i : i + max_length] for i in range(0, len(joined) - max_length + 1, max_length)
    ]
    if not blocks:
        raise DataError(
            f"texts must fill a block of {max_length} tokens, but they are {len(joined)} tokens: "
            "give more"
        )
    return blocks


@dataclass(frozen=True)
class Batches(Sequence[Any]):
    """Parts of the samples, each made a batch when it is taken, for all together may not fit into memory."""

    make: Callable[[Any], dict[str, Tensor]]
    parts: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        return (
            Batches(self.make, self.parts[index])
            if isinstance(index, slice)
            else self.make(self.parts[index])
        )


def in_batches(
    make: Callable[[Any], dict[str, Tensor]],
    samples: Sequence[Any],
    size: int,
    seed: int | None = None,
    length: Callable[[Any], float] = len,
) -> Batches:
    """Return samples of about equal length together, from short to long; a seed shuffles the batches."""
    ordered = sorted(samples, key=length)
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    if seed is not None:
        random.Random(seed).shuffle(parts)
    return Batches(make, parts)


def make_batches(
    pretrained: Pretrained,
    encoded: Sequence[list[int]],
    batch_size: int = 32,
    seed: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return padded batches of texts of about equal length, so that little is padding.

    Args:
        pretrained: whose tokenizer pads.
        encoded: the lists that :func:`encode` returned.
        batch_size: texts per batch.
        seed: shuffles the batches; None leaves them from short to long.
    """
    return list(in_batches(pretrained.padded, encoded, batch_size, seed))


@dataclass
class ShuffledBatches:
    """Batches of other samples and in another order at each pass, as ``make`` returns them of a size and a seed."""

    make: Callable[[Sequence[Any], int, int], Sequence[dict[str, Tensor]]]
    samples: Sequence[Any]
    batch_size: int
    seed: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Begin the next pass."""
        samples = random.Random(self.seed).sample(self.samples, len(self.samples))
        self.seed += 1
        return iter(self.make(samples, self.batch_size, self.seed))


def library_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import transformers

    from dynorm._version import __version__

    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    return {"dynorm": __version__, "python": platform.python_version(), **versions}
