"""The layers' functions: values and gradients against formulas written here, and refused arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.testing import assert_close

import dynorm
from dynorm import Derf, DyISRU, DyT, LinearControl
from dynorm.errors import ArgumentError
from dynorm.layers import PointwiseNorm

INF, NAN = math.inf, math.nan
Params = dict[str, Tensor]
# The function, before scale and the affine map.
FORMULAS: dict[type[PointwiseNorm], Callable[[Tensor, Params], Tensor]] = {
    DyISRU: lambda u, p: u * (p["log_beta"].exp() + u**2) ** -0.5,
    DyT: lambda u, p: 1 - 2 / (1 + (2 * p["alpha"] * u).exp()),
    Derf: lambda u, p: 1 - torch.special.erfc(p["alpha"] * u + p["shift"]),
    LinearControl: lambda u, p: u / p["log_beta"].exp() ** 0.5,
}
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no affine": {"elementwise_affine": False},
    "no bias": {"bias": False},
    "all": {"scale": -1.7},
}


def build(kind: type[PointwiseNorm], *args: Any, **kwargs: Any) -> PointwiseNorm:
    """Return a layer whose parameters have no two values the same."""
    layer = kind(*args, **kwargs)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.uniform_(0.2, 1.5) if name == "alpha" else parameter.normal_(0.2, 0.7)
    return layer


def expected(layer: PointwiseNorm, x: Tensor, params: Params) -> Tensor:
    """Return the layer's formula of float64 tensors, with its channels moved to the end and back."""
    last = x.movedim(layer.dim, -1)
    y = layer.scale * FORMULAS[type(layer)](last, params) * params.get("weight", 1)
    return (y + params.get("bias", 0)).movedim(-1, layer.dim)


def check(layer: PointwiseNorm, x: Tensor, tolerance: float) -> None:
    """Compare value and all gradients with the formula, in float64 at the same (rounded) numbers."""
    x.requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    leaves = [x, *layer.parameters()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y_exact = expected(layer, exact[0], dict(zip(names, exact[1:], strict=True)))
    upstream = torch.randn_like(x)
    wanted = torch.autograd.grad(y_exact, exact, upstream.double())
    # By a kernel if one serves, and by the definition.
    for y in (layer(x), layer.definition(x)):
        assert y.dtype == x.dtype
        assert_close(y.double(), y_exact, rtol=tolerance, atol=tolerance)
        gradients = torch.autograd.grad(y, leaves, upstream)
        for leaf, got, want in zip(leaves, gradients, wanted, strict=True):
            assert got.dtype == leaf.dtype
            assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS)
def test_value_and_gradients(kind: type[PointwiseNorm], options: str) -> None:
    for dtype, tolerance in TOLERANCES.items():
        layer = build(kind, 7, **OPTIONS[options], dtype=dtype)
        check(layer, (3 * torch.randn(2, 3, 7)).to(dtype), tolerance)


