"""convert_ and restore_: a layer keeps the settings of its norm, and errors and restoring leave no trace."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError, ModelError, StorageError
from dynorm.hub.contents import read_layers
from dynorm.layers import Derf, DyISRU, DyT, LinearControl, PointwiseNorm
from dynorm.replace.converted import replaced_by
from dynorm.replace.specs import LayerSpec, apply_specs_, specs_of

C = 12
X = torch.randn(9, C, generator=torch.Generator().manual_seed(0))
TO = {"dyisru": DyISRU, "dyt": DyT, "derf": Derf, "linear": LinearControl}
all_layers = pytest.mark.parametrize("to", TO)


class GemmaNorm(nn.Module):
    """Scales by 1 + w and adds in float32."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).type_as(x)


class LlamaNorm(nn.Module):
    """Returns the dtype that input and weight are promoted to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, C))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class FloatInPlaceNorm(nn.Module):
    """Writes into its input, except where .float() makes a copy."""

    def forward(self, x: Tensor) -> Tensor:
        v = x.float()
        v.mul_(v.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
        return v.to(x.dtype)


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images, as ConvNeXt has it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


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


def converted(model: nn.Module, x: Tensor = X, **options: Any) -> nn.Module:
    dynorm.convert_(model, dynorm.find_norms(model, x), **options)
    return model


def state(model: nn.Module) -> tuple[Any, ...]:
    """All that must be as before: modules, their order, flags and hooks, and every tensor itself and its values."""
    modules = [
        (path, module, module.training)
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for _, m, _ in modules]
    tensors = [(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()]
    values = [
        (id(t), t.requires_grad, t.detach().clone().tolist()) for _, t in tensors if not t.is_meta
    ]
    return modules, hooks, [name for name, _ in tensors], values


# What a layer keeps of its norm


@all_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_affine_dtype_and_bound_are_the_norms(to: str, dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    norms, names = [model[1], model[4]], list(model.state_dict())
    converted(model, X.to(dtype), to=to)
    for layer, norm, bound in zip((model[1], model[4]), norms, (C - 1, C), strict=True):
        assert type(layer) is TO[to]
        assert layer.scale == pytest.approx(math.sqrt(bound))
        assert torch.equal(layer.weight, norm.weight)
        assert layer.weight is not norm.weight
        assert {p.dtype for p in layer.parameters()} == {dtype}
    assert torch.equal(model[1].bias, norms[0].bias)
    assert model[4].bias is None
    assert [name for name in model.state_dict() if name in names] == names
    # The norms themselves are not part of the state.
    assert len(list(model.parameters())) == len(names) + 2 * len(model[1].constant_parameters())
    assert model(X.to(dtype)).dtype == dtype


def test_an_affine_free_layer_computes_in_the_models_dtype_not_in_float8() -> None:
    model = mlp(nn.LayerNorm(C, elementwise_affine=False)).bfloat16()
    sites = dynorm.find_norms(model, X.bfloat16())
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn), requires_grad=False)
    dynorm.convert_(model, sites)
    assert model[1].log_beta.dtype == torch.bfloat16


@all_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_plus_w_keeps_w_in_the_models_dtype(to: str, dtype: torch.dtype) -> None:
    model = mlp(GemmaNorm(C)).to(dtype)
    norm = model[1]
    converted(model, X.to(dtype), to=to)
    assert torch.equal(model[1].weight, norm.weight)
    assert torch.equal(model[1].factor(), 1 + norm.weight.float())
    assert {p.dtype for p in model[1].parameters()} == {dtype}
    assert dynorm.restore_(model)[1] is norm


@pytest.mark.parametrize("norm", [LlamaNorm, lambda: GemmaNorm(C)])
@pytest.mark.parametrize("to", ["dyisru", "linear", "annealed"])
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16, torch.float64])
def test_the_output_has_the_dtype_of_the_norms(norm: Any, to: str, cast: torch.dtype) -> None:
    for found_in in (torch.float32, torch.bfloat16):
        before = nn.Sequential(nn.Identity(), norm()).to(found_in)
        model = converted(copy.deepcopy(before), X.to(found_in), to=to).to(cast)
        before.to(cast)
        for given in (torch.float32, torch.bfloat16, torch.float64):
            assert model(X.to(given)).dtype == before(X.to(given)).dtype


def test_flags_and_hooks_are_kept_and_their_handles_work_on_both_sides() -> None:
    model, seen = mlp(), []
    model[1].weight.requires_grad_(False)
    model[4].requires_grad_(False).eval()
    before = model[1].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    after = model[1].register_forward_hook(lambda module, args, output: seen.append("post"))
    model[1].register_full_backward_hook(lambda module, given, taken: seen.append("back"))

    def hooks_of_a_run() -> list[str]:
        seen.clear()
        model(X).sum().backward()
        return list(seen)

    converted(model)
    assert (model[1].weight.requires_grad, model[1].bias.requires_grad) == (False, True)
    assert not any(p.requires_grad for p in model[4].parameters())
    assert (model[1].training, model[4].training) == (True, False)
    assert hooks_of_a_run() == ["pre", "post", "back"]
    before.remove()
    assert hooks_of_a_run() == ["post", "back"]
    dynorm.restore_(model)
    after.remove()
    assert hooks_of_a_run() == ["back"]


def test_sharing_is_kept() -> None:
    model = Twins()
    report = dynorm.convert_(model, dynorm.find_norms(model, X))
    aliases = [(site.path, site.aliases) for site in report.converted]
    assert aliases == [("one", ("two",)), ("left", ()), ("right", ())]
    assert isinstance(model.one, DyISRU)
    assert model.one is model.two
    assert model.left.weight is model.right.weight
    assert model.left.bias is not model.right.bias
    assert model.left.log_beta is not model.right.log_beta


@pytest.mark.parametrize("norm", [nn.LayerNorm(C), GemmaNorm(C)])
def test_a_parameter_that_a_norm_shares_with_another_module_stays_shared(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(C, C), norm, nn.Linear(C, C))
    before = model[2].bias = norm.weight
    converted(model)
    assert model[2].bias is model[1].weight
    assert model[1].weight is not before
    dynorm.restore_(model)
    assert model[1].weight is model[2].bias is before


def test_a_weight_of_another_shape_is_not_parted_from_another_module() -> None:
    model = nn.Sequential(nn.Linear(C, C), GemmaNorm(1, C), nn.Linear(C, 1))
    norm = model[1]
    model[2].weight = norm.weight
    with pytest.raises(ModelError, match=r"2\.weight.*parameter"):
        converted(model)
    assert model[1] is norm


def test_channels_first_and_viewed_outputs() -> None:
    images = torch.randn(2, 3, 4, 5)
    model = converted(nn.Sequential(nn.Conv2d(3, C, 1), LayerNorm2d(C)), images)
    assert model[1].dim == 1
    assert model(images).shape == (2, C, 4, 5)

    class Viewing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x.transpose(0, 1)).view(-1)

    x = torch.randn(3, 4, C)
    assert converted(Viewing(nn.LayerNorm(C)), x)(x).shape == (12 * C,)


@all_layers
def test_transformer_encoder(to: str) -> None:
    layer = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(C))
    x, padding = torch.randn(2, 5, C), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    kept = ~padding

    def outputs(train: bool) -> Tensor:
        return model.train(train)(x, src_key_padding_mask=padding)

    exact = {mode: outputs(mode) for mode in (True, False)}
    # One layer is enough to leave the fused path.
    for path in ("layers.1.norm1", "*"):
        converted(model, x, to={path: to, "*": "keep"} if path != "*" else to)
        assert not model.use_nested_tensor
        assert torch.allclose(outputs(True)[kept], outputs(False)[kept], atol=1e-6)
        assert not torch.allclose(outputs(False)[kept], exact[False][kept], atol=1e-3)
    dynorm.restore_(model.train())
    assert model.use_nested_tensor
    assert all(module.training for module in model.modules())
    for mode in (True, False):
        assert torch.equal(outputs(mode), exact[mode])


# Options


@pytest.mark.parametrize("to", ["dyisru", "linear", "annealed_linear"])
def test_a_line_in_the_place_of_a_layernorm_has_a_bias(to: str) -> None:
    model = nn.Sequential(
        nn.LayerNorm(C, bias=False), nn.RMSNorm(C), nn.LayerNorm(C, elementwise_affine=False)
    )
    converted(model, to=to)
    is_line = to != "dyisru"
    assert [layer.bias is not None for layer in model] == [is_line, False, is_line]
    assert [layer.weight is not None for layer in model] == [True, True, is_line]


def three_norms() -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C), nn.Linear(C, C), nn.LayerNorm(C)
    )


@pytest.mark.parametrize(
    ("to", "layers"),
    [
        ("dyt", ["DyT", "DyT", "DyT"]),
        # The first glob that matches decides.
        ({"0": "keep", "[24]": "dyt", "2": "derf"}, ["LayerNorm", "DyT", "DyT"]),
        # The rest has its own key, wherever it stands.
        ({"*": "keep", "4": "linear"}, ["LayerNorm", "RMSNorm", "LinearControl"]),
        ({"*": "dyt", "0": {}}, ["DyISRU", "DyT", "DyT"]),
        ({"4": "keep"}, ["DyISRU", "DyISRU", "LayerNorm"]),
    ],
)
def test_layers_by_glob(to: Any, layers: list[str]) -> None:
    model = three_norms()
    report = dynorm.convert_(model, dynorm.find_norms(model, X), to)
    assert [type(model[place]).__name__ for place in (0, 2, 4)] == layers
    replaced = [name not in ("LayerNorm", "RMSNorm") for name in layers]
    assert len(report.converted) == sum(replaced)
    assert len(report.skipped) == 3 - sum(replaced)


def test_options_by_glob_lack_nothing_that_the_call_has() -> None:
    model = three_norms()
    to: Any = {"2": {"to": "annealed", "witnesses": 2}, "4": {"to": "derf", "witnesses": 0}}
    report = dynorm.convert_(model, dynorm.find_norms(model, X), to, witnesses=16)
    assert str(report).startswith("3 norms replaced by dyisru, annealed, derf, 0 kept")
    assert report.layers == ["dyisru", "annealed", "derf"]
    assert [line.split()[-1] for line in str(report).splitlines()[-3:]] == report.layers
    # At most as many as there are channels.
    assert [replaced_by(model[place]).witnesses for place in (0, 2, 4)] == [C, 2, 0]


def test_the_report_names_what_stays() -> None:
    model = nn.Sequential(nn.BatchNorm1d(C), nn.LayerNorm(C), nn.RMSNorm(C))
    sites = dynorm.find_norms(model, X)
    report = dynorm.convert_(model, sites, {"2": "keep", "*": "dyt"})
    text = " ".join(str(report).split())
    assert text.startswith("1 norm replaced by dyt, 2 kept")
    assert f"1 layernorm({C}) dyt" in text
    assert f"0: BatchNorm1d kept, {report.refused[0].refused}" in text
    assert "kept as the options say: 2" in text
    assert [site["path"] for site in report.to_dict()["converted"]] == ["1"]
    # The other norm can be converted later, with the same sites.
    dynorm.convert_(model, sites, {"2": "dyisru", "*": "keep"})
    assert type(model[2]) is DyISRU


def fails(model: nn.Module, sites: Any, error: type[Exception], match: str, **options: Any) -> None:
    before = state(model)
    with pytest.raises(error, match=match):
        dynorm.convert_(model, sites, **options)
    assert state(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "tanh"}, "dyisru.*annealed.*got 'tanh'"),
        ({"to": {"norm.9": "keep"}}, r"glob 'norm\.9'.*nearest"),
        ({"to": {"0": {"lean": 0.5}}}, "got 'lean'.*to, witnesses"),
        ({"to": {"0": {"witnes": 1}}}, "got 'witnes'.*mean 'witnesses'"),
        ({"to": {"0": None}}, '"keep", which leaves.*"none", which removes.*got None'),
        ({"to": {3: "keep"}}, "globs.*strings"),
        ({"witnesses": -1}, "witnesses.*at least 0.*got -1"),
        ({"witnesses": 4.0}, r"witnesses.*got 4\.0"),
        ({"witnesses": 17}, "at most 16.*a norm again: keep the norm"),
        ({"to": "annealed_derf", "witnesses": 1}, "0 for 'annealed_derf', got 1.*to=\"dyisru\""),
        ({"to": {"0": {"to": "dyt", "witnesses": 2}}}, "witnesses must be 0 for 'dyt', got 2"),
    ],
)
def test_wrong_options_leave_the_model_as_it_was(options: Any, message: str) -> None:
    model = three_norms()
    fails(model, dynorm.find_norms(model, X), ArgumentError, message, **options)


def test_models_without_a_norm_to_replace() -> None:
    plain = nn.Sequential(nn.Linear(C, C))
    fails(plain, dynorm.find_norms(plain, X), ModelError, "norms.*find_norms.*none")
    model = mlp()
    sites = dynorm.find_norms(model, X)
    for to in ("keep", {"*": "keep"}):
        fails(model, sites, ModelError, "keeps them all", to=to)
    dynorm.convert_(model, sites)
    fails(model, sites, ModelError, r"'1'.*converted.*dynorm\.restore_")
    fails(model, dynorm.find_norms(model, X), ModelError, "converted already")
    norm = nn.LayerNorm(C)
    fails(norm, dynorm.find_norms(norm, X), ModelError, "norm itself.*wrap")


def test_sites_of_another_model() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, X)
    fails(nn.Sequential(nn.Linear(C, C)), sites, ModelError, "no LayerNorm at '1': call find_norms")
    wide = nn.Sequential(*[nn.LayerNorm(C + 1)] * 4, nn.RMSNorm(C + 1))
    fails(wide, sites, ModelError, rf"'1'.*'weight' for {C} channels")
    # A later site that fails leaves the earlier ones alone.
    model[4] = nn.LayerNorm(C)
    fails(model, sites, ModelError, "no RMSNorm at '4'")
    for wrong in (None, "dyisru", ["1"]):
        fails(model, wrong, ArgumentError, "sites.*list.*NormSite, got")


def test_a_replaced_forward() -> None:
    model = mlp()
    sites = dynorm.find_norms(model, X)
    model[1].forward = lambda x: x
    fails(model, sites, ModelError, "undo.*patch")
    # The class's own, as a hook that was removed leaves it.
    del model[1].forward
    model[1].forward = model[1].forward
    assert dynorm.convert_(model, sites).converted


# Restoring


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (9, C)),
    "gemma": (lambda: mlp(GemmaNorm(C), GemmaNorm(C)), (9, C)),
    "twins": (Twins, (9, C)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, C, 1), LayerNorm2d(C)), (2, 3, 4, 5)),
}


@all_layers
@pytest.mark.parametrize("name", MODELS)
def test_restore_is_bit_for_bit_and_gives_the_very_same_modules(to: str, name: str) -> None:
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    before, exact = state(model), model(x)
    converted(model, x, to=to)
    if name == "twins":
        # calibrate_ refuses the weight that they share.
        nn.init.constant_(model.left.weight, 3.0)
    else:
        dynorm.calibrate_(model, [x, x + 0.1 * torch.randn_like(x)])
    assert not torch.equal(model(x), exact)
    assert dynorm.restore_(model) is model
    assert state(model) == before
    assert torch.equal(model(x), exact)


@pytest.mark.parametrize(
    "build", [mlp, lambda: mlp(GemmaNorm(C)), lambda: mlp(nn.RMSNorm(C, elementwise_affine=False))]
)
def test_restore_follows_the_dtype_and_the_mode(build: Callable[[], nn.Module]) -> None:
    model = build()
    exact, double = model(X), copy.deepcopy(model).double()(X.double())
    converted(model).double().eval()
    dynorm.restore_(model)
    assert torch.equal(model(X.double()), double)
    assert not any(module.training for module in model.modules())
    converted(model.float().train()).double().float()
    assert torch.equal(dynorm.restore_(model)(X), exact)


@all_layers
def test_copies_are_restored_on_their_own(to: str) -> None:
    model = mlp()
    exact, norm = model(X), model[1]
    converted(model, to=to)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), model(X))
        assert torch.equal(dynorm.restore_(twin)(X), exact)
        assert twin[1] is not norm
    assert isinstance(model[1], PointwiseNorm)
    assert dynorm.restore_(model)[1] is norm


def test_restore_refuses_a_wrapped_model() -> None:
    """DDP would go on with the layers' parameters."""
    model = nn.DataParallel(converted(three_norms()))
    with pytest.raises(ModelError, match=r"pass model\.module"):
        dynorm.restore_(model)


