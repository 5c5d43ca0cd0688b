"""Train one model of the study and return its record."""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import dynorm
from dynorm.layers.groups import LOG_RATE
from studies.data import Data, first_batch, load
from studies.settings import ARMS, SIZES, WARMUP, Settings, Size

Record = dict[str, Any]
WEIGHT_DECAY = 0.1
# To guess bytes at random costs 5.5 nats.
DIVERGED = 10.0
# The held-out blocks are in random order, so the spread of parts of them is the error of the loss.
PARTS = 32


def run(settings: Settings) -> Record:
    """Train by the settings, and return the losses on held-out blocks in nats per byte."""
    started = time.perf_counter()
    size = SIZES[settings.size]
    data = load(size.context)
    model = build(settings, data)
    watched = torch.utils.data.Subset(data.held_out, range(size.watched))
    with tempfile.TemporaryDirectory() as folder:
        trainer = StudyTrainer(
            settings=settings,
            model=model,
            args=_arguments(settings, Path(folder)),
            train_dataset=data.train,
            eval_dataset=watched,
            compute_metrics=lambda outcome: {"held_out": float(outcome.predictions.mean())},
        )
        trainer.train()
        history = trainer.state.log_history
        record = {
            "settings": settings.to_dict(),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss": None,
            "parts": [],
            "curve": curve(history),
        }
        if not has_diverged(history):
            final = torch.utils.data.Subset(data.held_out, range(size.final))
            losses = torch.tensor(trainer.predict(final).predictions)
            record["loss"] = float(losses.mean())
            record["parts"] = [round(float(p.mean()), 5) for p in losses.tensor_split(PARTS)]
    record["seconds"] = round(time.perf_counter() - started, 1)
    return record


def build(settings: Settings, data: Data) -> nn.Module:
    """Return a fresh model with the arm's layers; the same for the same settings."""
    arm = ARMS[settings.arm]
    size = SIZES[settings.size]
    set_seed(settings.seed)
    model = {"gpt2": _gpt2, "llama": _llama}[settings.model](size)
    batch = first_batch(data, size.batch)
    # Two items show the norms as well as all.
    sites = dynorm.find_norms(model, batch[:2])
    if arm.layer is None:
        _replace_norms_(model, sites, arm.norm)
        return model
    dynorm.convert_(model, sites, to=arm.layer)
    if arm.witnesses:
        for site in sites:
            model.get_submodule(site.path).set_witnesses_(arm.witnesses)
    if arm.published:
        # GPT-2 adds two embeddings before its dropout of 0.
        path = "transformer.drop" if hasattr(model, "transformer") else "model.embed_tokens"
        _scale_(model.get_submodule(path), size.channels)
        dynorm.init_as_published_(model)
    else:
        for site in sites:
            model.get_submodule(site.path).scale = math.sqrt(size.channels)
        dynorm.init_from_batch_(model, batch)
    return model


class StudyTrainer(Trainer):
    """The Trainer with one loss per held-out block, and the groups of ``dynorm.param_groups``."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        super().__init__(**options)
        arm = ARMS[settings.arm]
        rate = None
        if arm.constants_rate != LOG_RATE:
            rate = settings.lr * arm.constants_rate
        self.groups = dynorm.param_groups(
            self.model, lr=settings.lr, weight_decay=WEIGHT_DECAY, constants_lr=rate
        )
        self.add_callback(StopWhenDiverged())

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make AdamW with the constants' own rate."""
        self.optimizer = torch.optim.AdamW(self.groups, fused=True)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        """Return the mean loss in nats."""
        return _losses(model, inputs).mean()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss, and in the place of the logits the loss of each block."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            losses = _losses(model, inputs)
        return losses.mean(), losses, losses


class StopWhenDiverged(TrainerCallback):
    """Ends a run whose loss is lost."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop without another measurement."""
        if has_diverged(state.log_history):
            control.should_training_stop = True
            control.should_evaluate = False


def has_diverged(history: list[Record]) -> bool:
    """Return whether a logged loss is not a number, or worse than guessing by far."""
    for entry in history:
        for name in ("loss", "eval_held_out"):
            if name in entry and not entry[name] <= DIVERGED:
                return True
    return False


def curve(history: list[Record]) -> list[tuple[int, float]]:
    """Return the steps with their held-out losses."""
    points = []
    for entry in history:
        if "eval_held_out" in entry:
            points.append((entry["step"], float(f"{entry['eval_held_out']:.6g}")))
    return points


def _losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of each block in nats."""
    logits = model(input_ids=inputs["input_ids"]).logits.float()
    targets = inputs["labels"]
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(len(targets), -1).mean(1)


def _arguments(settings: Settings, folder: Path) -> TrainingArguments:
    size = SIZES[settings.size]
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        learning_rate=settings.lr,
        warmup_steps=min(WARMUP, settings.steps // 2),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_grad_norm=1.0,
        per_device_train_batch_size=size.batch,
        per_device_eval_batch_size=size.batch,
        logging_steps=25,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=max(settings.steps // 30, min(100, settings.steps // 2)),
        save_strategy="no",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        data_seed=settings.seed,
    )


def _gpt2(size: Size) -> nn.Module:
    config = GPT2Config(
        vocab_size=256,
        n_embd=size.channels,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.context,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        # The same function as GPT-2's gelu_new, in one kernel.
        activation_function="gelu_pytorch_tanh",
    )
    return GPT2LMHeadModel(config)


def _llama(size: Size) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.channels,
        intermediate_size=8 * math.ceil(size.channels / 3),
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _scale_(embedding: nn.Module, channels: int) -> None:
    """Multiply the output of an embedding by a learned factor, sqrt(C) at first."""
    embedding.factor = nn.Parameter(torch.full((1,), math.sqrt(channels)))
    embedding.register_forward_hook(lambda module, args, output: output * module.factor)


def _replace_norms_(model: nn.Module, sites: list[Any], norm: str | None) -> None:
    """Change LayerNorm into RMSNorm or the other way round, where the model has the other one."""
    wanted = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}[str(norm)]
    for site in sites:
        if site.kind != norm:
            model.set_submodule(site.path, wanted(site.normalized_shape, eps=site.eps))
