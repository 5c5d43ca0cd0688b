"""Converted models in what transformers builds around a model: the Trainer, pipelines, generate, folders in shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import dynorm
from tests.ecosystem.models import (
    VOCABULARY,
    bert,
    checkpoint_activations,
    converted,
    first,
    gpt2,
    ids,
    kinds,
    llama,
    saved,
)

MODELS = {"gpt2": gpt2, "llama": llama}


def trainer(model: nn.Module, folder: Path, **options: Any) -> Trainer:
    settings = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids(16)]
    optimizer = torch.optim.AdamW(
        dynorm.param_groups(model, lr=1e-2, weight_decay=0.1, constants_lr=3e-2)
    )
    arguments = TrainingArguments(**(settings | options))
    return Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:4], optimizers=(optimizer, None)
    )


def test_a_run_of_the_trainer_stops_resumes_and_is_saved(tmp_path: Path) -> None:
    model = gpt2()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    whole = trainer(model, tmp_path / "run", gradient_accumulation_steps=2)
    whole.train()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    constant = "transformer.ln_f.log_beta"
    assert not torch.equal(expected[constant], start[constant])
    model.load_state_dict(start)
    rest = trainer(model, tmp_path / "run", gradient_accumulation_steps=2)
    rest.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [entry["loss"] for entry in rest.state.log_history if "loss" in entry][-2:] == [
        entry["loss"] for entry in whole.state.log_history if "loss" in entry
    ][-2:]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    rest.save_model(str(tmp_path / "model"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert kinds(loaded) == ["DyISRU"] * 5
    assert torch.equal(first(loaded), first(model.eval()))


def test_pipelines_give_what_the_model_gives(tmp_path: Path) -> None:
    model = bert("BertForMaskedLM")
    folder = saved(model, tmp_path / "bert")
    text = "w5 w6 [MASK] w8"
    inputs = {"input_ids": torch.tensor([[5, 6, 3, 8]])}
    features = transformers.pipeline("feature-extraction", model=str(folder))(
        text, return_tensors=True
    )
    torch.testing.assert_close(features, first(model.bert, **inputs))
    best = transformers.pipeline("fill-mask", model=str(folder))(text, top_k=3)
    scores, tokens = first(model, **inputs)[0, 2].softmax(-1).topk(3)
    assert [answer["token"] for answer in best] == tokens.tolist()
    assert [answer["score"] for answer in best] == pytest.approx(scores.tolist(), rel=1e-5)


def test_a_pipeline_generates_a_batch_of_texts(tmp_path: Path) -> None:
    model = gpt2()
    pipeline = transformers.pipeline("text-generation", model=str(saved(model, tmp_path / "gpt2")))
    settings = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=False, eos_token_id=1, pad_token_id=0
    )
    alone = [
        pipeline(text, generation_config=settings)[0]["generated_text"]
        for text in ("w5 w6 w7", "w9")
    ]
    pipeline.tokenizer.padding_side = "left"
    together = pipeline(["w5 w6 w7", "w9"], generation_config=settings, batch_size=2)
    assert [answers[0]["generated_text"] for answers in together] == alone
    expected = greedy(model, torch.tensor([[5, 6, 7]]), 4)[0].tolist()
    assert re.findall(r"w\d+", alone[0]) == [f"w{i}" for i in expected]


def greedy(model: nn.Module, prompt: Tensor, steps: int) -> Tensor:
    """The most likely tokens, each from the whole text before it."""
    for _ in range(steps):
        prompt = torch.cat([prompt, first(model, input_ids=prompt)[:, -1:].argmax(-1)], 1)
    return prompt


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_the_same_with_every_cache(name: str) -> None:
    model, prompt = MODELS[name](), ids(3, 5)
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones(3, 5),
    }
    expected = greedy(model, prompt, 6)
    assert len({tuple(row) for row in expected[:, 5:].tolist()}) > 1
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), expected)
    assert torch.equal(model.generate(prompt, **settings), expected)
    # The static cache would be compiled on an accelerator; here it is only filled.
    assert torch.equal(model.generate(prompt, cache_implementation="static", **settings), expected)
    beams = [
        model.generate(prompt, num_beams=3, use_cache=cache, **settings) for cache in (False, True)
    ]
    assert torch.equal(*beams)


def test_a_folder_in_shards(tmp_path: Path) -> None:
    model = gpt2(to="derf")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for loaded in (
        dynorm.load(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}),
    ):
        assert kinds(loaded) == ["Derf"] * 5
        assert torch.equal(first(loaded), first(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_is_loaded_in_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = gpt2()
    dynorm.save(model, tmp_path / "m")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(first(loaded), first(model.to(dtype)))
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert torch.equal(first(again), first(loaded))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_no_gradient(name: str, use_reentrant: bool) -> None:
    model = MODELS[name]().train()
    found = []
    for on in (False, True):
        if on:
            checkpoint_activations(model, use_reentrant=use_reentrant)
            model.enable_input_require_grads()
        model.zero_grad()
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        assert torch.equal(gradient, found[1][key]), key


def test_a_model_that_initialises_the_weight_of_a_norm_without_one(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "time_step_rank": 4,
        "state_size": 8,
    }
    config = transformers.FalconMambaConfig(vocab_size=VOCABULARY, **sizes)
    model = converted(transformers.FalconMambaForCausalLM(config))
    if not hasattr(model.backbone.layers[0].mixer, "dt_layernorm"):
        pytest.skip("in this version of transformers the norm is no module")
    assert model.backbone.layers[0].mixer.dt_layernorm.weight is None
    dynorm.save(model, tmp_path / "m")
    loaded = dynorm.load(tmp_path / "m")
    assert loaded.backbone.layers[0].mixer.dt_layernorm.weight is None
    assert torch.equal(first(loaded), first(model))
    assert loaded.state_dict().keys() == model.state_dict().keys()