def test_nothing_to_restore(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"point-wise.*nothing"):
        dynorm.restore_(mlp())
    with pytest.raises(ModelError, match=r"model.*loaded"):
        dynorm.restore_(nn.Sequential(DyISRU(C)))
    model = mlp()
    sites = dynorm.find_norms(model, X)
    dynorm.convert_(model, sites)
    dynorm.calibrate_(model, [X])
    dynorm.save(model, tmp_path / "m")
    loaded = dynorm.load(tmp_path / "m", mlp())
    for given in (sites, dynorm.find_norms(loaded, X)):
        with pytest.raises(ModelError, match=r"load.*original") as raised:
            dynorm.convert_(loaded, given)
        assert "restore_" not in str(raised.value)


def test_an_offloaded_model_is_left_as_it_is() -> None:
    hooks = pytest.importorskip("accelerate")
    original = mlp()
    model = converted(copy.deepcopy(original))
    dynorm.calibrate_(model, [X])
    kinds = [type(module) for module in model]
    given = copy.deepcopy(model)
    annealed = converted(copy.deepcopy(original), to="annealed")
    dynorm.set_anneal_(annealed, 1.0)
    hooks.cpu_offload(model)
    hooks.cpu_offload(annealed)
    for verb in (
        lambda: dynorm.restore_(model),
        lambda: dynorm.finalize_(annealed),
        lambda: dynorm.Monitor(model),
        lambda: dynorm.calibrate_(model, [X]),
        lambda: dynorm.refine_(model, [X], steps=1),
        lambda: dynorm.measure(model, [X], original=original),
        lambda: dynorm.distill_(model, [X], teacher=original, steps=1),
        lambda: dynorm.distill_(copy.deepcopy(given), [X], teacher=model, steps=1),
    ):
        with pytest.raises(ModelError, match="accelerate has offloaded it"):
            verb()
    assert [type(module) for module in model] == kinds
    assert model(X).isfinite().all()
    assert annealed(X).isfinite().all()