@pytest.mark.parametrize(
    ("channels", "dim", "shape"),
    [
        (5, -1, (5,)),
        ((5,), 2, (3, 4, 5)),
        (3, 0, (3, 4)),
        (3, -3, (2, 3, 4, 5)),
        (5, 1, (2, 5, 4, 5)),
        (1, -1, (3, 1)),
        (7, -1, (0, 7)),
        (257, -1, (1, 257)),
    ],
)
def test_axes_and_sizes(kind: type[PointwiseNorm], channels: Any, dim: int, shape: Any) -> None:
    layer = build(kind, channels, dim=dim, dtype=torch.float64)
    check(layer, torch.randn(shape, dtype=torch.float64), 1e-11)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_mixed_dtypes(kind: type[PointwiseNorm], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for x_dtype, dtype in (dtypes, dtypes[::-1]):
        tolerance = max(TOLERANCES[x_dtype], TOLERANCES[dtype])
        layer = build(kind, 7, dtype=dtype)
        check(layer, torch.randn(5, 7).to(x_dtype), tolerance)
        layer = kind(7, promote=True, dtype=dtype)
        y = layer(torch.ones(7, dtype=x_dtype))
        assert y.dtype == dtypes[1]


def test_order_of_memory(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 5)
    x = torch.randn(10, 6)
    for view in (x[::2].t(), x.t()[:, 1::2], torch.randn(1, 5).expand(3, 5)):
        x_before = x.clone()
        if view.shape[-1] == 5:
            assert_close(layer(view), layer(view.contiguous()), rtol=0, atol=0)
            assert layer(view).is_contiguous()
            assert layer.definition(view).shape == view.shape
        assert torch.equal(x, x_before)
    first = build(kind, 6, dim=1)
    x = torch.randn(2, 6, 3, 5)
    assert_close(first(x.contiguous(memory_format=torch.channels_last)), first(x), rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_over_another_axis_keeps_the_order_of_memory(compiled: bool) -> None:
    """As a norm of element-wise operations over that axis does."""
    contiguous = torch.randn(2, 6, 5, 5)
    inputs = [
        contiguous,
        contiguous.contiguous(memory_format=torch.channels_last),
        contiguous.permute(3, 1, 0, 2),
        contiguous[:, :, ::2],
        contiguous[:1],
    ]
    # To compile takes long: with witnesses only for the two orders that have channels elsewhere.
    few = inputs[1:3] if compiled else inputs
    for options, views in (({}, inputs), ({"witnesses": 2}, few)):
        layer = build(DyISRU, 6, dim=1, **options)
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for x in views:
            torch._dynamo.reset()
            y = call(x)
            assert y.stride() == (x * torch.ones(1, 6, 1, 1)).stride()
            assert_close(y, layer.definition(x))


def test_a_sum_has_the_order_of_memory_of_a_sum(kind: type[PointwiseNorm]) -> None:
    x = torch.randn(2, 6, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    for dim in (-1, 1):
        layer = build(kind, 6, dim=dim)
        for view in (x, last, x.transpose(0, 2), x[:, :, ::2]):
            for residual in (view, view.contiguous(), view.flip(0)):
                y, total = layer(view, residual=residual)
                assert total.stride() == (view + residual).stride()
                assert torch.equal(total, view + residual)
                assert y.stride() == layer(total).stride()


# torch's own forward mode scripts its decompositions.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_gradcheck(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 3, dim=1, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(call, (x, *layer.parameters()), check_forward_ad=True)
    assert gradgradcheck(call, (x, *layer.parameters()))


def test_defaults_have_the_slope_1_and_the_bound_of_the_norm(kind: type[PointwiseNorm]) -> None:
    layer = kind(48)
    assert layer.scale == math.sqrt(48)
    assert_close(layer.beta(), torch.tensor([48.0]))
    small = torch.linspace(-1e-3, 1e-3, 48)
    assert_close(layer(small), small, rtol=1e-5, atol=1e-8)
    assert layer.witness_channels == ()


def test_first_constants() -> None:
    assert dynorm.layers.ELN is DyISRU
    for other in (DyT(48, scale=1), Derf(48, scale=1)):
        assert_close(other.alpha.data, torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("beta", "dtype"),
    [
        (1e-6, torch.float64),
        (7.3e9, torch.float32),
        (torch.tensor(4), torch.float32),
        (torch.tensor([2.5], requires_grad=True), torch.float64),
    ],
    ids=str,
)
def test_set_slope(kind: type[PointwiseNorm], beta: Any, dtype: torch.dtype) -> None:
    layer = kind(4, scale=2.5, dtype=dtype)
    layer.set_slope_(beta)
    want = torch.as_tensor(beta, dtype=dtype).detach().reshape(1)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": 0.0}
    assert_close(layer.beta().detach(), want, **tolerance)
    x = torch.zeros(4, dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    assert_close(slope, 2.5 * want.expand(4) ** -0.5, **tolerance)
    assert all(p.is_leaf and p.requires_grad for p in layer.parameters())


def test_a_slope_beyond_the_dtype_is_the_largest_there_is() -> None:
    layer = DyT(8, dtype=torch.float16)
    layer.set_slope_(1e-12)
    assert layer.alpha.item() == torch.finfo(torch.float16).max
    assert layer(torch.zeros(8, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_zero_infinity_and_huge_values(kind: type[PointwiseNorm], dtype: torch.dtype) -> None:
    layer = kind(4, scale=2.0, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.25]))
    assert torch.equal(layer(-torch.zeros(4, dtype=dtype)), layer.bias)
    for size in (INF, torch.finfo(dtype).max):
        x = torch.full((4,), -size, dtype=dtype, requires_grad=True)
        y = layer(x)
        if kind is not LinearControl:
            assert_close(y, -2 * layer.weight + layer.bias)
            assert not torch.autograd.grad(y.sum(), x)[0].any()
        elif size == INF:
            assert torch.equal(y, -INF * layer.weight)


def test_nan_stays_where_it_is(kind: type[PointwiseNorm]) -> None:
    layer = build(kind, 6)
    x = torch.randn(3, 6)
    poisoned = x.clone()
    poisoned[1, 2] = NAN
    y = layer(poisoned)
    assert torch.equal(y.isnan(), poisoned.isnan())
    assert torch.equal(y[~y.isnan()], layer(x)[~y.isnan()])


BAD_ARGUMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no channels": (0, {}, "normalized_shape.*least 1, got 0"),
    "several axes": ((4, 5), {}, r"size of one axis, got \(4, 5\): keep a norm"),
    "no sizes": ((), {}, r"normalized_shape.*one axis, got \(\)"),
    "float size": (4.0, {}, r"normalized_shape.*int.*got 4\.0"),
    "bool size": (True, {}, "normalized_shape.*int.*got True"),
    "several dims": (4, {"dim": (1, 2)}, r"dim.*int, got \(1, 2\)"),
    "zero scale": (4, {"scale": 0}, "scale.*got 0"),
    "nan scale": (4, {"scale": NAN}, "scale.*got nan"),
    "a word as scale": (4, {"scale": "a"}, "scale.*got 'a'"),
    "infinite offset": (4, {"weight_offset": INF}, "weight_offset.*got inf"),
    "integer dtype": (4, {"dtype": torch.int64}, "dtype.*got torch.int64"),
}


@pytest.mark.parametrize(("size", "options", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_refused_arguments(
    kind: type[PointwiseNorm], size: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kind(size, **options)


@pytest.mark.parametrize("value", [0, -1.0, NAN, INF])
def test_refused_constants(kind: type[PointwiseNorm], value: float) -> None:
    layer = build(kind, 4)
    before = layer.beta()
    for beta in (value, torch.tensor([value])):
        with pytest.raises(ArgumentError, match=r"beta.*positive"):
            layer.set_slope_(beta)
    for shape in ((4,), (2, 4), (0,)):
        with pytest.raises(ArgumentError, match=r"beta.*one number"):
            layer.set_slope_(torch.ones(shape))
    assert torch.equal(layer.beta(), before)


def test_refused_inputs(kind: type[PointwiseNorm]) -> None:
    for shape in ((2, 5), (4, 5), (2, 1), ()):
        with pytest.raises(ArgumentError, match="4 channels at dim -1, got shape"):
            kind(4)(torch.ones(shape))
    for dim, shape in ((1, (4,)), (-3, (4, 2))):
        with pytest.raises(ArgumentError, match=f"4 channels at dim {dim}, got shape"):
            kind(4, dim=dim)(torch.ones(shape))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ArgumentError, match=r"real.*floating"):
            kind(4)(torch.ones(4, dtype=dtype))
    with pytest.raises(ArgumentError, match=r"tensor.*list"):
        kind(4)([1.0, 2.0, 3.0, 4.0])


class _Head(nn.Module):
    """An attention's query as transformers models compute it, with a norm of each head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (3, 8)).transpose(1, 2)
        return self.norm(heads).transpose(1, 2).view(x.shape)


def test_a_model_that_needs_the_memory_order_of_its_norm_is_refused() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x = torch.randn(2, 5, 24)
    (site,) = dynorm.find_norms(_Head(Qwen3RMSNorm(8)), x)
    assert site.refused is not None
    assert "raised RuntimeError: view" in site.refused
    # torch's norms are contiguous, as the layers are.
    (site,) = dynorm.find_norms(nn.Sequential(nn.LayerNorm(8)), x[..., :8].transpose(0, 1))
    assert site.refused is None
