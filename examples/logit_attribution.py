"""Direct logit attribution that is exact: a model without norms in TransformerLens.

With a norm before the head, the contribution of a part to a logit depends on the size of all parts together,
so removing one changes the others' share too. Where linear layers have replaced the norms, and are
folded away, logits are plain sums.
"""

import tempfile

import torch
from tokenizers import Tokenizer, models
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

SIZES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS = {
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **SIZES)
    ),
    "Llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            **SIZES,
        )
    ),
}


def in_lens(model: torch.nn.Module, *, norms: bool) -> TransformerBridge:
    """Return a model of transformers in TransformerLens, which is told whether it has norms."""
    words = Tokenizer(
        models.WordLevel({f"w{k}": k for k in range(SIZES["vocab_size"])}, unk_token="w0")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w0", pad_token="w0"
    )
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        lens = TransformerBridge.boot_transformers(
            folder, hf_model=model, device="cpu", dtype=torch.float64
        )
    if not norms:
        lens.cfg.normalization_type = None
        for part in lens.modules():
            if isinstance(part, NormalizationBridge):
                # It runs the module that stands there, an identity, instead of a norm of its own.
                part.use_native_layernorm_autograd = True
    return lens


@torch.no_grad()
def errors(lens: TransformerBridge, tokens: torch.Tensor) -> tuple[float, float]:
    """Return two errors of the attribution to parts: of their sum, and of the effect of removing each part."""
    logits, cache = lens.run_with_cache(tokens)
    likeliest = logits.argmax(-1, keepdim=True)
    parts, names = cache.decompose_resid(layer=-1, return_labels=True)
    shares = cache.logit_attrs(parts, likeliest[..., 0])
    wanted = logits.gather(-1, likeliest)[..., 0]
    stream = parts.sum(0)
    nothing = lens.unembed(lens.ln_final(torch.zeros_like(stream))).gather(-1, likeliest)[..., 0]
    summed = (shares.sum(0) + nothing - wanted).abs().max()
    without = torch.stack([lens.unembed(lens.ln_final(stream - part)) for part in parts])
    effect = wanted - without.gather(-1, likeliest.expand(len(parts), -1, -1, -1))[..., 0]
    if lens.cfg.normalization_type is None:
        print(
            "  "
            + ", ".join(
                f"{name} {share:+.3f}" for name, share in zip(names, shares[:, 0, -1], strict=True)
            )
        )
    return float(summed), float((effect - shares).abs().max() / shares.abs().max())


def main() -> None:
    """Convert, fold, open in TransformerLens, and compare the attribution before and after."""
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model = build().double().eval()
        batches = [{"input_ids": torch.randint(0, 64, (8, 16))} for _ in range(6)]
        tokens = batches[0]["input_ids"]
        dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), to="linear")
        dynorm.calibrate_(model, batches, lean=0.0)
        with torch.no_grad():
            expected = model(tokens).logits
        report = dynorm.fold_(model, **batches[0], untie=True, add_bias=True)
        gone = [site.path for site in report.sites if site.becomes == "Identity"]
        print(f"{name}: {len(gone)} of {len(report.sites)} norms gone; the parts of one logit:")
        lens = in_lens(model, norms=False)
        with torch.no_grad():
            torch.testing.assert_close(lens(tokens), expected)
        summed, removed = errors(lens, tokens)
        torch.manual_seed(0)
        before = errors(in_lens(build().double().eval(), norms=True), tokens)
        print(
            f"  the parts miss the logit by {summed:.0e}; taking one away misses its share by "
            f"{removed:.0e},"
        )
        print(f"  with norms by {before[1]:.0%} of the largest share")
        if not max(summed, removed) < 1e-10:
            raise SystemExit("without norms the attribution should be exact")


if __name__ == "__main__":
    main()