def test_a_norm_that_modifies_its_input_after_a_cast() -> None:
    model, x = nn.Sequential(nn.Linear(C, C), FloatInPlaceNorm()).bfloat16(), X.bfloat16()
    converted(model, x).float()
    with pytest.raises(ModelError, match=r"FloatInPlaceNorm .* does in torch.float32"):
        dynorm.calibrate_(model, [X])


# Layers as plain values


def test_specs_rebuild_the_layers_in_a_fresh_model() -> None:
    model = converted(Twins(), to="derf")
    specs = read_layers([spec.to_dict() for spec in specs_of(model)], "a file")
    assert [spec.paths for spec in specs] == [("one", "two"), ("left",), ("right",)]
    fresh = Twins().eval()
    apply_specs_(fresh, specs)
    assert fresh.one is fresh.two
    assert not fresh.one.training
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), model(X))
    with pytest.raises(ModelError, match="left, one, right"):
        dynorm.restore_(fresh)


def test_specs_that_do_not_fit() -> None:
    specs = specs_of(converted(mlp()))
    model = nn.Sequential(nn.LayerNorm(C))
    before = state(model)
    with pytest.raises(ModelError, match="norm at '1'"):
        apply_specs_(model, specs)
    assert state(model) == before
    for values, match in (
        ({"layer": "dyt", "paths": ["1"]}, "'config'"),
        ({"layer": "tanh", "paths": ["1"], "config": {}}, "one of"),
        ({"layer": "dyt", "paths": "1", "config": {}}, "a list of its paths"),
        (3, "layer 0"),
    ):
        with pytest.raises(StorageError, match=match):
            read_layers([values], "a file")
    with pytest.raises(ArgumentError, match=r"dyt.*cannot"):
        LayerSpec("dyt", {"size": 3}, ("1",)).build(None, None)
