"""Fold the norms of a language model into their neighbours, exactly.

The norms' weights move into the layers that read them. Their means move into the layers that write
to the residual stream. Unlike a conversion, this loses nothing: the outputs stay the same, up to
rounding.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dynorm


def main() -> None:
    """Fold, save, load, compare."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config).eval()
    # The norms of a new model have weights of 1 and no bias. There would be nothing to fold.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(0, 64, (2, 16))

    with torch.no_grad():
        expected = model(tokens).logits
        # The last norm's bias moves into the head. It has no bias, so add_bias gives it one.
        report = dynorm.fold_(model, input_ids=tokens, add_bias=True)
        print(report)
        folded = model(tokens).logits
        with tempfile.TemporaryDirectory() as parent:
            dynorm.save(model, f"{parent}/folded")
            loaded = dynorm.load(f"{parent}/folded")
        reloaded = loaded(tokens).logits
    torch.testing.assert_close(reloaded, folded)

    error = (folded - expected).norm() / expected.norm()
    sites = dynorm.find_norms(loaded, input_ids=tokens)
    kinds = sorted({site.kind for site in sites})
    print(f"relative error {error:.1e}; the norms are now {', '.join(kinds)}")
    if not error < 1e-5:
        raise SystemExit("a fold should not change the outputs")
    if kinds != ["rmsnorm"]:
        raise SystemExit("no norm should be left that takes a mean")


if __name__ == "__main__":
    main()
