"""A constant first token: its logits are those of the token itself, and it is trained, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import TrainerCallback

import dynorm
from benchmarks import fold_models
from dynorm.errors import ArgumentError, ModelError
from dynorm.hub import with_prefix
from tests.ecosystem import models

TOKEN = 2


def llama(**options: Any) -> Any:
    return fold_models.build("llama", **({"bos_token_id": TOKEN} | options))


def gpt2() -> Any:
    return dynorm.restore_(models.gpt2())


def texts() -> torch.Tensor:
    return models.ids(3, 9)


@pytest.mark.parametrize("build", [llama, gpt2])
@torch.no_grad()
def test_logits_and_texts_are_those_after_the_token(build: Any) -> None:
    model = build()
    prefixed = with_prefix(copy.deepcopy(model))
    ids = texts()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    after_token = pad(ids, (1, 0), value=TOKEN)
    expected = model(after_token, attention_mask=pad(mask, (1, 0), value=1)).logits[:, 1:]
    logits = prefixed(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = prefixed.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    every = torch.ones_like(after_token)
    wanted = model.generate(after_token, attention_mask=every, **settings)
    assert torch.equal(found[:, 9:], wanted[:, 10:])


def test_it_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    import peft

    original = llama()
    teacher = with_prefix(original)
    model = with_prefix(copy.deepcopy(original))
    batches = [{"input_ids": texts()}]
    sites = dynorm.find_norms(model, **batches[0])
    dynorm.convert_(model, sites)
    dynorm.calibrate_(model, batches)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    dynorm.distill_(model, batches, teacher=teacher, steps=2)
    # The prefix is trained with the rest.
    assert not any(torch.equal(value, before[name]) for name, value in model.named_parameters())
    dynorm.save(model.get_base_model(), tmp_path / "model")
    model.save_pretrained(tmp_path / "prefix")
    loaded = peft.PeftModel.from_pretrained(
        dynorm.hub.load(tmp_path / "model"), tmp_path / "prefix"
    )
    with torch.no_grad():
        expected = model(**batches[0]).logits
        torch.testing.assert_close(loaded(**batches[0]).logits, expected, rtol=0, atol=0)


class StopAfterSix(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            raise KeyboardInterrupt


# The checkpoint has one name for tied tensors, and for those that peft has under two names.
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_distillation_resumes(tmp_path: Path, tied: bool, prefix: bool) -> None:
    def build() -> nn.Module:
        model = llama(tie_word_embeddings=tied)
        return with_prefix(model) if prefix else model

    def converted() -> nn.Module:
        model = build()
        dynorm.convert_(model, dynorm.find_norms(model, **batches[0]))
        dynorm.calibrate_(model, batches)
        return model

    batches = [{"input_ids": texts()}]
    options: Any = {"teacher": build(), "steps": 8}
    whole = converted()
    if prefix:
        layer: Any = whole.get_submodule("base_model.model.layers.0")
        layer.gradient_checkpointing = True
        with pytest.raises(ModelError, match="gradient checkpointing must be off"):
            dynorm.distill_(whole, batches, **options)
        layer.gradient_checkpointing = False
    dynorm.distill_(whole, batches, **options)
    options["checkpoints"] = tmp_path
    with pytest.raises(KeyboardInterrupt):
        dynorm.distill_(converted(), batches, callbacks=[StopAfterSix()], **options)
    for _ in range(2):
        resumed = converted()
        dynorm.distill_(resumed, batches, **options)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(resumed.state_dict()[name], value)


def test_a_model_that_cannot_have_one_now_is_refused_and_stays() -> None:
    model = llama()
    prefixed = with_prefix(copy.deepcopy(model))
    with pytest.raises(ModelError, match="adapter of peft"):
        with_prefix(prefixed)
    model.model.gradient_checkpointing = True
    with pytest.raises(ModelError, match="gradient checkpointing"):
        with_prefix(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.model.gradient_checkpointing = False
    dynorm.convert_(model, dynorm.find_norms(model, input_ids=texts()))
    with pytest.raises(ModelError, match="before convert_"):
        with_prefix(model)


def test_the_model_is_as_it_was() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    prefixed = with_prefix(model, TOKEN)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert prefixed.training
    assert not model.model.layers[0].training
    frozen = [name for name, value in prefixed.named_parameters() if not value.requires_grad]
    assert frozen == ["base_model.lm_head.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "causal language model.*got Linear"),
        (lambda: llama(is_encoder_decoder=True), "causal language model"),
        (lambda: fold_models.build("mamba"), "keys and values of one size"),
    ],
)
def test_a_model_without_a_prefix_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        with_prefix(build().eval(), TOKEN)


@pytest.mark.parametrize("token", [-1, 96, 2.0, "a", True, None])
def test_a_token_outside_the_vocabulary_is_refused(token: Any) -> None:
    with pytest.raises(ArgumentError, match=r"an int from 0 to 95, got .*: pass another, or set"):
        with_prefix(llama(bos_token_id=None), token)
