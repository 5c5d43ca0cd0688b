"""Pretrained models of transformers in folders: load one, and turn texts into its batches."""

import os
import platform
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, DataError, StorageError, listed, readable, require_library
from dynorm.jobs.write import WEIGHTS
from dynorm.recipe import KINDS
from dynorm.site import any_match

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Names of folders and files that say nothing about the model.
_ANY_MODEL = {"model", "models", "original", "checkpoint", "final", "weights", "snapshots"}
_TOKENIZER = re.compile(
    r"tokenizer|vocab|merges|spiece|spm|sentencepiece|tekken|.*\.(?:model|spm)$"
)


@dataclass(frozen=True)
class Pretrained:
    """A model, with the tokenizer or processor that makes its inputs from texts or images.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer or image processor.
        language_model: whether it predicts the next token; if not, it is treated as an encoder.
        source: the folder or file that it was loaded from.
        remarks: a sentence about the weights that only the checkpoint has, and one about those
            that only the model has.
    """

    model: nn.Module
    tokenizer: Any
    language_model: bool
    source: Path
    remarks: tuple[str, ...] = ()

    def padded(self, ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return a batch of texts that :func:`encode` returned."""
        padded = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    def within_positions(self, max_length: int) -> int:
        """Return ``max_length``, or the number of the model's positions if that is smaller."""
        config = _text_config(self.model)
        positions = getattr(config, "max_position_embeddings", None)
        return min(max_length, positions or max_length)

    @torch.no_grad()
    def greedy(self, model: "PreTrainedModel", prompts: Sequence[list[int]], tokens: int) -> Tensor:
        """Return the greedy continuations of prompts of equal length.

        Each has ``tokens`` tokens: an end-of-text token does not stop it.
        """
        from transformers import GenerationConfig

        ids = torch.tensor(prompts, device=next(model.parameters()).device)
        before = model.generation_config
        # The model's own may ask for samples, beams, penalties or another type of result.
        model.generation_config = GenerationConfig(
            eos_token_id=before.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )
        try:
            continued: Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
            )
        finally:
            model.generation_config = before
        return continued[:, ids.shape[1] :].cpu()


def _text_config(model: "PreTrainedModel") -> object:
    """Return the part of a model's config about its text model, or all of it."""
    return getattr(model.config, "text_config", model.config)


def local_source(source: str | Path) -> Path:
    """Return the folder or file of a model, downloaded if the source is a name on the hub.

    A name is a string, not a Path. It may end in "@revision". With HF_HUB_OFFLINE=1 only the cache of the hub is read.
    """
    if isinstance(source, Path) or Path(source).exists():
        return Path(source)
    name, _, revision = source.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision or None))
    # The library has many errors, for a missing repository, a missing network and others.
    except Exception as error:
        # Its messages have several lines.
        reason = " ".join(str(error).split())
        folder = Path(name).name
        option = f" --revision {revision}" if revision else ""
        raise StorageError(
            "the model must be a folder with a config.json, a .gguf file, or a model on the hub "
            f"within reach, but {source} is not here, and could not be downloaded: set "
            "HF_HUB_OFFLINE=0 where there is a network, or run "
            f"`hf download {name}{option} --local-dir {folder}` there, and give {folder} "
            f"({reason:.300})"
        ) from error


def load_pretrained(source: str | Path, device: str = "cpu", dtype: str = "float32") -> Pretrained:
    """Load a transformers model with its tokenizer or processor.

    The network is used only for a name on the hub that is not in its cache.

    Args:
        source: a folder written by ``save_pretrained``, a ``.gguf`` file, whose weights are
            dequantized, or the name of a model on the hub, with "@revision" if it is not the main
            one.
        device: the device of the model.
        dtype: the dtype of the weights, such as "float32" or "bfloat16", or "auto" for that of the
            checkpoint. In 16 bits, small steps of a distillation are rounded away.

    Returns:
        The model with the head named in its config, if that is for language or classes of images;
        otherwise the bare encoder.

    Raises:
        ArgumentError: torch cannot use the device, there is no such dtype, or a GGUF file needs the
            library gguf.
        StorageError: the source does not exist, transformers cannot read a model with its tokenizer
            or processor from it, weights of the model are missing, or the checkpoint has layers
            that the config leaves out.

    Example:
        >>> load_pretrained("/nowhere")
        Traceback (most recent call last):
        dynorm.errors.StorageError: the model must be a folder with a config.json, but /nowhere ...
    """
    return Checkpoint(source, device, dtype).load()


