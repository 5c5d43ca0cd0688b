"""A constant first token for decoders: its keys and values, as prefix tuning keeps them."""

import torch
from torch import Tensor, nn

from dynorm.arguments import check_module
from dynorm.errors import ArgumentError, ModelError, require_library
from dynorm.guard import require_plain_model, undisturbed

# The length of the text on which the prefix is compared with the token itself, and the error that
# rounding may leave, relative to the largest logit.
_LENGTH = 8
_TOLERANCE = 1e-2


@torch.inference_mode(False)
def with_prefix(model: nn.Module, token: int | None = None) -> nn.Module:
    """Return a decoder whose texts all follow one constant token, by peft's prefix tuning.

    The first token of a text is massive in most decoders, whatever it is, because attention uses it as
    a sink, and a point-wise layer cannot tell it from the others. Here the sink is no token any more: its
    keys and values are parameters, computed once while the norms are there. So call this before
    :func:`convert_`, for the model and for the teacher of :func:`distill_`. Until then the logits are
    those of the model with the token before each text.

    ``save_pretrained`` of the returned model saves the prefix, :func:`dynorm.hub.save` of its
    ``get_base_model()`` the layers; ``AutoPeftModelForCausalLM`` loads both.

    Args:
        model: a causal language model of transformers with a cache of keys and values; it becomes part
            of what is returned.
        token: the id of the token; None takes ``bos_token_id`` of the model's config.

    Returns:
        A ``PeftModel``. Its ``generate`` needs no word about the prefix, which is trained with the rest.

    Raises:
        ArgumentError: peft is not installed, or the token is not one of the vocabulary.
        ModelError: the model does not generate from tokens, or its cache is not one of keys and values
            for each layer, so that the prefix does not give the logits of the token itself.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **size))
        >>> prefixed = with_prefix(model, token=1)
        >>> sites = dynorm.find_norms(prefixed, input_ids=torch.tensor([[5, 6, 7]]))
        >>> len(sites)
        5

    Reference:
        X. L. Li and P. Liang, "Prefix-Tuning", arXiv 2101.00190; M. Sun et al., "Massive Activations in
        Large Language Models", arXiv 2402.17762, section 4.
    """
    check_module(model)
    require_plain_model(model)
    require_library("peft", "a prefix")
    config = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    generates = callable(can_generate) and can_generate()
    if config is None or not generates or config.is_encoder_decoder:
        raise ModelError(
            f"the model must be a causal language model of transformers, got {type(model).__name__}"
        )
    token = config.bos_token_id if token is None else token
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise ArgumentError(
            f"token must be the id of a token, from 0 to {config.vocab_size - 1}, got {token!r}"
        )
    from peft import PrefixTuningConfig, get_peft_model

    device = next(model.parameters()).device
    first = torch.tensor([[token]], device=device)
    text = torch.arange(_LENGTH, device=device)[None] % config.vocab_size
    with undisturbed(model, text, evaluate=True):
        expected = model(input_ids=torch.cat([first, text], dim=1)).logits[:, 1:]
        cached = _keys_and_values(model, first)
    trained = [p for p in model.parameters() if p.requires_grad]
    _, heads, _, size = cached[0].shape
    settings = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=1,
        num_layers=len(cached) // 2,
        num_attention_heads=heads,
        token_dim=heads * size,
    )
    prefixed: nn.Module = get_peft_model(model, settings)
    # peft freezes the model.
    for parameter in trained:
        parameter.requires_grad_()
    prefixed.train(model.training)
    prompt = next(p for name, p in prefixed.named_parameters() if "prompt_encoder" in name)
    with torch.no_grad():
        prompt.copy_(torch.cat([tensor.flatten() for tensor in cached]).view_as(prompt))
    with undisturbed(prefixed, text, evaluate=True):
        logits = prefixed(input_ids=text).logits
    error = float((logits - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise ModelError(
            f"the prefix must give {type(model).__name__} the logits of the token before the text, but "
            f"they differ by {error:.1e}: this model cannot have one"
        )
    return prefixed


def _keys_and_values(model: nn.Module, first: Tensor) -> list[Tensor]:
    """Return keys and values, each (1, heads, 1, size), of each layer for a text of one token."""
    output = model(input_ids=first, use_cache=True)
    cached: list[Tensor] = []
    for layer in getattr(output.get("past_key_values"), "layers", []):
        if hasattr(layer, "keys"):
            cached += [layer.keys, layer.values]
    if not cached or len({tensor.shape for tensor in cached}) > 1:
        raise ModelError(
            "the model must keep keys and values of one size for all layers, but the cache of "
            f"{type(model).__name__} is another: it cannot have a prefix"
        )
    return cached
