"""A decoder in a GGUF file: loaded, converted, and saved as a folder that from_pretrained loads."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from dynorm.errors import StorageError
from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.convert import convert_pretrained
from dynorm.jobs.fold import fold_pretrained
from dynorm.recipe import Recipe
from dynorm.replace.converted import dynorm_layers

C, BLOCKS = 16, 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over bytes, beside a file that is none of its own."""
    gguf = pytest.importorskip("gguf")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "th", "in", "<|end|>"]
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.with_name("setup.py").write_text("")
    writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(64)
    writer.add_embedding_length(C)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(2 * C)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3])
    writer.add_token_merges(["t h", "i n"])
    writer.add_eos_token_id(258)
    writer.add_bos_token_id(258)
    shapes = {"token_embd": (len(tokens), C), "output_norm": (C,)}
    for block, (name, shape) in itertools.product(
        range(BLOCKS),
        {
            "attn_norm": (C,),
            "ffn_norm": (C,),
            "ffn_gate": (2 * C, C),
            "ffn_up": (2 * C, C),
            "ffn_down": (C, 2 * C),
        }.items()
        | {f"attn_{part}": (C, C) for part in ("q", "k", "v", "output")}.items(),
    ):
        shapes[f"blk.{block}.{name}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(
            f"{name}.weight",
            draw.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_a_gguf_file_is_converted(file: Path, texts: Path, tmp_path: Path) -> None:
    recipe = Recipe(held_out=16, max_length=32, steps=2)
    report = convert_pretrained(file, tmp_path / "out", recipe, texts=[texts])
    assert report.output.kind == "language"
    assert len(report.sites) == 2 * BLOCKS + 1
    written = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert "tokenizer.json" in written
    assert "setup.py" not in written
    assert len(dynorm_layers(load_pretrained(tmp_path / "out" / "model").model)) == 2 * BLOCKS + 1


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(StorageError, match=r"broken\.gguf"):
        load_pretrained(tmp_path / "broken.gguf")


def test_a_fold_of_its_files_is_refused_and_one_in_memory_reads_it(
    file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(StorageError, match=r"must be a folder with model.*gguf_file="):
        fold_pretrained(file, out, {"untie": False}, format="flashnorm")
    assert not out.exists()
    report = fold_pretrained(file, out, {"center": False, "untie": True})
    assert report.count("affine") == 2 * BLOCKS + 1
    assert report.loads_with == "stock"
