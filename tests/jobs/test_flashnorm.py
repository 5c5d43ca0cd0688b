"""``dynorm fold --format flashnorm``: weights of RMSNorms folded in the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Phi3Config, Phi3ForCausalLM
from typer.testing import CliRunner

import dynorm
from benchmarks.fold_models import build
from dynorm.cli import app
from dynorm.errors import DynormError, StorageError
from dynorm.jobs.fold import fold_pretrained

IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
BOTH = {"flashnorm_folded": True, "flash_norm": True}
LAST_KEPT = {"flashnorm_folded": False, "flash_norm": True}
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
NEITHER = {"flashnorm_folded": False, "flash_norm": False}


def phi3() -> Any:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) >= 2
    return folder


def folded(
    source: Path, out: Path, untie: bool = False, **options: Any
) -> dynorm.report.FoldReport:
    return fold_pretrained(source, out, {"untie": untie}, format="flashnorm", **options)


@pytest.mark.parametrize(
    ("name", "dtype", "tied", "untie", "keys", "left"),
    [
        ("llama", torch.float32, False, False, BOTH, ()),
        ("llama", torch.bfloat16, True, False, LAST_KEPT, ("norm",)),
        ("llama", torch.bfloat16, True, True, BOTH, ()),
        # Norms of queries and keys are not on the stream.
        ("qwen3", torch.bfloat16, False, False, BOTH, ("q_norm", "k_norm")),
        # 1 + weight, and norms before a sum.
        ("gemma2", torch.float32, True, False, NEITHER, (*AFTER, "norm")),
        ("phi3", torch.bfloat16, False, False, BOTH, ()),
    ],
)
def test_files_are_those_of_a_fold_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: torch.dtype,
    tied: bool,
    untie: bool,
    keys: dict[str, bool],
    left: tuple[str, ...],
) -> None:  # fmt: skip
    model: Any = phi3() if name == "phi3" else build(name, tie_word_embeddings=tied)
    source = saved(model.to(dtype), tmp_path / "source")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("dynorm.jobs.checkpoint.Checkpoint.model", lambda *_: pytest.fail("loaded"))
        report = folded(source, out, untie)
    stayed = {site.path.split(".")[-1] for site in report.sites if site.affine.state != "folded"}
    assert stayed == set(left)
    assert report.untied == (["lm_head.weight"] if untie else [])
    config = json.loads((out / "model" / "config.json").read_text())
    assert {key: config[key] for key in BOTH if key in config} == keys
    loaded = type(model).from_pretrained(out / "model")
    noise = 1e-5 if dtype is torch.float32 else 0.03
    with torch.no_grad():
        expected = model(IDS).logits
        assert float((loaded(IDS).logits - expected).norm() / expected.norm()) < noise
    # In memory the outputs are compared too.
    dynorm.fold_(model, IDS, center=False, untie=untie, tolerance=0.1)
    for ours, theirs in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True):
        assert ours.dtype is dtype
        assert torch.equal(ours, theirs)
    stored: dict[str, Any] = {}
    for file in (out / "model").glob("*.safetensors"):
        stored |= dict.fromkeys(load_file(file), file.name)
    index = json.loads((out / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == stored


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_is_stored_next_to_its_embedding_stays_its_own(
    tmp_path: Path, same: bool
) -> None:
    model = build("llama", tie_word_embeddings=same)
    model.config.tie_word_embeddings = False  # type: ignore[union-attr]
    source = saved(model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    folded(source, tmp_path / "out", untie=True)
    loaded: Any = type(model).from_pretrained(tmp_path / "out" / "model")  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, model(IDS).logits, 1e-4, 1e-4)


def test_a_norm_that_the_class_leaves_out_keeps_the_marks_away(tmp_path: Path) -> None:
    source = saved(build("llama"), tmp_path / "source")
    save_file({"model.layers.2.norm.weight": 2 * torch.ones(32)}, source / "model-more.safetensors")
    folded(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert not BOTH.keys() & config.keys()
    assert (tmp_path / "out" / "model" / "model-more.safetensors").is_file()


def test_the_command(tmp_path: Path) -> None:
    source = saved(build("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    words = ["fold", str(source), str(tmp_path / "out"), "--format", "flashnorm"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "5 of 5 affine maps folded" in done.output
    assert (tmp_path / "out" / "model" / "tokenizer.json").read_text() == "{}"
    assert "import dynorm" not in (tmp_path / "out" / "model" / "README.md").read_text()


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    cases: list[tuple[Path, type[DynormError], str]] = []
    for name, words in (
        # Its experts are stored one by one, and are one tensor in the model.
        ("mixtral", "by its name.*a shard is missing.*without --format"),
        ("gpt2", "must have RMSNorms, but GPT2LMHeadModel has none.*without --format"),
        ("vit", "must take texts, but.*pixel_values"),
    ):
        cases.append((saved(build(name), tmp_path / name), DynormError, words))
    for key, value, words in (
        ("quantization_config", {"quant_method": "bitsandbytes"}, "before it is quantized"),
        ("vocab_size", 97, r"config's shape \[97, 32\], but has \[96, 32\]"),
    ):
        source = saved(build("llama"), tmp_path / key)
        config = json.loads((source / "config.json").read_text()) | {key: value}
        (source / "config.json").write_text(json.dumps(config))
        cases.append((source, DynormError, words))
    large = build("llama").half()
    large.lm_head.weight.data.fill_(6e4)  # type: ignore[union-attr, operator]
    cases.append((saved(large, tmp_path / "half"), DynormError, "lm_head.weight must be finite"))
    source = saved(build("llama"), tmp_path / "llama")
    for file in source.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    cases.append((source, StorageError, "safetensors, but has none.*gguf_file="))
    quantized = saved(build("llama"), tmp_path / "quantized")
    for file in quantized.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("q_proj.weight"):
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, file, {"format": "pt"})
    cases.append((quantized, DynormError, "plain numbers.*float8"))
    for place, error, words in cases:
        with pytest.raises(error, match=f"(?s){words}"):
            folded(place, tmp_path / "out")
    damaged = saved(build("llama"), tmp_path / "damaged")
    for pattern in ("*.index.json", "*.safetensors"):
        next(damaged.glob(pattern)).write_bytes(b"cut")
        with pytest.raises(StorageError, match="must hold safetensors"):
            folded(damaged, tmp_path / "out")
    words = ["fold", str(source), str(tmp_path / "out"), "--format"]
    done = CliRunner().invoke(app, [*words, "gguf"])
    assert (done.exit_code, "flashnorm" in done.output) == (2, True)
    for option in ("--add-bias", "--no-center"):
        done = CliRunner().invoke(app, [*words, "flashnorm", option])
        assert "must come without" in str(done.exception)
    assert not (tmp_path / "out").exists()
