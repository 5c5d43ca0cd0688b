"""The layers under the names and signatures of timm."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dynorm
from dynorm.errors import ArgumentError


@pytest.mark.parametrize("name", ["dyisru", "dyt", "derf"])
def test_the_calls_of_timm(name: str) -> None:
    layer = {"dyisru": dynorm.DyISRU, "dyt": dynorm.DyT, "derf": dynorm.Derf}[name]
    norm, norm2d = dynorm.layers.norm_layer(name), dynorm.layers.norm_layer(f"{name}2d")
    assert norm(8, elementwise_affine=False).weight is None
    wanted = repr(layer(8))
    for built in (norm(8), norm(8, eps=1e-6), norm(8, 1e-6), partial(norm, eps=1e-5)(8)):
        assert type(built) is layer
        assert repr(built) == wanted
    assert norm(8, affine=False).weight is None
    assert norm(8, scale=1, dtype=torch.float64).weight.dtype == torch.float64
    x = torch.randn(2, 8, 3, 3)
    assert_close(norm2d(8, eps=1e-6)(x), norm(8)(x.movedim(1, -1)).movedim(-1, 1))


@pytest.mark.parametrize("name", ["layernorm2d", None])
def test_an_unknown_name_is_refused(name: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"one of dyisru, dyt, derf, got {name!r}"):
        dynorm.layers.norm_layer(name)


@pytest.fixture
def timm() -> ModuleType:
    try:
        return pytest.importorskip("timm")
    except RuntimeError:
        pytest.skip("this torchvision is built for another torch")


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        ("vit_tiny_patch16_224", "dyisru", {"depth": 1, "img_size": 32}),
        ("convnext_atto", "dyt2d", {"depths": (1, 1, 1, 1)}),
    ],
)
def test_timm_builds_models_without_norms(
    timm: ModuleType, model: str, name: str, options: dict[str, Any]
) -> None:
    norm_layer = dynorm.layers.norm_layer(name)
    built = timm.create_model(model, norm_layer=norm_layer, num_classes=4, **options)
    assert built(torch.randn(1, 3, 32, 32)).shape == (1, 4)
    kinds = {type(module) for module in built.modules()}
    assert nn.LayerNorm not in kinds
    assert {dynorm.DyISRU, dynorm.DyT} & kinds
