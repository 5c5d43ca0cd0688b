"""convert_ and restore_: a layer keeps the settings of its norm, and errors and restoring leave no trace."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.layers import Derf, DyISRU, DyT, LinearControl, PointwiseNorm
from dynorm.replace.converted import dynorm_layers, replaced_by
from dynorm.replace.specs import LayerSpec, apply_specs_, specs_of

C = 12
TO = {"dyisru": DyISRU, "dyt": DyT, "derf": Derf, "linear": LinearControl}
all_layers = pytest.mark.parametrize("to", TO)


class GemmaNorm(nn.Module):
    """Scales by 1 + w and adds in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).type_as(x)


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images, as ConvNeXt has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Queries and keys are normalized over the width of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        self.q_norm, self.k_norm = nn.RMSNorm(C // 3, eps=1e-6), nn.RMSNorm(C // 3, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return y.transpose(1, 2).flatten(2)


class Twins(nn.Module):
    """One norm at two paths, and two norms with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.LayerNorm(C)
        self.linear = nn.Linear(C, C)
        self.two = self.one
        self.left, self.right = nn.LayerNorm(C), nn.LayerNorm(C)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(self.two(self.linear(self.one(x)))))


def mlp(*norms: nn.Module) -> nn.Sequential:
    parts: list[nn.Module] = []
    for norm in norms or (nn.LayerNorm(C), nn.RMSNorm(C, eps=1e-6)):
        parts += [nn.Linear(C, C), norm, nn.GELU()]
    model = nn.Sequential(*parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def converted(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    dynorm.convert_(
        model, dynorm.find_norms(model, *args), **{"per_channel": False, "witnesses": 0, **options}
    )
    return model


def layers_of(model: nn.Module) -> list[PointwiseNorm]:
    return [module for module in model.modules() if isinstance(module, PointwiseNorm)]


def state(model: nn.Module) -> tuple[Any, ...]:
    """All that must be as before: modules, their order, flags and hooks, and every tensor itself and its values."""
    modules = [
        (path, module, module.training)
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for _, m, _ in modules]
    tensors = [(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()]
    values = [
        (id(t), t.requires_grad, t.detach().clone().nan_to_num().tolist())
        for _, t in tensors
        if not t.is_meta
    ]
    return modules, hooks, [name for name, _ in tensors], values


@all_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_affine_and_dtype_are_kept(to: str, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    norms, x = [model[1], model[4]], torch.randn(5, C, dtype=dtype)
    converted(model, x, to=to)
    for layer, norm in zip((model[1], model[4]), norms, strict=True):
        assert type(layer) is TO[to]
        assert torch.equal(layer.weight, norm.weight)
        assert layer.weight is not norm.weight
        assert {p.dtype for p in layer.parameters()} == {dtype}
    assert torch.equal(model[1].bias, norms[0].bias)
    assert model[4].bias is None
    assert model(x).dtype == dtype


@all_layers
def test_the_bound_is_the_norms(to: str) -> None:
    model = converted(mlp(), torch.randn(5, C), to=to)
    assert model[1].scale == pytest.approx(math.sqrt(C - 1))
    assert model[4].scale == pytest.approx(math.sqrt(C))


@all_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_plus_w_keeps_w_in_the_models_dtype(to: str, dtype: torch.dtype) -> None:
    model = mlp(GemmaNorm(C)).to(dtype)
    norm, x = model[1], torch.randn(5, C, dtype=dtype)
    converted(model, x, to=to)
    assert torch.equal(model[1].weight, norm.weight)
    assert torch.equal(model[1].factor(), 1 + norm.weight.float())
    assert {p.dtype for p in model[1].parameters()} == {dtype}
    assert dynorm.restore_(model)[1] is norm
    assert norm.weight.dtype == dtype


@pytest.mark.parametrize(
    ("norm", "has_weight", "has_bias"),
    [
        (nn.LayerNorm(C, elementwise_affine=False), False, False),
        (nn.RMSNorm(C, elementwise_affine=False), False, False),
        (nn.LayerNorm(C, bias=False), True, False),
        (nn.RMSNorm(C), True, False),
        (nn.LayerNorm(C), True, True),
    ],
)
@all_layers
def test_what_a_norm_has_not_is_not_added(
    norm: nn.Module, has_weight: bool, has_bias: bool, to: str
) -> None:
    layer = converted(nn.Sequential(nn.Linear(C, C), norm), torch.randn(5, C), to=to)[1]
    assert (layer.weight is not None, layer.bias is not None) == (has_weight, has_bias)


def test_an_affine_free_layer_computes_in_the_models_dtype_not_in_float8() -> None:
    model = mlp(nn.LayerNorm(C, elementwise_affine=False)).bfloat16()
    sites = dynorm.find_norms(model, torch.randn(2, C, dtype=torch.bfloat16))
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn), requires_grad=False)
    dynorm.convert_(model, sites)
    assert model[1].log_beta.dtype == torch.bfloat16


def test_flags_are_kept() -> None:
    model = mlp()
    model[1].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    model[4].eval()
    converted(model, torch.randn(5, C))
    assert (model[1].weight.requires_grad, model[1].bias.requires_grad) == (False, True)
    assert model[1].log_beta.requires_grad
    assert not any(p.requires_grad for p in model[4].parameters())
    assert (model[1].training, model[4].training) == (True, False)


def test_hooks_are_kept_and_their_handles_work_on_both_sides() -> None:
    model, seen = mlp(), []
    before = model[1].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    after = model[1].register_forward_hook(lambda module, args, output: seen.append("post"))
    model[1].register_full_backward_hook(lambda module, given, taken: seen.append("back"))
    x = torch.randn(5, C)
    converted(model, x)
    seen.clear()
    model(x).sum().backward()
    assert seen == ["pre", "post", "back"]
    before.remove()
    seen.clear()
    model(x)
    assert seen == ["post"]
    dynorm.restore_(model)
    after.remove()
    seen.clear()
    model(x)
    assert seen == []


@all_layers
def test_order_and_paths_are_kept(to: str) -> None:
    model = mlp()
    modules = [path for path, _ in model.named_modules()]
    names = list(model.state_dict())
    converted(model, torch.randn(5, C), to=to)
    assert [path for path, _ in model.named_modules()] == modules
    assert [name for name in model.state_dict() if name in names] == names
    dynorm.restore_(model)
    assert list(model.state_dict()) == names


def test_sharing_is_kept() -> None:
    model, x = Twins(), torch.randn(5, C)
    report = dynorm.convert_(model, dynorm.find_norms(model, x))
    assert [(site.path, site.aliases) for site in report.converted] == [
        ("one", ("two",)),
        ("left", ()),
        ("right", ()),
    ]
    assert isinstance(model.one, DyISRU)
    assert model.one is model.two
    assert model.left.weight is model.right.weight
    assert model.left.bias is not model.right.bias
    assert model.left.log_beta is not model.right.log_beta
    dynorm.restore_(model)
    assert model.one is model.two
    assert model.left.weight is model.right.weight


@all_layers
def test_channels_first(to: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, C, 1), LayerNorm2d(C))
    x = torch.randn(2, 3, 4, 5)
    converted(model, x, to=to)
    assert model[1].dim == 1
    assert model(x).shape == (2, C, 4, 5)


@all_layers
def test_several_axes_at_once(to: str) -> None:
    model = converted(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4))), torch.randn(2, 3, 4), to=to
    )
    assert model[1].weight.shape == (3, 4)
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 4)


@all_layers
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_query_and_key_norms_and_options(to: str, per_channel: bool, center: bool) -> None:
    model, x = Attention(), torch.randn(2, 5, C)
    converted(model, x, to=to, per_channel=per_channel, center=center)
    for layer in (model.q_norm, model.k_norm):
        assert layer.normalized_shape == (C // 3,)
        assert layer.beta().shape == ((C // 3,) if per_channel else (1,))
        assert (layer.center is not None) == center
    assert model(x).shape == x.shape


@all_layers
def test_transformer_encoder(to: str) -> None:
    layer = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(C))
    x, padding = (
        torch.randn(3, 5, C),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5]),
    )
    kept = ~padding
    exact = {mode: model.train(mode)(x, src_key_padding_mask=padding) for mode in (True, False)}
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    assert len(layers_of(model)) == 5
    assert not model.use_nested_tensor
    train, evaluated = (
        model.train(mode)(x, src_key_padding_mask=padding) for mode in (True, False)
    )
    assert torch.allclose(train[kept], evaluated[kept], atol=1e-6)
    assert not torch.allclose(evaluated[kept], exact[False][kept], atol=1e-3)
    model.train()
    dynorm.restore_(model)
    assert model.use_nested_tensor
    assert all(module.training for module in model.modules())
    assert torch.equal(model(x, src_key_padding_mask=padding), exact[True])
    assert torch.equal(model.eval()(x, src_key_padding_mask=padding), exact[False])


def test_one_converted_layer_inside_an_encoder_is_really_called() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(3, 5, C)
    converted(model, x, only="layers.1.norm1")
    called = []
    model.layers[1].norm1.register_forward_hook(lambda *_: called.append(True))
    with torch.no_grad():
        model(x)
    assert called


def test_choice_and_report() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(C), nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C), nn.LayerNorm(C)
    )
    sites = dynorm.find_norms(model, torch.randn(5, C))
    report = dynorm.convert_(model, sites, "dyt", skip=["3", "4"])
    assert [type(m).__name__ for m in model] == [
        "BatchNorm1d",
        "DyT",
        "Linear",
        "RMSNorm",
        "LayerNorm",
    ]
    assert [site.path for site in report.refused] == ["0"]
    title, _, head, row, _, *notes = str(report).splitlines()
    assert [site.path for site in report.skipped] == ["3", "4"]
    assert title == "1 norm replaced by dyt, 3 kept"
    assert (head.split(), row.split()) == (
        ["site", "norm", "layer"],
        ["1", f"layernorm({C})", "dyt"],
    )
    reason = f"0: BatchNorm1d kept, {report.refused[0].refused}"
    assert " ".join(notes) == f"{reason} kept as the options say: 3, 4"
    assert report.refused[0].refused.startswith("batch norm")
    values = report.to_dict()
    assert values["to"] == "dyt"
    assert [site["path"] for site in values["converted"]] == ["1"]
    assert values["converted"][0]["normalized_shape"] == [C]
    # The other norms can be converted later, with the same sites.
    dynorm.convert_(model, sites, "dyisru", only=["3", "4"])
    assert [type(m).__name__ for m in model][3:] == ["DyISRU", "DyISRU"]
    dynorm.restore_(model)
    assert [type(m).__name__ for m in model][1:] == ["LayerNorm", "Linear", "RMSNorm", "LayerNorm"]


def fails(model: nn.Module, sites: Any, error: type[Exception], match: str, **options: Any) -> None:
    before = state(model)
    with pytest.raises(error, match=match):
        dynorm.convert_(model, sites, **options)
    assert state(model) == before


def test_models_without_norms_and_converted_ones() -> None:
    x = torch.randn(5, C)
    plain = nn.Sequential(nn.Linear(C, C))
    fails(
        plain,
        dynorm.find_norms(plain, x),
        ModelError,
        "norms.*find_norms.*none",
    )
    model = mlp()
    sites = dynorm.find_norms(model, x)
    dynorm.convert_(model, sites)
    fails(
        model,
        sites,
        ModelError,
        r"'1'.*converted.*dynorm\.restore_",
    )
    fails(model, dynorm.find_norms(model, x), ModelError, "converted already")


def test_sites_of_another_model() -> None:
    x = torch.randn(5, C)
    sites = dynorm.find_norms(mlp(), x)
    fails(nn.Sequential(nn.Linear(C, C)), sites, ModelError, "no '1': call find_norms")
    fails(nn.Sequential(*[nn.Linear(C, C)] * 5), sites, ModelError, "Linear.*LayerNorm")
    wide = nn.Sequential(*[nn.LayerNorm(C + 1)] * 4, nn.RMSNorm(C + 1))
    fails(wide, sites, ModelError, rf"'weight'.*'1'.*shape \({C + 1},\).*\({C},\)")


def test_a_later_site_that_fails_leaves_the_earlier_ones_alone() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    model[4] = nn.LayerNorm(C)
    fails(model, sites, ModelError, "'4'.*LayerNorm.*RMSNorm")


def test_an_unknown_layer_a_glob_without_match_and_a_filter_that_leaves_nothing() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    fails(
        model,
        sites,
        ArgumentError,
        "dyisru.*annealed.*got 'tanh'",
        to="tanh",
    )
    fails(model, sites, ArgumentError, r"glob 'encoder\.\*'.*match", only="encoder.*")
    fails(model, sites, ArgumentError, "glob 'x'.*match", skip=["1", "x"])
    fails(model, sites, ModelError, "filter left", only=[])
    for wrong in (None, 5, "a"):
        fails(model, wrong, ArgumentError, "sites.*NormSite, got")
    for words in (4.0, "a"):
        fails(
            model,
            sites,
            ArgumentError,
            "number.*positions.*got",
            witnesses=words,
        )


def test_only_refused_sites() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))
    sites = dynorm.find_norms(model, torch.randn(2, 3, 5))
    fails(model, sites, ModelError, "chosen.*1: batch.*2: group")


def test_the_model_is_the_norm_itself() -> None:
    model = nn.LayerNorm(C)
    fails(
        model,
        dynorm.find_norms(model, torch.randn(5, C)),
        ModelError,
        "norm itself.*wrap",
    )


def test_a_replaced_forward() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    model[1].forward = lambda x: x
    fails(model, sites, ModelError, "undo.*patch")
    # The class's own, as a hook that was removed leaves it.
    del model[1].forward
    model[1].forward = model[1].forward
    assert dynorm.convert_(model, sites).converted


def test_compiled_wrapped_and_meta_models() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    fails(
        torch.compile(model, backend="eager"), sites, ModelError, r"compiled: pass model\._orig_mod"
    )
    fails(nn.DataParallel(model), sites, ModelError, r"wrapped in DataParallel: pass model\.module")
    fails(copy.deepcopy(model).to("meta"), sites, ModelError, r"meta device: call model\.to_empty")
    with pytest.raises(ArgumentError, match=r"must be a torch\.nn\.Module"):
        dynorm.convert_("bert", sites)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ddp(tmp_path: Path) -> None:
    model = mlp()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fails(
            nn.parallel.DistributedDataParallel(model),
            sites,
            ModelError,
            r"DDP: pass model\.module",
        )
    finally:
        torch.distributed.destroy_process_group()


def changed(model: nn.Module, x: Tensor) -> None:
    """Calibrate and refine, so that the layers are far from their first values."""
    batches = [x + 0.1 * torch.randn_like(x) for _ in range(3)]
    dynorm.calibrate_(model, batches)
    dynorm.refine_(model, batches, steps=2)


MODELS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("mlp", mlp, (9, C)),
    ("gemma", lambda: mlp(GemmaNorm(C), GemmaNorm(C)), (9, C)),
    ("twins", Twins, (9, C)),
    ("attention", Attention, (3, 5, C)),
    ("affine-free", lambda: mlp(nn.LayerNorm(C, elementwise_affine=False)), (9, C)),
    ("images", lambda: nn.Sequential(nn.Conv2d(3, C, 1), LayerNorm2d(C)), (2, 3, 4, 5)),
]


@all_layers
@pytest.mark.parametrize(
    ("build", "shape"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS]
)
def test_restore_is_bit_for_bit_and_gives_the_very_same_modules(
    to: str, build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = build(), torch.randn(shape)
    before, exact = state(model), model(x)
    converted(model, x, to=to)
    changed(model, x)
    assert not torch.equal(model(x), exact)
    assert dynorm.restore_(model) is model
    assert state(model) == before
    assert torch.equal(model(x), exact)


@pytest.mark.parametrize(
    "build", [mlp, lambda: mlp(GemmaNorm(C)), lambda: mlp(nn.RMSNorm(C, elementwise_affine=False))]
)
def test_restore_follows_the_dtype_and_the_mode(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.randn(5, C)
    exact, double = model(x), copy.deepcopy(model).double()(x.double())
    converted(model, x)
    model.double().eval()
    dynorm.restore_(model)
    assert torch.equal(model(x.double()), double)
    assert not any(module.training for module in model.modules())
    model.float().train()
    converted(model, x).double().float()
    dynorm.restore_(model)
    assert torch.equal(model(x), exact)


def test_copies_are_restored_on_their_own() -> None:
    model, x = mlp(), torch.randn(5, C)
    exact = model(x)
    norm = model[1]
    converted(model, x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    dynorm.restore_(twin)
    assert torch.equal(twin(x), exact)
    assert twin[1] is not norm
    assert isinstance(model[1], DyISRU)
    assert dynorm.restore_(model)[1] is norm


@all_layers
def test_pickle(to: str) -> None:
    model, x = mlp(), torch.randn(5, C)
    exact = model(x)
    converted(model, x, to=to)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))
    assert torch.equal(dynorm.restore_(again)(x), exact)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))


def test_the_originals_stay_out_of_the_state() -> None:
    model = mlp()
    parameters = sum(p.numel() for p in model.parameters())
    converted(model, torch.randn(5, C), center=False)
    assert sum(p.numel() for p in model.parameters()) == parameters + 2
    assert not any("replaced" in name for name in model.state_dict())
    assert replaced_by(model[1]).site.path == "1"


def test_nothing_to_restore() -> None:
    with pytest.raises(ModelError, match=r"point-wise.*nothing"):
        dynorm.restore_(mlp())
    with pytest.raises(ModelError, match=r"model.*loaded"):
        dynorm.restore_(nn.Sequential(DyISRU(C)))


def test_specs_rebuild_the_layers_in_a_fresh_model() -> None:
    model, x = Twins(), torch.randn(5, C)
    converted(model, x, to="derf", per_channel=True)
    specs = [LayerSpec.from_dict(spec.to_dict()) for spec in specs_of(model)]
    assert [spec.paths for spec in specs] == [("one", "two"), ("left",), ("right",)]
    fresh = Twins().eval()
    apply_specs_(fresh, specs)
    assert fresh.one is fresh.two
    assert not fresh.one.training
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))
    with pytest.raises(ModelError, match="one, left, right"):
        dynorm.restore_(fresh)


def test_specs_that_do_not_fit() -> None:
    specs = specs_of(converted(mlp(), torch.randn(5, C)))
    model = nn.Sequential(nn.LayerNorm(C))
    before = state(model)
    with pytest.raises(ModelError, match="norm at '1'"):
        apply_specs_(model, specs)
    assert state(model) == before
    with pytest.raises(ArgumentError, match=r"needs.*config"):
        LayerSpec.from_dict({"layer": "dyt"})
    with pytest.raises(ArgumentError, match="one of"):
        LayerSpec.from_dict({"layer": "tanh", "paths": ["1"], "config": {}})
    with pytest.raises(ArgumentError, match=r"dyt.*cannot"):
        LayerSpec("dyt", {"size": 3}, ("1",)).build(None, None)


@all_layers
def test_outputs_can_be_viewed_as_a_norms_can(to: str) -> None:
    """nn.LayerNorm returns contiguous tensors, whatever it is given."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(0, 1)).view(-1)

    x = torch.randn(3, 4, C)
    assert converted(Viewing(), x, to=to)(x).shape == (12 * C,)


def test_a_parameter_that_a_norm_shares_with_another_module_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[2].bias = model[1].bias
    before, x = model[1].bias, torch.randn(64, 8)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    assert model[2].bias is model[1].bias
    assert model[1].bias is not before
    dynorm.calibrate_(model, [x])
    assert model[2].bias is model[1].bias
    dynorm.restore_(model)
    assert model[1].bias is model[2].bias is before


def test_a_weight_used_as_1_plus_w_stays_shared() -> None:
    model, x = (
        nn.Sequential(nn.Linear(C, C), GemmaNorm(C), nn.Linear(C, C), GemmaNorm(C)),
        torch.randn(4, C),
    )
    before = model[1].weight
    model[2].bias = before
    dynorm.convert_(model, dynorm.find_norms(model, x))
    assert model[1].weight is model[2].bias
    assert torch.equal(model[1].weight, before)
    dynorm.restore_(model)
    assert model[1].weight is model[2].bias is before
    # Norms that share w among them stay together.
    model[2].bias, model[3].weight = None, model[1].weight
    dynorm.convert_(model, dynorm.find_norms(model, x))
    assert model[1].weight is model[3].weight


class RowNorm(GemmaNorm):
    """Holds its weight as a matrix of one row."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight = nn.Parameter(self.weight.detach()[None])


def test_a_weight_of_another_shape_is_not_parted_from_another_module() -> None:
    model, x = nn.Sequential(nn.Linear(C, C), RowNorm(C), nn.Linear(C, 1)), torch.randn(4, C)
    norm = model[1]
    model[2].weight = norm.weight
    sites = dynorm.find_norms(model, x)
    with pytest.raises(ModelError, match=r"2\.weight.*parameter"):
        dynorm.convert_(model, sites)
    assert model[1] is norm


@pytest.mark.parametrize("sites", ["dyisru", [[1.0, 2.0]], ["1"]])
def test_what_is_no_list_of_sites_gets_words_that_help(sites: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"list.*NormSite",
    ):
        dynorm.convert_(nn.Sequential(nn.LayerNorm(8)), sites)


def test_a_batch_that_is_a_list_of_rows_gets_words_that_help() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, 8)))
    with pytest.raises(DataError, match=r"list.*numbers"):
        dynorm.calibrate_(model, [[[0.0] * 8, [1.0] * 8]])


def test_a_loaded_model_has_no_norms_to_restore(tmp_path: Any) -> None:
    model = mlp()
    x = torch.randn(64, C)
    sites = dynorm.find_norms(model, x)
    dynorm.convert_(model, sites)
    dynorm.calibrate_(model, [x])
    # Here the norms are known.
    for given in (sites, dynorm.find_norms(model, x)):
        with pytest.raises(ModelError, match=r"converted.*already"):
            dynorm.convert_(model, given)
    dynorm.save(model, tmp_path / "m")
    loaded = dynorm.load(tmp_path / "m", mlp())
    for given in (sites, dynorm.find_norms(loaded, x)):
        with pytest.raises(ModelError, match=r"load.*original") as raised:
            dynorm.convert_(loaded, given)
        assert "restore_" not in str(raised.value)


class FloatInPlaceNorm(nn.Module):
    """Writes into its input, except where .float() makes a copy."""

    def forward(self, x: Tensor) -> Tensor:
        v = x.float()
        v.mul_(v.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
        return v.to(x.dtype)


def test_a_norm_that_modifies_its_input_after_a_cast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), FloatInPlaceNorm(), nn.Linear(C, C)).bfloat16()
    x = torch.randn(80, C, dtype=torch.bfloat16)
    sites = dynorm.find_norms(model, x)
    dynorm.convert_(model, sites)
    assert dynorm.calibrate_(model, [x]).sites[0].error < 1
    model.float()
    with pytest.raises(ModelError, match=r"FloatInPlaceNorm .* does in torch.float32"):
        dynorm.calibrate_(model, [x.float()])


def three_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C), nn.Linear(C, C), nn.LayerNorm(C)
    )


def test_options_by_glob() -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    options = {"0": None, "[24]": {"to": "dyt"}, "2": {"to": "derf"}, "_default": {"center": False}}
    report = dynorm.convert_(model, sites, options, per_channel=False)  # type: ignore[arg-type]
    # The first glob that matches decides, and lacks nothing that the default or the call has.
    assert type(model[0]) is nn.LayerNorm
    for place in (2, 4):
        layer = model[place]
        assert type(layer) is dynorm.DyT
        assert layer.center is None
        assert not layer.per_channel
    assert [site.path for site in report.converted] == ["2", "4"]
    assert (report.to, report.layers, report.refused) == ("dyt", [], [])


def test_a_report_of_several_layers_names_each() -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    report = dynorm.convert_(
        model, sites, {"2": {"to": "derf", "witnesses": (1, 0)}, "4": {"to": "annealed"}}
    )
    assert report.to == "dyisru, derf, annealed"
    assert report.layers == ["dyisru", "derf", "annealed"]
    assert [line.split()[-1] for line in str(report).splitlines()[-3:]] == report.layers
    assert model[2].witness_channels == (1, 0)
    # The defaults of each layer, and for the site without a glob those of the call.
    assert replaced_by(model[0]).witnesses == C // 3
    assert replaced_by(model[4]).witnesses == 0


def test_a_default_of_none_leaves_the_others() -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    options: Any = {"_default": None, "4": {"to": "linear"}}
    report = dynorm.convert_(model, sites, options)
    assert [site.path for site in report.converted] == ["4"]
    assert [type(model[place]) for place in (0, 2)] == [nn.LayerNorm, nn.RMSNorm]


def test_one_site_may_be_chosen_by_calibration() -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    options: Any = {"2": {"to": "auto"}, "_default": {"witnesses": 0}}
    dynorm.convert_(model, sites, options)
    report = dynorm.calibrate_(model, [torch.randn(64, C) for _ in range(4)])
    assert [bool(site.errors) for site in report.sites] == [False, True, False]
    assert "chosen" in str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm.9": None}, r"glob 'norm\.9'.*nearest"),
        ({"0": {"lean": 0.5}}, "got 'lean'.*to, per_channel"),
        ({"0": {"witnes": 1}}, "got 'witnes'.*mean 'witnesses'"),
        ({"0": "dyt"}, "options.*mapping.*got 'dyt'"),
        ({"0": {"to": "x"}}, "layer.*one of"),
        ({"0": {"witnesses": -1}}, "witnesses.*number"),
        ({"0": {"per_channel": "no"}}, "per_channel.*got 'no'"),
        ({"_default": {"center": 1}}, "center.*got 1"),
        ({3: None}, "globs.*strings"),
    ],
)
def test_wrong_options_by_glob_leave_the_model_as_it_was(options: Any, message: str) -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    with pytest.raises(ArgumentError, match=message):
        dynorm.convert_(model, sites, options)
    assert not dynorm_layers(model)


def test_a_glob_without_a_match_is_answered_with_the_nearest_paths() -> None:
    model = nn.ModuleDict(
        {name: nn.LayerNorm(C) for name in ["a", "b", "c", "d", "e", "f", "first_norm"]}
    )
    sites = [dynorm.site.NormSite(path, kind="layernorm") for path in model]
    for options in ({"to": {"first_nrom": None}}, {"only": "first_nrom"}, {"skip": "first_nrom"}):
        with pytest.raises(ArgumentError, match=r"nearest.*first_norm"):
            dynorm.convert_(model, sites, **options)  # type: ignore[arg-type]


def test_nothing_is_left_to_convert_by_globs() -> None:
    model = three_norms()
    sites = dynorm.find_norms(model, torch.randn(5, C))
    with pytest.raises(ModelError, match=r"filter.*left"):
        dynorm.convert_(model, sites, {"*": None})
