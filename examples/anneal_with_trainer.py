"""Train with the norms, end without: transformers' Trainer and a callback that anneals them.

Half of the run trains a small GPT-2 as it is. Over the next third its LayerNorms become DyISRU,
little by little. The rest trains the point-wise model. The log shows t beside the loss: 0 is the
norm, 1 is DyISRU.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dynorm
from dynorm.train.callbacks import AnnealCallback

STEPS, LENGTH = 120, 24


def rows(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count on in steps of 1 to 4, so that the next number follows from those before."""
    start, step = torch.randint(0, 32, (count, 1)), torch.randint(1, 5, (count, 1))
    return [{"input_ids": row, "labels": row} for row in (start + step * torch.arange(LENGTH)) % 32]


def main() -> None:
    """Convert, train and finalize."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, data = GPT2LMHeadModel(config), rows()
    sites = dynorm.find_norms(model, data[0]["input_ids"][None])
    print(dynorm.convert_(model, sites, to="annealed"))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=20,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=data, callbacks=[AnnealCallback(start=0.5, length=0.33)]
        )
        trainer.train()
    dynorm.finalize_(model)

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    layers = [layer for layer in model.modules() if isinstance(layer, dynorm.layers.PointwiseNorm)]
    print(f"{len(layers)} layers, all of them {type(layers[0]).__name__}")
    if {type(layer) for layer in layers} != {dynorm.DyISRU} or not losses[-1] < 0.7 * losses[0]:
        raise SystemExit(
            "the point-wise model should have gone on learning where the norms left it"
        )


if __name__ == "__main__":
    main()
