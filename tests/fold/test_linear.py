"""Linear layers folded away: before their readers, and on the residual stream itself by rescaling that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from benchmarks.fold_models import NAMES, build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import FoldReport, fold_
from dynorm.fold.check import WideCasts, relative_error
from dynorm.replace.converted import is_ours
from dynorm.stream.tensors import tensors_in

pytest.importorskip("transformers")

C = 8
# The linear layers that go, with everything allowed; all of them but where a number says how many
# of how many.
SOME = {
    "qwen3": (5, 9),
    "gemma3": (9, 13),
    "cohere": (3, 7),
    "mixtral": (3, 5),
    "dinov2": (4, 5),
    "whisper": (11, 12),
}


def outputs(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad(), WideCasts():
        return [tensor for tensor in tensors_in(model(**given)) if tensor.is_floating_point()]


def folded(
    model: nn.Module, given: dict[str, Tensor], other: dict[str, Tensor], **options: Any
) -> FoldReport:
    """Fold, and compare the outputs on inputs that the fold has not seen."""
    exact = outputs(model, other)
    report = fold_(model, **given, **options)
    assert relative_error(outputs(model, other), exact) <= 1e-12
    return report


def becomes(report: FoldReport) -> list[str]:
    return [site.becomes for site in report.sites]


@pytest.mark.parametrize("name", ["bert", "roberta", "encoder_post", "gpt2"])
def test_no_norm_is_left(name: str) -> None:
    model = build(name).double()
    linear_(model, **inputs(name, model))
    report = folded(
        model, inputs(name, model), inputs(name, model, seed=7), untie=True, add_bias=True
    )
    assert set(becomes(report)) == {"Identity"}
    assert not any("norm" in type(module).__name__.lower() for module in model.modules())
    assert f"{len(report.sites)} of {len(report.sites)} linear layers removed" in str(report)
    assert report.loads_with == "dynorm"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mamba"])
def test_which_linear_layers_go(name: str) -> None:
    model = build(
        name, **({"experts_implementation": "batched_mm"} if name == "mixtral" else {})
    ).double()
    linear_(model, **inputs(name, model))
    report = folded(
        model, inputs(name, model), inputs(name, model, seed=7), untie=True, add_bias=True
    )
    count = becomes(report).count("Identity")
    assert (count, len(report.sites)) == SOME.get(name, (count, count))
    assert all(
        site.affine.reason or site.constants.reason
        for site in report.sites
        if site.becomes != "Identity"
    )


def test_a_layer_may_insist_on_the_weight_of_its_norm_and_the_model_is_then_as_it_was() -> None:
    model = build("mamba").double()
    linear_(model, **inputs("mamba", model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"attribute.*everything"):
        fold_(model, untie=True, add_bias=True, **inputs("mamba", model))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_where_a_model_is_given_the_stream_and_returns_it_one_factor_per_channel_stays() -> None:
    model = linear_(build("encoder_post").encoder.double(), src=torch.randn(2, 5, 32).double())  # type: ignore[union-attr]
    layers = [layer for layer in model.modules() if isinstance(layer, dynorm.LinearControl)]
    product = torch.stack(
        [(layer.weight * layer.beta().rsqrt()).detach() for layer in layers]
    ).prod(0)
    report = folded(
        model, {"src": torch.randn(2, 5, 32).double()}, {"src": torch.randn(3, 4, 32).double()}
    )
    assert becomes(report) == ["Identity"] * 3 + [""]
    assert "a factor per channel stays: written by" in (report.sites[3].affine.reason or "")
    last = model.layers[1].norm2
    assert (last.scale, last.bias, last.center) == (1.0, None, None)
    assert torch.allclose(last.weight * last.beta().rsqrt(), product, 1e-12, 0.0)


def test_tied_weights_keep_one_factor_where_they_may_not_be_untied() -> None:
    model = build("gpt2").double()
    linear_(model, **inputs("gpt2", model))
    report = folded(model, inputs("gpt2", model), inputs("gpt2", model, seed=7))
    assert becomes(report) == ["Identity"] * 4 + [""]
    assert "pass untie=True" in (report.sites[4].affine.reason or "")
    assert report.untied == report.added_biases == []


class Net(nn.Module):
    """A stream that a norm reads and writes, and a forward that a test writes."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        self.e, self.f, self.g, self.h = (
            nn.Linear(4, C),
            nn.Linear(C, C),
            nn.Linear(C, C),
            nn.Linear(C, 3),
        )
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def post(m: Any, x: Tensor) -> Any:
    x = m.n(m.e(x))
    return m.h(m.m(x + m.g(m.f(x).relu())).relu())