def model_name(source: Path) -> str:
    """Return the name of the model in a folder or GGUF file, for a report and a card.

    It is that of the folder, unless that is a word for any model, such as "model", or a revision in
    the cache of the hub.
    """
    path = source.absolute()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    name = path.name.removesuffix(".gguf")
    while name.lower() in _ANY_MODEL and path.parent.name:
        path = path.parent
        name = path.name
    return name


def require_place(device: str, dtype: str) -> None:
    """Check that torch knows a dtype and can use a device, or raise ArgumentError."""
    if dtype != "auto":
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise ArgumentError(
                "dtype must be auto or a floating point dtype of torch, such as float32, got "
                f"{dtype!r}"
            )
    try:
        torch.empty(0, device=device)
    # torch raises these for a device that is unknown, missing, or left out of its build.
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"device must be one that torch can use here, got {device!r}: {error}"
        ) from error


class Checkpoint:
    """A model's folder or GGUF file. The config is read at once, the rest on demand."""

    def __init__(self, path: str | Path, device: str = "cpu", dtype: str = "float32") -> None:
        import transformers

        require_place(device, dtype)
        source = local_source(path)
        self.source = source
        self.device = device
        self.dtype = dtype
        self.gguf = source.suffix == ".gguf" and source.is_file()
        self.weights = source
        if self.gguf:
            require_library("gguf", "reading a GGUF file", "gguf")
        elif (source / "config.json").is_file():
            weights = [file for file in sorted(source.iterdir()) if file.suffix in WEIGHTS]
            if weights:
                self.weights = weights[0]
        else:
            reason = "has none" if source.exists() else "does not exist"
            raise StorageError(
                f"the model must be a folder with a config.json, but {source} {reason}: give a "
                "folder written by save_pretrained, a .gguf file, or the name of a model on the hub"
            )
        if self.weights.suffix == ".safetensors":
            from dynorm.hub.transformers import require_whole_weights

            require_whole_weights(source)
        self.config = self._read(transformers.AutoConfig)
        names = self.config.architectures or ["ForCausalLM" if self.gguf else ""]
        self.language_model = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
        base = transformers.MODEL_MAPPING.get(type(self.config), None)
        if isinstance(base, tuple):
            base = base[0]
        self.takes: str = getattr(base, "main_input_name", "input_ids")
        self.kind = KINDS.get(self.takes)
        heads = {
            "ForCausalLM": transformers.AutoModelForCausalLM,
            "LMHeadModel": transformers.AutoModelForCausalLM,
            "ForImageClassification": transformers.AutoModelForImageClassification,
        }
        # Images are optional for such a model: given only texts, it is a language model.
        with_images = (
            self.kind == "texts"
            and type(self.config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and not self.config.is_encoder_decoder
            and names[0].endswith("ForConditionalGeneration")
        )
        if with_images:
            heads["ForConditionalGeneration"] = transformers.AutoModelForImageTextToText
            self.language_model = True
        self.auto = transformers.AutoModel
        for ending, auto in heads.items():
            if any(name.endswith(ending) for name in names):
                self.auto = auto
                break

    def load(self) -> Pretrained:
        """Return the model and its tokenizer or processor, ready for batches."""
        tokenizer = self.tokenizer() if self.kind == "texts" else self.processor()
        model, remarks = self.model(self.auto)
        if self.kind == "texts" and tokenizer.pad_token is None:
            # Any token will do, because the mask hides it.
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        if self.gguf:
            # The weights are dequantized now, but transformers would refuse to save them.
            model.hf_quantizer = None
            model.is_quantized = False
            model.quantization_method = None
            vars(model.config).pop("quantization_config", None)
        return Pretrained(
            model.to(self.device), tokenizer, self.language_model, self.source, remarks
        )

    def require_kind(self, samples: Mapping[str, Sequence[object]]) -> str:
        """Check that the user's samples are of the model's kind, and return that kind."""
        name = (self.config.architectures or [type(self.config).__name__])[0]
        kind = self.kind
        if kind is None:
            raise ArgumentError(
                f"the model must take one of {listed(KINDS)}, but {name} takes {self.takes}: "
                "convert it in Python, with dynorm.convert_model"
            )
        others = [other for other, paths in samples.items() if other != kind and paths]
        # Texts are optional: the standard library's docstrings are the default.
        is_missing = kind != "texts" and not samples.get(kind)
        if others or is_missing:
            raise ArgumentError(
                f"{kind} must be given for {name}, got {others[0] if others else 'none'}"
            )
        return kind

    def require_modules(self, globs: Iterable[str]) -> None:
        """Check that each glob matches a module of the model, without loading the weights."""
        if not globs:
            return
        with (
            readable(f"transformers must be able to read {self.weights} and its config"),
            torch.device("meta"),
        ):
            model = self.auto.from_config(self.config)
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        for glob in globs:
            if not any_match(paths, [glob]):
                raise ArgumentError(
                    f"the glob {glob!r} must match the path of a norm, but matches no module of "
                    f"{type(model).__name__}"
                )

    def model(self, cls: Any) -> tuple["PreTrainedModel", tuple[str, ...]]:
        """Return the model in eval mode, and the remarks of :class:`Pretrained`.

        A checkpoint without all weights of the model is refused.
        """
        model, info = self._read(cls, dtype=self.dtype, output_loading_info=True)
        remarks = _require_same_parts(self.source, model, info)
        if self.kind == "images" and any("pooler" in key for key in info["missing_keys"]):
            # Its weights are random. Without it, the class token itself is compared.
            model.pooler = None
        return model.eval(), remarks

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer, or raise StorageError if it has none."""
        from transformers import AutoTokenizer

        missing = f"{self.source} must hold the model's tokenizer, but has none of"
        if not self.gguf and not any(map(_TOKENIZER.match, os.listdir(self.source))):
            raise StorageError(
                f"{missing} its files (tokenizer.json, vocab.txt, ...): copy them there, or "
                "convert the model in Python, with dynorm.convert_model"
            )
        tokenizer = self._read(AutoTokenizer, f"the tokenizer in {self.source}")
        # Tokenizers of characters or bytes have no vocabulary file. For the others transformers
        # makes up a vocabulary if the file is missing.
        vocabulary = type(tokenizer).vocab_files_names
        if self.gguf or not vocabulary:
            return tokenizer
        names = {*vocabulary.values(), "tokenizer.json"}
        if not any((self.source / name).is_file() for name in names):
            raise StorageError(f"{missing} {listed(names)}: copy them there")
        return tokenizer

    def processor(self) -> Any:
        """Return the processor of images; StorageError if it is missing."""
        import transformers

        names = ("preprocessor_config.json", "processor_config.json")
        if not any((self.source / name).is_file() for name in names):
            raise StorageError(
                f"{self.source} must hold the model's image processor, but has none of "
                f"{listed(names)}: copy it"
            )
        return self._read(transformers.AutoImageProcessor, f"the image processor in {self.source}")

    def _read(self, cls: Any, title: str | None = None, **options: object) -> Any:
        folder = self.source
        if self.gguf:
            folder = self.source.parent
            options["gguf_file"] = self.source.name
        title = title or f"{self.weights} and its config"
        with readable(f"transformers must be able to read {title}"):
            return cls.from_pretrained(folder, local_files_only=True, **options)


def _require_same_parts(
    source: Path, model: "PreTrainedModel", info: dict[str, Any]
) -> tuple[str, ...]:
    """Check that a checkpoint has all weights and no further layers; return remarks on the rest."""
    name = type(model).__name__
    # transformers fills missing weights with random numbers. The pooler of a bare encoder does not
    # affect its hidden states, so that may be missing.
    missing = sorted(info["missing_keys"])
    is_bare = model.base_model is model
    lost = [key for key in missing if not (is_bare and "pooler" in key)]
    if lost:
        raise StorageError(
            f"{source} must hold all weights of {name}, but lacks {listed(lost)}: is it a "
            "checkpoint of another class, or of a part?"
        )
    left_out = sorted(info["unexpected_keys"])
    prefix = f"{model.base_model_prefix}."
    layers = [key for key in left_out if _in_a_layer(model, key.removeprefix(prefix))]
    if layers:
        raise StorageError(
            f"{source / 'config.json'} must have all layers of its checkpoint, but {name} leaves "
            f"out {listed(layers)}: correct the number of layers"
        )
    remarks = []
    if missing:
        remarks.append(
            f"Not in the checkpoint, and random here: {listed(missing)}. Do not use the pooler."
        )
    if left_out:
        remarks.append(f"Left out of the checkpoint: {listed(left_out)}. {name} has no such part.")
    return tuple(remarks)


def _in_a_layer(model: "PreTrainedModel", key: str) -> bool:
    """Whether a key's module would follow the last one of a list in the model's base."""
    module = model.base_model
    for name in key.split("."):
        if isinstance(module, nn.ModuleList) and name.isdecimal() and int(name) >= len(module):
            return True
        module = getattr(module, name, None)
    return False


def require_known_words(
    tokenizer: "PreTrainedTokenizerBase", encoded: Sequence[list[int]], size: int | None = None
) -> None:
    """Check that the tokenizer knows the texts, and that the model's vocabulary has their tokens.

    ``size`` is the number of tokens in that vocabulary.
    """
    largest = max((max(ids) for ids in encoded if ids), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer must give ids below the model's vocab_size of {size}, but gave "
            f"{largest}: take the one that belongs to the model"
        )
    unknown = tokenizer.unk_token_id
    if unknown is None:
        # The backend may know an unknown token that tokenizer_config.json does not declare.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        word = getattr(getattr(backend, "model", None), "unk_token", None)
        if word is not None:
            unknown = tokenizer.convert_tokens_to_ids(word)
    special = {*tokenizer.all_special_ids, unknown}
    lost = 0
    for ids in encoded:
        known = [i for i in ids if i not in special]
        if len(known) <= ids.count(unknown):
            lost += 1
    if 2 * lost > len(encoded):
        raise DataError(
            f"the tokenizer must know the texts, but {lost} of {len(encoded)} became nothing or "
            "unknown tokens: give texts in the model's language, or the tokenizer that belongs to "
            "the model"
        )


def encode(pretrained: Pretrained, texts: Sequence[str], max_length: int = 128) -> list[list[int]]:
    """Turn texts into lists of token ids.

    An encoder gets one list per text. For a language model the texts are joined and cut into
    blocks; an incomplete last block is dropped.

    Args:
        pretrained: the model with its tokenizer.
        texts: one or more texts.
        max_length: the length of the longest list, and of a block; at most the number of the
            model's positions is used.

    Returns:
        One list of token ids per text, or per block.

    Raises:
        DataError: there is no text or too little for a block, or the tokenizer or the model does
            not know most of it.
    """
    if not texts:
        raise DataError("there must be at least one text, got none")
    max_length = pretrained.within_positions(max_length)
    tokenizer = pretrained.tokenizer
    options: dict[str, object] = {"truncation": True, "max_length": max_length}
    if pretrained.language_model:
        options = {"add_special_tokens": False}
    encoded: list[list[int]] = tokenizer(list(texts), **options)["input_ids"]
    config = _text_config(pretrained.model)
    require_known_words(tokenizer, encoded, getattr(config, "vocab_size", None))
    if not pretrained.language_model:
        return encoded
    joined: list[int] = []
    for ids in encoded:
        joined += ids
        if tokenizer.eos_token_id is not None:
            joined.append(tokenizer.eos_token_id)
    starts = range(0, len(joined) - max_length + 1, max_length)
    blocks = [joined[start : start + max_length] for start in starts]
    if not blocks:
        raise DataError(
            f"texts must fill a block of {max_length} tokens, but they are {len(joined)} tokens: "
            "give more"
        )
    return blocks


@dataclass(frozen=True)
class Batches(Sequence[dict[str, Tensor]]):
    """Groups of samples, each made a batch when it is taken, so that memory holds only one."""

    make: Callable[[Any], dict[str, Tensor]]
    parts: Sequence[Sequence[object]]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Batches(self.make, self.parts[index])
        return self.make(self.parts[index])


def in_batches(
    make: Callable[[Any], dict[str, Tensor]],
    samples: Sequence[Any],
    size: int,
    seed: int | None = None,
    length: Callable[[Any], float] = len,
) -> Batches:
    """Group samples of similar length into batches, from short to long; a seed shuffles these."""
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
    """Return padded batches of texts of similar length, so that little is padding.

    Args:
        pretrained: the model with the tokenizer that pads.
        encoded: the lists that :func:`encode` returned.
        batch_size: texts per batch.
        seed: shuffles the batches; None keeps them in order of length.
    """
    return list(in_batches(pretrained.padded, encoded, batch_size, seed))


@dataclass
class ShuffledBatches:
    """Batches that are shuffled for each pass; ``make`` takes the samples, a size and a seed."""

    make: Callable[[Sequence[Any], int, int], Sequence[dict[str, Tensor]]]
    samples: Sequence[object]
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

    from dynorm import version

    return {
        "dynorm": version.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
