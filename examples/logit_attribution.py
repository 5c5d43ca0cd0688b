"""Attribute logits exactly: a model without norms in TransformerLens.

With a norm before the head, the contribution of a part to a logit depends on the size of all parts
together. Removing one part then changes the shares of the others. If linear layers have replaced
the norms and are folded away, each logit is a plain sum of its parts.
"""

import tempfile
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import dynorm

VOCABULARY = 64
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def build_gpt2() -> nn.Module:
    """Return a small random GPT-2."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        **SPECIAL_TOKENS,
    )
    return GPT2LMHeadModel(config).double().eval()


def build_llama() -> nn.Module:
    """Return a small random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        **SPECIAL_TOKENS,
    )
    return LlamaForCausalLM(config).double().eval()


MODELS = {"GPT-2": build_gpt2, "Llama": build_llama}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the words w0, w1, ..."""
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="w0",
        eos_token="w0",
        pad_token="w0",
    )


def open_in_lens(model: nn.Module, *, norms: bool) -> TransformerBridge:
    """Open a transformers model in TransformerLens; ``norms`` says whether it still has norms."""
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        lens = TransformerBridge.boot_transformers(
            folder,
            hf_model=model,
            device="cpu",
            dtype=torch.float64,
        )
    if not norms:
        lens.cfg.normalization_type = None
        for part in lens.modules():
            if isinstance(part, NormalizationBridge):
                # Run the module in the place of the norm, an identity, instead of computing a norm.
                part.use_native_layernorm_autograd = True
    return lens


@dataclass
class Attribution:
    """How well the parts of the residual stream explain the likeliest logits."""

    names: list[str]
    shares: Tensor  # (parts, batch, tokens): the contribution of each part to the logit
    error_of_sum: float  # largest distance of the sum of the shares from the logit
    # Largest distance of a share from the effect of removing its part, over the largest share.
    error_of_removal: float


@torch.no_grad()
def attribute(lens: TransformerBridge, tokens: Tensor) -> Attribution:
    """Attribute the likeliest logit of each token to the parts of the residual stream."""
    logits, cache = lens.run_with_cache(tokens)
    likeliest = logits.argmax(-1)
    logit = pick(logits, likeliest)
    parts, names = cache.decompose_resid(layer=-1, return_labels=True)
    shares = cache.logit_attrs(parts, likeliest)

    stream = parts.sum(0)
    # The head's bias is the logit of an empty stream.
    without_parts = lens.unembed(lens.ln_final(torch.zeros_like(stream)))
    bias = pick(without_parts, likeliest)
    error_of_sum = (shares.sum(0) + bias - logit).abs().max()

    effects = []
    for part in parts:
        without = lens.unembed(lens.ln_final(stream - part))
        effects.append(logit - pick(without, likeliest))
    difference = torch.stack(effects) - shares
    error_of_removal = difference.abs().max() / shares.abs().max()
    return Attribution(names, shares, float(error_of_sum), float(error_of_removal))


def pick(logits: Tensor, words: Tensor) -> Tensor:
    """Return the logit of one word for each token."""
    return logits.gather(-1, words[..., None])[..., 0]


def main() -> None:
    """Convert, fold, open in TransformerLens, and compare the attribution before and after."""
    for name, build in MODELS.items():
        model = build()
        batches = []
        for _ in range(6):
            ids = torch.randint(0, VOCABULARY, (8, 16))
            batches.append({"input_ids": ids})
        tokens = batches[0]["input_ids"]
        sites = dynorm.find_norms(model, **batches[0])
        dynorm.convert_(model, sites, to="linear", witnesses=0)
        dynorm.calibrate_(model, batches)
        with torch.no_grad():
            expected = model(tokens).logits

        report = dynorm.fold_(model, **batches[0], untie=True, add_bias=True)
        gone = [site.path for site in report.sites if site.becomes == "Identity"]
        print(f"{name}: {len(gone)} of {len(report.sites)} norms gone; the parts of one logit:")
        lens = open_in_lens(model, norms=False)
        with torch.no_grad():
            torch.testing.assert_close(lens(tokens), expected)

        folded = attribute(lens, tokens)
        shares = []
        for part, share in zip(folded.names, folded.shares[:, 0, -1], strict=True):
            shares.append(f"{part} {share:+.3f}")
        print(f"  {', '.join(shares)}")
        with_norms = attribute(open_in_lens(build(), norms=True), tokens)
        print(
            f"  the parts miss the logit by {folded.error_of_sum:.0e}; "
            f"taking one away misses its share by {folded.error_of_removal:.0e},"
        )
        print(f"  with norms by {with_norms.error_of_removal:.0%} of the largest share")
        if not max(folded.error_of_sum, folded.error_of_removal) < 1e-10:
            raise SystemExit("without norms the attribution should be exact")


if __name__ == "__main__":
    main()
