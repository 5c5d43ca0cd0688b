"""A constant first token for decoders: its keys and values, as prefix tuning keeps them."""

from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError, require_library
from dynorm.guard import kept_random_states, require_plain_model, undisturbed
from dynorm.replace.edits import is_changed

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

    ``dynorm convert --prefix`` does all of it. To save the model yourself, call
    :func:`dynorm.hub.save` for its ``get_base_model()`` and its own ``save_pretrained`` for the prefix,
    in two folders; ``PeftModel.from_pretrained(base, folder)`` joins them. In a call of the
    model pad on the right, or pass ``position_ids``, which count from 0 at the first token of each text:
    padding on the left moves a text away from the prefix. A model with sliding windows counts padding in
    them, so it must be on the right there.

    Args:
        model: a causal language model of transformers with a cache of keys and values; it becomes part
            of what is returned.
        token: the id of the token, such as one that its texts often begin with; None takes
            ``bos_token_id`` of the model's config.

    Returns:
        A ``PeftModel``. Its ``generate`` needs no word about the prefix, which is trained with the rest,
        but the whole text at each call, and the default cache; its ``forward`` ignores a cache.

    Raises:
        ArgumentError: peft is not installed, or the token is not one of the vocabulary.
        ModelError: the model does not generate from tokens, is converted or has a prefix already, has
            gradient checkpointing on, or its cache is not one of keys and values for each layer, so that
            the prefix does not give the logits of the token itself.

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
    require_plain_model(model)
    require_library("peft", "a prefix")
    config = _config_of_decoder(model)
    token = config.bos_token_id if token is None else token
    # A bool is an int.
    if type(token) is not int or not 0 <= token < config.vocab_size:
        raise ArgumentError(
            f"token must be the id of a token, an int from 0 to {config.vocab_size - 1}, got {token!r}: "
            "pass another, or set bos_token_id in the model's config.json"
        )
    device = next(model.parameters()).device
    first = torch.tensor([[token]], device=device)
    text = torch.arange(_LENGTH, device=device)[None] % config.vocab_size
    with undisturbed(model, text, evaluate=True):
        expected = model(input_ids=torch.cat([first, text], dim=1)).logits[:, 1:]
        cached = _keys_and_values(model, first)
    prefixed = _with_adapter(model, cached)
    with undisturbed(prefixed, text, evaluate=True):
        logits = prefixed(input_ids=text).logits
    error = float((logits - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise ModelError(
            f"the prefix must give {type(model).__name__} the logits of the token before the text, but "
            f"they differ by {error:.1e}: this model cannot have one"
        )
    return prefixed


def _with_adapter(model: nn.Module, cached: list[Tensor]) -> nn.Module:
    """Return the model with an adapter of peft that begins every text with these keys and values."""
    from peft import PrefixTuningConfig, get_peft_model

    _, heads, _, size = cached[0].shape
    settings = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=1,
        num_layers=len(cached) // 2,
        num_attention_heads=heads,
        token_dim=heads * size,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with kept_random_states(torch.cuda.is_available()):
            prefixed: nn.Module = get_peft_model(model, settings)
    # With gradient checkpointing there is no cache to hold a prefix.
    except ValueError as reason:
        raise ModelError(f"the model must be one that peft takes, but: {reason}") from reason
    finally:
        # peft freezes the model.
        for parameter in trained:
            parameter.requires_grad_()
    prefixed.training = model.training
    prompt = next(p for name, p in prefixed.named_parameters() if "prompt_encoder" in name)
    with torch.no_grad():
        prompt.copy_(torch.cat([tensor.flatten() for tensor in cached]).view_as(prompt))
    return prefixed


def _config_of_decoder(model: nn.Module) -> Any:
    """Return the config of the text model of a decoder of transformers that can have a prefix."""
    config: Any = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    generates = callable(can_generate) and can_generate()
    if config is None or not generates or config.is_encoder_decoder:
        raise ModelError(
            f"the model must be a causal language model of transformers, got {type(model).__name__}"
        )
    if hasattr(model, "peft_config"):
        raise ModelError("the model must not have an adapter of peft: add the prefix first")
    if is_changed(model):
        raise ModelError(
            "the model must have its norms, which give keys and values of the prefix, but it is converted: "
            "call with_prefix before convert_"
        )
    return config.get_text_config()


def _keys_and_values(model: nn.Module, first: Tensor) -> list[Tensor]:
    """Return keys and values, each (1, heads, 1, size), of each layer for a text of one token."""
    output = model(input_ids=first, use_cache=True)
    layers = getattr(output.get("past_key_values"), "layers", [])
    cached: list[Tensor] = []
    for layer in layers:
        if getattr(layer, "keys", None) is not None:
            cached += [layer.keys, layer.values]
    # Layers of another kind, such as those of a state space, have no keys.
    if len(cached) < max(2 * len(layers), 1) or len({tensor.shape for tensor in cached}) > 1:
        raise ModelError(
            "the model must keep keys and values of one size for all layers, but the cache of "
            f"{type(model).__name__} is another: it cannot have a prefix"
        )
    return cached
