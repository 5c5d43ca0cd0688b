"""The published starts: alphas by site and width."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dynorm
from dynorm.errors import ArgumentError, ModelError


def decoder(width: int) -> nn.Module:
    """The point-wise layers of a decoder of one block."""
    names = ("input_layernorm", "post_attention_layernorm", "norm")
    return nn.ModuleDict({name: dynorm.DyT(width) for name in names})


@pytest.mark.parametrize(
    ("width", "first", "others"), [(4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05)]
)
def test_alpha_of_a_language_model_is_by_site_and_width(
    width: int, first: float, others: float
) -> None:
    model = decoder(width)
    found = dynorm.init_as_published_(model, attention="input_*")
    assert found == {"input_layernorm": first, "post_attention_layernorm": others, "norm": others}
    for path, layer in model.items():
        assert layer.scale == 1
        assert_close(layer.alpha.detach(), torch.tensor([found[path]]))
    with pytest.raises(ArgumentError, match=f"attention must be given.*{width} channels"):
        dynorm.init_as_published_(model)
    with pytest.raises(ArgumentError, match=r"match the path.*'input_layernorm'.*got 'attn'"):
        dynorm.init_as_published_(model, attention="attn")
    with pytest.raises(ArgumentError, match=r"a glob.*got \['\*'\]"):
        dynorm.init_as_published_(model, attention=["*"])


def test_the_layers_compute_what_was_published() -> None:
    dyt, derf = dynorm.DyT(8), dynorm.Derf(8)
    nn.init.constant_(derf.shift, 0.7)
    dynorm.init_as_published_(nn.Sequential(dyt, derf))
    x = torch.randn(4, 8)
    assert_close(dyt(x).detach(), torch.tanh(0.5 * x))
    assert_close(derf(x).detach(), torch.erf(0.5 * x))


def test_other_layers_are_refused_and_nothing_is_changed() -> None:
    model = nn.Sequential(dynorm.DyT(8), dynorm.DyISRU(8))
    before = repr(model)
    with pytest.raises(ModelError, match=r"'1' is DyISRU.*init_from_batch_"):
        dynorm.init_as_published_(model)
    assert repr(model) == before
