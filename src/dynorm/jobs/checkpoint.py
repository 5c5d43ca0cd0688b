"""Pretrained models of transformers in folders: read the config, load model and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, StorageError, listed, readable, require_library
from dynorm.jobs.pretrained import Pretrained
from dynorm.recipe import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens of an example; the graph of a model does not depend on their number.
_LENGTH = 16


def load_pretrained(source: str | Path, device: str = "cpu", dtype: str = "float32") -> Pretrained:
    """Load a transformers model with its tokenizer or processor.

    Args:
        source: a folder written by ``save_pretrained``, or a ``.gguf`` file, whose weights are
            dequantized.
        device: the device of the model.
        dtype: the dtype of the weights, such as "float32" or "bfloat16", or "auto" for that of the
            checkpoint. In 16 bits, small steps of a distillation are rounded away.

    Returns:
        The model with the head named in its config, if that is for language or classes of images;
        otherwise the bare encoder.

    Raises:
        ArgumentError: torch cannot use the device or does not know the dtype, or a GGUF file needs the
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

    It is that of the folder, unless that is "model", or a revision in the cache of the hub.
    """
    path = source.absolute()
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    name = path.name.removesuffix(".gguf")
    if name == "model":
        return path.parent.name or name
    return name


def require_place(device: str, dtype: str) -> None:
    """Check that torch knows a dtype and can use a device, or raise ArgumentError."""
    torch_dtype = getattr(torch, dtype, None)
    is_floating = isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point
    if dtype != "auto" and not is_floating:
        raise ArgumentError(
            f"dtype must be auto or a floating point dtype of torch, such as float32, got {dtype!r}"
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
        self.source = Path(path)
        self.device = device
        self.dtype = dtype
        self.gguf = self.source.suffix == ".gguf" and self.source.is_file()
        self._require_files()
        self.config = self._read(transformers.AutoConfig)
        names = self.config.architectures or ["ForCausalLM" if self.gguf else ""]
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
        if (
            self.kind == "texts"
            and type(self.config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and not self.config.is_encoder_decoder
        ):
            heads["ForConditionalGeneration"] = transformers.AutoModelForImageTextToText
        self.auto = transformers.AutoModel
        for ending, auto in heads.items():
            if any(name.endswith(ending) for name in names):
                self.auto = auto
                break
        self.language_model = self.kind == "texts" and self.auto is not transformers.AutoModel

    def _require_files(self) -> None:
        """Check that there is a folder with a config, or a GGUF file that can be read."""
        source = self.source
        if self.gguf:
            require_library("gguf", "reading a GGUF file", "gguf")
        elif not (source / "config.json").is_file():
            reason = "has none" if source.exists() else "does not exist"
            wanted = (
                "a folder written by save_pretrained, which `hf download` fetches, or a .gguf file"
            )
            if (source / "model").is_dir():
                wanted = str(source / "model")
            raise StorageError(
                f"the model must be a folder with a config.json, but {source} {reason}: give {wanted}"
            )

    def load(self) -> Pretrained:
        """Return the model and its tokenizer or processor, ready for batches."""
        tokenizer = self.tokenizer() if self.kind == "texts" else self.processor()
        model, remarks = self.model(self.auto)
        if self.kind == "texts" and tokenizer.pad_token is None:
            # Any token will do, because the mask hides it.
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        return Pretrained(
            model.to(self.device), tokenizer, self.language_model, self.source, remarks
        )

    def require_kind(self, samples: Mapping[str, Sequence[object]]) -> str:
        """Check that the user's samples are of the model's kind, and return that kind."""
        name = (self.config.architectures or [type(self.config).__name__])[0]
        kind = self.kind
        if kind is None:
            raise ArgumentError(
                f"the model must take {listed(set(KINDS.values()))}, but {name} takes "
                f"{self.takes}: convert it in Python, with dynorm.convert_model"
            )
        others = [other for other, paths in samples.items() if other != kind and paths]
        # Texts are optional: the standard library's docstrings are the default.
        is_missing = kind != "texts" and not samples.get(kind)
        if others or is_missing:
            raise ArgumentError(
                f"{kind} must be given for {name} (--{kind}), got {others[0] if others else 'none'}"
            )
        return kind

    def model(self, cls: Any) -> tuple[PreTrainedModel, tuple[str, ...]]:
        """Return the model in eval mode, and the remarks of :class:`Pretrained`.

        A checkpoint without all weights of the model is refused.
        """
        model, info = self._read(cls, dtype=self.dtype, output_loading_info=True)
        remarks = _require_same_parts(self.source, model, info)
        if self.gguf:
            # The weights are dequantized now, but transformers would refuse to save them.
            model.hf_quantizer = None
            model.is_quantized = False
            model.quantization_method = None
            vars(model.config).pop("quantization_config", None)
        if self.kind == "images" and any("pooler" in key for key in info["missing_keys"]):
            # Its weights are random. Without it, the class token itself is compared.
            model.pooler = None
        return model.eval(), remarks

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, or raise StorageError if it has none."""
        from transformers import AutoTokenizer

        tokenizer = self._read(AutoTokenizer, f"the tokenizer in {self.source}")
        # transformers makes up an empty one where the files are missing.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise StorageError(
                f"{self.source} must hold the model's tokenizer, but has none of its files "
                "(tokenizer.json, vocab.txt, ...): copy them there, or convert the model in "
                "Python, with dynorm.convert_model"
            )
        return tokenizer

    def processor(self) -> Any:
        """Return the processor of images."""
        from transformers import AutoImageProcessor

        return self._read(AutoImageProcessor, f"the image processor in {self.source}")

    def _read(self, cls: Any, title: str | None = None, **options: object) -> Any:
        folder = self.source
        if self.gguf:
            folder = self.source.parent
            options["gguf_file"] = self.source.name
        with readable(f"transformers must be able to read {title or self.source}"):
            return cls.from_pretrained(folder, local_files_only=True, **options)


def _require_same_parts(
    source: Path, model: PreTrainedModel, info: dict[str, Any]
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


def _in_a_layer(model: PreTrainedModel, key: str) -> bool:
    """Whether a key's module would follow the last one of a list in the model's base."""
    module = model.base_model
    for name in key.split("."):
        if isinstance(module, nn.ModuleList) and name.isdecimal() and int(name) >= len(module):
            return True
        module = getattr(module, name, None)
    return False


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