def net(run: Callable[..., Any], norms: str = "n", skip: Any = None, **parts: Any) -> Any:
    torch.manual_seed(0)
    parts |= {name: nn.LayerNorm(C) for name in norms}
    model = Net(run, **parts).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape) + 0.3)
    return linear_(model, skip, x=example()) if norms else model


def example() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


def unchecked(model: Any, **options: Any) -> FoldReport:
    """Fold without the check of fold_: what is planned must be right by itself."""
    return folded(model, {"x": example()}, {"x": example()}, check=False, **options)


def why(report: FoldReport) -> str:
    site = next(site for site in report.sites if site.path == "n")
    return f"{site.becomes} {site.affine.reason} {site.constants.reason}"


def test_a_constant_goes_into_a_bias_before_the_layer_through_sums_and_views() -> None:
    model = net(post, "nm")
    report = unchecked(model)
    # The first layer's readers and the second's writers are on one stream: e and g take the
    # constants.
    assert becomes(report) == ["Identity"] * 2 == [type(model.n).__name__, type(model.m).__name__]
    assert report.sites[1].affine.reason is None


def test_a_zero_has_no_inverse_on_a_stream_and_is_no_matter_before_readers() -> None:
    model = net(post, "nm")
    with torch.no_grad():
        model.n.weight[3] = 0
    assert "its weight is 0 in channel 3" in why(unchecked(model))
    model = net(lambda m, x: m.h(m.n(m.e(x))))
    with torch.no_grad():
        model.n.weight[3] = 0
    assert becomes(unchecked(model)) == ["Identity"]


@pytest.mark.parametrize("kind", ["layernorm", "dyisru"])
def test_another_norm_that_writes_into_the_stream_takes_the_factor_into_its_own_weight(
    kind: str,
) -> None:
    def run(m: Any, x: Tensor) -> Any:
        x = m.n(m.e(x))
        return m.h(m.m(m.g(x.relu()) + x).relu())

    model = net(run, "nm", skip="n")
    if kind == "dyisru":
        dynorm.convert_(model, dynorm.find_norms(model, example()), to="dyisru")
    # The relu sees the stream: with it the factor has no place before the layer.
    report = unchecked(model, center=False)
    assert [site.becomes for site in report.sites if site.path == "m"] == [""]
    model = net(
        lambda m, x: m.h(m.m(m.n(m.e(x)) + m.g(x @ m.p)).relu()),
        "nm",
        skip="n",
        p=nn.Parameter(torch.ones(4, C)),
    )
    if kind == "dyisru":
        dynorm.convert_(model, dynorm.find_norms(model, example()), to="dyisru")
    before = model.n.weight.detach().clone()
    report = unchecked(model, center=False)
    assert [site.becomes for site in report.sites if site.path == "m"] == ["Identity"]
    assert not torch.equal(model.n.weight, before)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "called twice": (lambda m, x: m.n(m.n(m.e(x))).relu(), "called several times"),
    "read by others too": (lambda m, x: (m.n(y := m.e(x)) + y).relu(), "also read by others"),
    "doubled": (lambda m, x: m.n((y := m.e(x)) + y).relu(), "has no bias to take its centre"),
    "no bias": (lambda m, x: m.n(x @ m.e.weight.T).relu(), "has no bias to take its centre"),
    "a shared bias": (lambda m, x: m.n(m.e(x)).relu() + m.e.bias, "e.bias is used elsewhere too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_stays_where_its_constant_has_no_place(name: str) -> None:
    run, words = REFUSED[name]
    report = unchecked(net(run), add_bias=True)
    assert words in why(report)
    assert report.sites[0].becomes == ""


BOTH: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a shared writer": (
        lambda m, x: (m.n(m.e(x)) + (x.tanh() @ m.e.weight.T).relu()).relu(),
        "e.weight writes into it",
    ),
    "one number": (lambda m, x: m.n(m.e(x) + 1).relu(), "adds a number to all channels"),
    "a norm that stays": (lambda m, x: m.m(m.n(m.e(x).relu() + m.b)), "read by m, which stays"),
    "a reader of two streams": (
        lambda m, x: (m.n(m.e(x).relu() + m.b) @ m.f.weight.T) + m.f(x.repeat(1, 2).sin()),
        "f.weight, which reads it, is also used by",
    ),
}


