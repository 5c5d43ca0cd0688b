"""Fold the norms of a language model into their neighbours, exactly: weights into readers, means into writers.

Unlike a conversion, this loses nothing: the outputs are those of the model before, to rounding.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dynorm


def main() -> None:
    """Fold, compare, save, load."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # A fresh model's norms have weights of 1 and no bias: nothing to fold.
            parameter.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        expected = model(tokens).logits
        # The head has no bias that could take the last norm's, so add_bias gives it one.
        print(dynorm.fold_(model, input_ids=tokens, add_bias=True))
        folded = model(tokens).logits
        with tempfile.TemporaryDirectory() as parent:
            dynorm.save(model, f"{parent}/folded")
            loaded = dynorm.load(f"{parent}/folded")
        again = loaded(tokens).logits
    error = ((folded - expected).norm() / expected.norm()).item()
    kinds = sorted({site.kind for site in dynorm.find_norms(loaded, input_ids=tokens)})
    print(f"relative error {error:.1e}; the norms are now {', '.join(kinds)}")
    if not error < 1e-5 or kinds != ["rmsnorm"]:
        raise SystemExit("a fold should change no output, and leave no mean to be taken")
    torch.testing.assert_close(again, folded)


if __name__ == "__main__":
    main()
