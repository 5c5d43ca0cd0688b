"""Convert a decoder: replace its RMSNorms, set their constants, distil with the original as teacher, measure the loss.

The decoder is a small Llama that learns first to count on in steps. A pretrained one goes the same
way; in one command: dynorm convert FOLDER OUT --minutes 30
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dynorm

STEPS, LENGTH, WORDS = 150, 24, 32


def batch() -> dict[str, torch.Tensor]:
    """Return sequences that count on in steps of 1 to 4, so that the next number follows from those before."""
    start, step = torch.randint(0, WORDS, (16, 1)), torch.randint(1, 5, (16, 1))
    return {"input_ids": (start + step * torch.arange(LENGTH)) % WORDS}


def main() -> None:
    """Train with norms, convert, distil, compare."""
    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        inputs = batch()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    original = copy.deepcopy(model.eval())

    batches, held_out = [batch() for _ in range(24)], [batch() for _ in range(8)]
    print(dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), witnesses=4))
    dynorm.calibrate_(model, batches[:12])
    calibrated = dynorm.measure(model, held_out, original=original)
    print(calibrated.verdict())
    dynorm.distill_(model, batches, teacher=original, steps=60, quiet=True)
    report = dynorm.measure(model, held_out, original=original)
    print(report.verdict())

    before, after = calibrated.output.loss_difference, report.output.loss_difference
    print(
        f"loss over the original's, nats per token: {before:+.3f} calibrated, {after:+.3f} "
        "distilled"
    )
    if report.output.kind != "language" or len(report.sites) != 5 or not after < max(before, 0.05):
        raise SystemExit("distillation should have brought the loss closer to the original's")


if __name__ == "__main__":
    main()