@pytest.mark.parametrize("name", BOTH)
def test_a_factor_stays_where_the_streams_on_both_sides_must(name: str) -> None:
    run, words = BOTH[name]
    norms = "nm" if "norm" in name else "n"
    report = unchecked(
        net(run, norms, skip="m" if "norm" in name else None, b=nn.Parameter(torch.ones(C)))
    )
    assert words in why(report)
    assert report.sites[0].becomes == ""


def test_a_layer_that_the_model_calls_through_a_list_goes_too() -> None:
    def run(m: Any, x: Tensor) -> Any:
        for function in m.functions if hasattr(m, "functions") else (m.e, m.n, m.h):
            x = function(x)
        return x

    model = net(run)
    model.functions = [model.e, model.n, model.h]
    assert becomes(unchecked(model)) == ["Identity"]


def test_without_affine_maps_a_linear_layer_stays() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x))))
    assert becomes(unchecked(model, affine=False)) == [""]


def test_saved_models_load_with_their_identities_and_not_without_dynorm(tmp_path: Path) -> None:
    given = {"src": torch.randn(2, 5, 32)}
    model = linear_(build("encoder_post"), **given)
    fold_(model, **given)
    dynorm.save(model, tmp_path / "plain")
    loaded = dynorm.load(tmp_path / "plain", build("encoder_post", seed=5))
    assert torch.equal(loaded(**given), model(**given))
    assert sum(map(is_ours, loaded.modules())) == 4
    with pytest.raises(RuntimeError, match="Missing key"):
        build("encoder_post").load_state_dict(model.state_dict())

    import transformers

    model = build("bert")
    linear_(model, **inputs("bert", model))
    fold_(model, **inputs("bert", model))
    model.save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    loaded = transformers.BertModel.from_pretrained(tmp_path / "bert")
    assert (
        relative_error(
            outputs(loaded, inputs("bert", model)), outputs(model, inputs("bert", model))
        )
        <= 1e-6
    )
    assert sum(map(is_ours, loaded.modules())) == 5


def test_a_padded_batch_goes_through_a_folded_encoder() -> None:
    layer = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x, padding = torch.randn(3, 5, C).double(), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    linear_(model, src=x)
    exact = model(x, src_key_padding_mask=padding).detach()
    report = fold_(model, x)
    assert becomes(report) == ["Identity"] * 3 + [""]
    kept = ~padding
    assert (
        relative_error([model(x, src_key_padding_mask=padding)[kept].detach()], [exact[kept]])
        <= 1e-12
    )


def test_a_norm_alone_before_a_layer_takes_its_factor_and_cannot_be_restored() -> None:
    model = net(lambda m, x: m.m(m.n(m.e(x))).relu(), "nm", skip="n")
    for name in ("center", "bias"):
        model.m.register_parameter(name, None)
    dynorm.convert_(model, dynorm.find_norms(model, example()), to="dyisru")
    assert [site.becomes for site in unchecked(model).sites if site.path == "m"] == ["Identity"]
    with pytest.raises(ModelError, match="folded"):
        dynorm.restore_(model)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_folded_model_is_saved_in_its_own_class_whose_norm_computes_the_identity(
    name: str, tmp_path: Path
) -> None:
    import transformers

    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model = build(name).to(dtype)
        given = inputs(name, model)
        dynorm.convert_(model, dynorm.find_norms(model, **given), to="linear", center=False)
        with pytest.raises(
            ModelError,
            match=r"still.*layers",
        ):
            dynorm.hub.as_stock(model, **given)
        coarse = 0.1 if dtype is torch.bfloat16 else None
        fold_(model, untie=True, tolerance=coarse, **given)
        stock = dynorm.hub.as_stock(model, tolerance=coarse or 0.0, **given)
        # A float64 model's own norms round to float32; the check of as_stock widens them.
        assert dtype is torch.float64 or torch.equal(stock(**given).logits, model(**given).logits)
        assert not any(map(is_ours, stock.modules()))
    stock.save_pretrained(tmp_path / "stock")  # type: ignore[operator]
    loaded = getattr(transformers, type(stock).__name__).from_pretrained(tmp_path / "stock")
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    assert "quantization_config" not in (tmp_path / "stock" / "config.json").read_text("utf-8")


