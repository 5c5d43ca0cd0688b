"""Convert a decoder: replace its RMSNorms, calibrate, distil from the original, and measure the loss.

The decoder is a small Llama that first learns to count up in steps. A pretrained one is converted
in the same way. The command for that: dynorm convert FOLDER OUT
"""

import copy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import dynorm

STEPS = 100
VOCABULARY = 32
LENGTH = 24


def random_batch() -> dict[str, Tensor]:
    """Return sequences that count up in steps of 1 to 4, so that each number follows from those before."""
    start = torch.randint(0, VOCABULARY, (16, 1))
    step = torch.randint(1, 5, (16, 1))
    return {"input_ids": (start + step * torch.arange(LENGTH)) % VOCABULARY}


def train(model: nn.Module) -> None:
    """Teach the model to count."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        batch = random_batch()
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train with norms, convert, calibrate, distil, and compare with the original."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    train(model)
    model.eval()
    original = copy.deepcopy(model)

    batches = [random_batch() for _ in range(24)]
    held_out = [random_batch() for _ in range(8)]
    sites = dynorm.find_norms(model, **batches[0])
    print(dynorm.convert_(model, sites, witnesses=4))

    dynorm.calibrate_(model, batches[:12])
    calibrated = dynorm.measure(model, held_out, original=original)
    print(calibrated.verdict())

    dynorm.distill_(model, batches, teacher=original, steps=40)
    distilled = dynorm.measure(model, held_out, original=original)
    print(distilled.verdict())

    before = calibrated.output.loss_difference
    after = distilled.output.loss_difference
    print(
        f"loss above the original's, nats per token: {before:+.3f} calibrated, "
        f"{after:+.3f} distilled"
    )
    if distilled.output.kind != "language":
        raise SystemExit("the model should have been measured as a language model")
    if len(distilled.sites) != 5:
        raise SystemExit("all five norms should have been replaced")
    if not after < max(before, 0.05):
        raise SystemExit("distillation should have brought the loss closer to the original's")


if __name__ == "__main__":
    main()
