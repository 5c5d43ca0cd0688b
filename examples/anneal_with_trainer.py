"""Train with norms, end without them: transformers' Trainer and a callback that anneals the norms.

The first half of the run trains a small GPT-2 as it is. Over the next third its LayerNorms become
DyISRU, little by little. The rest trains the point-wise model. The log shows t next to the loss: 0
is the norm, 1 is DyISRU.
"""

import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dynorm
from dynorm.train.callbacks import AnnealCallback

STEPS = 120
VOCABULARY = 32
LENGTH = 24


def counting_sequences(count: int) -> list[dict[str, Tensor]]:
    """Return sequences that count up in steps of 1 to 4, so that each number follows from those before."""
    start = torch.randint(0, VOCABULARY, (count, 1))
    step = torch.randint(1, 5, (count, 1))
    sequences = (start + step * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def main() -> None:
    """Convert, train and finalize."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    sequences = counting_sequences(256)
    sites = dynorm.find_norms(model, sequences[0]["input_ids"][None])
    report = dynorm.convert_(model, sites, to="annealed")
    print(report)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        anneal = AnnealCallback(start=0.5, length=0.33)
        trainer = Trainer(model, arguments, train_dataset=sequences, callbacks=[anneal])
        trainer.train()
    dynorm.finalize_(model)

    layers = []
    for module in model.modules():
        if isinstance(module, dynorm.layers.PointwiseNorm):
            layers.append(module)
    print(f"{len(layers)} layers, all of them {type(layers[0]).__name__}")
    if any(type(layer) is not dynorm.DyISRU for layer in layers):
        raise SystemExit("all norms should have become DyISRU")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if not losses[-1] < 0.7 * losses[0]:
        raise SystemExit("the model should have gone on learning without its norms")


if __name__ == "__main__":
    main()