def test_a_class_of_layernorms_cannot_hold_a_model_without_them() -> None:
    model = build("bert").double()
    linear_(model, **inputs("bert", model))
    fold_(model, **inputs("bert", model))
    with pytest.raises(ModelError, match=r"LayerNorm.*mean"):
        dynorm.hub.as_stock(model, **inputs("bert", model))


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_writer_is_given_a_bias_of_one_number_per_channel(per_channel: bool) -> None:
    model = net(
        lambda m, x: m.n(m.e(x)).relu(), "", e=nn.Linear(4, C, bias=False), n=nn.LayerNorm(C)
    )
    dynorm.convert_(
        model, dynorm.find_norms(model, example()), to="dyisru", per_channel=per_channel
    )
    with torch.no_grad():
        model.n.center.fill_(0.5)
    assert unchecked(model, add_bias=True).added_biases == ["e"]
    assert model.e.bias.shape == (C,)


def test_where_some_owners_of_a_table_change_all_are_untied_and_loaded(tmp_path: Path) -> None:
    model = linear_(build("bart"), **(given := inputs("bart", build("bart"))))
    report = fold_(model, untie=True, add_bias=True, **given)
    assert set(becomes(report)) == {"Identity"}
    tables = [
        model.model.shared,
        model.model.encoder.embed_tokens,
        model.model.decoder.embed_tokens,
        model.lm_head,
    ]
    assert len({id(table.weight) for table in tables}) == 4
    model.save_pretrained(tmp_path / "bart")
    loaded = type(model).from_pretrained(tmp_path / "bart")
    assert (
        relative_error([loaded(**given).logits.detach()], [model(**given).logits.detach()]) <= 1e-6
    )


def test_with_witnesses_one_number_per_token_stays() -> None:
    layer = dynorm.LinearControl(C, center=True, witnesses=(1, 5))
    model = net(lambda m, x: m.h(m.n(m.e(x))), "", n=layer)
    report = unchecked(model)
    assert (report.sites[0].affine.state, report.sites[0].constants.state) == ("folded", "folded")
    x = torch.randn(5, C, dtype=torch.float64)
    ratio = (model.n(x) / x).detach()
    assert torch.allclose(ratio, ratio[:, :1], 1e-12, 0.0)
    assert ratio[:, 0].std() > 1e-3


def test_one_number_for_all_channels_takes_no_centre() -> None:
    model = net(lambda m, x: m.n(m.e(x) + m.i(x)).relu(), i=nn.Linear(4, 1))
    assert "one number for all channels" in why(unchecked(model))
    assert (model.n.center, model.n.bias) == (None, None)


def test_a_model_that_would_write_into_its_input_stays_as_it_was() -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = m.n(x)
        y += m.b
        return m.g(y)

    model = net(run, "", n=nn.LayerNorm(C), b=nn.Parameter(torch.ones(C)))
    x = torch.randn(5, C, dtype=torch.float64)
    dynorm.convert_(model, dynorm.find_norms(model, x), to="linear", center=False)
    model.n.bias = None
    with pytest.raises(ModelError, match="in place"):
        fold_(model, x)
    before = x.clone()
    model(x)
    assert torch.equal(x, before)


def test_a_folded_model_in_its_own_class_generates_as_before_and_normalizes_nowhere() -> None:
    model = build("llama")
    given = inputs("llama", model)
    dynorm.convert_(model, dynorm.find_norms(model, **given), to="linear", center=False)
    partly = copy.deepcopy(model)
    fold_(model, untie=True, **given)
    model.generation_config.eos_token_id = [2, 5]  # type: ignore[union-attr]
    assert dynorm.hub.as_stock(model, **given).generation_config.eos_token_id == [2, 5]  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="float16"):
        dynorm.hub.as_stock(model.half(), **given)
    dynorm.restore_(partly.model.layers[1])  # type: ignore[arg-type,union-attr,index]
    fold_(partly, untie=True, **given)
    with pytest.raises(ModelError, match=r"'model.layers.1.input_layernorm' is still there"):
        dynorm.hub.as_stock(partly, **given)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_in_place_does_not_write_into_the_stream_in_training(inplace: bool) -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = m.e(x)
        return m.g(m.d(m.n(y))) + y

    model, x = net(run, d=nn.Dropout(0.5, inplace=inplace)), example()
    # What is constant goes past the dropout, which would drop it in training.
    model.n.center = model.n.bias = None

    def trained() -> Tensor:
        torch.manual_seed(1)
        return model.train()(x).detach()  # type: ignore[no-any-return]

    exact = trained()
    report = fold_(model.eval(), x, add_bias=True)
    assert relative_error([trained()], [exact]) <= 1e-12
    assert ("in place" in why(report)) is inplace
