"""Layers and verbs on a GPU, against the same on the CPU; skipped where there is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")

from transformers import BertModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import dynorm
from dynorm.cli import main
from dynorm.replace.converted import dynorm_layers
from tests.jobs.conftest import TEXTS, save, tiny_bert

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

FAMILY: list[Callable[..., nn.Module]] = [
    dynorm.DyISRU,
    dynorm.DyT,
    dynorm.Derf,
    dynorm.LinearControl,
]
WITNESSES = [(), (0, 7, 39)]


def layer_of(make: Callable[..., nn.Module], witnesses: tuple[int, ...]) -> nn.Module:
    """Return a layer of 40 channels in float64 whose parameters are random."""
    layer = make(40, witnesses=witnesses).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    return layer


def values_and_gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return y and the gradients of x and of all parameters, on the CPU."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    return [tensor.detach().cpu() for tensor in (y, *gradients)]


def test_triton_computes_the_layers() -> None:
    assert dynorm.kernels.backend(DEVICE) == "triton"


@pytest.mark.parametrize(
    ("make", "witnesses"), [*((make, ()) for make in FAMILY), (dynorm.DyISRU, WITNESSES[1])]
)
def test_a_layer_is_the_same_on_both_devices(
    make: Callable[..., nn.Module], witnesses: tuple[int, ...]
) -> None:
    layer = layer_of(make, witnesses)
    x, grad = torch.randn(2, 33, 40).double(), torch.randn(2, 33, 40).double()
    expected = values_and_gradients(layer, x, grad)
    found = values_and_gradients(layer.to(DEVICE), x.to(DEVICE), grad.to(DEVICE))
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("witnesses", WITNESSES, ids=len)
def test_second_derivatives(witnesses: tuple[int, ...]) -> None:
    layer = layer_of(dynorm.DyISRU, witnesses).to(DEVICE)
    x = torch.randn(3, 40, device=DEVICE, dtype=torch.float64, requires_grad=True)
    # Sums of the definition's gradients over equal channels are atomic, and so of any order.
    assert torch.autograd.gradgradcheck(layer, x, nondet_tol=1e-10)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("witnesses", WITNESSES, ids=len)
def test_compiled_layers_are_the_eager_ones(witnesses: tuple[int, ...]) -> None:
    layer = layer_of(dynorm.DyISRU, witnesses).float().to(DEVICE)
    x, grad = torch.randn(65, 40, device=DEVICE), torch.randn(65, 40, device=DEVICE)
    expected = values_and_gradients(layer, x, grad)
    found = values_and_gradients(torch.compile(layer), x, grad)
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("witnesses", WITNESSES, ids=len)
def test_a_layer_in_a_graph_of_cuda(witnesses: tuple[int, ...]) -> None:
    layer = layer_of(dynorm.DyISRU, witnesses).float().to(DEVICE).requires_grad_(False)
    x = torch.randn(65, 40, device=DEVICE)
    # Warmed up on another stream, as torch asks for.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(65, 40))
    graph.replay()
    assert_close(y, layer(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 16, 50, 3000])
def test_a_product_with_its_layer_and_their_gradients(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynorm.kernels import _triton_product

    launches = []

    def counted(*arguments: Any) -> None:
        launches.append(len(arguments))
        original(*arguments)

    original = _triton_product.product
    monkeypatch.setattr(_triton_product, "product", counted)
    linear, layer = nn.Linear(136, 264), dynorm.DyISRU(264)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = linear(x) + residual
        return layer(total), total

    inputs = torch.randn(rows, 136), torch.randn(rows, 264)
    leaves = [*linear.parameters(), *layer.parameters()]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        linear.to(DEVICE, dtype)
        layer.to(DEVICE, dtype)
        called: Any = block
        if dtype == torch.bfloat16:
            called = torch.compile(block, options=dynorm.compile_options(), fullgraph=True)
        x, residual = (tensor.to(DEVICE, dtype).requires_grad_() for tensor in inputs)
        y, total = called(x, residual)
        loss = y.square().sum() + total.square().sum()
        results.append([y, total, *torch.autograd.grad(loss, [x, residual, *leaves])])
    assert len(launches) == 1
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, rtol=0.05, atol=0.05 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = layer_of(dynorm.DyISRU, (0, 7, 39)).float().to(DEVICE)
    x = torch.randn(65, 40, device=DEVICE, dtype=dtype)
    with torch.autocast(DEVICE, dtype):
        y = layer(x)
    assert_close(y.float(), layer(x.float()).float(), rtol=2e-2, atol=2e-2)


def encoder_of_images() -> ViTModel:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=16,
        patch_size=4,
    )
    return ViTModel(config, add_pooling_layer=False).eval()


def decoder() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def blocks(count: int, seed: int) -> Tensor:
    """Return blocks of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 200, (count, 32), generator=generator)


def encoder_of_texts() -> BertModel:
    torch.manual_seed(0)
    return BertModel(tiny_bert(), add_pooling_layer=False).eval()


def of_images(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(16, 3, 16, 16, generator=generator)} for _ in range(4)]


def of_tokens(seed: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens} for tokens in blocks(64, seed).split(16)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[dict[str, Tensor]]]]] = {
    "decoder": (decoder, of_tokens),
    "encoder of texts": (encoder_of_texts, of_tokens),
    "encoder of images": (encoder_of_images, of_images),
}


def moved(batches: list[dict[str, Tensor]], device: str) -> list[dict[str, Tensor]]:
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


def loss_of(report: Any) -> float:
    """Return a language model's divergence, or how far the cosine of another is from 1."""
    if report.output.kl is not None:
        return float(report.output.kl)
    return 1 - float(report.output.cosine_mean)


def errors_of(report: Any) -> list[float]:
    """Return the error of each site, and what the outputs lost."""
    return [*(site.error_now for site in report.sites), loss_of(report)]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_converted_as_on_the_cpu(kind: str) -> None:
    make, batches = MODELS[kind]
    reports = []
    for device in ("cpu", DEVICE):
        reports.append(
            dynorm.convert_model(
                make().to(device),
                moved(batches(0), device),
                held_out=moved(batches(1), device),
                steps=0,
            )
        )
    assert len(reports[0].sites) == len(reports[1].sites)
    for got, want in zip(errors_of(reports[1]), errors_of(reports[0]), strict=True):
        assert got == pytest.approx(want, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_distillation_does_no_harm(kind: str) -> None:
    make, batches = MODELS[kind]
    fit, held_out = moved(batches(0), DEVICE), moved(batches(1), DEVICE)
    original = make().to(DEVICE)
    errors = []
    for steps in (0, 20):
        model = copy.deepcopy(original)
        report = dynorm.convert_model(model, fit, held_out=held_out, witnesses=2, steps=steps)
        errors.append(loss_of(report))
    assert errors[1] <= 1.02 * errors[0]


@pytest.mark.parametrize("kind", MODELS)
def test_batches_may_stay_on_the_cpu(kind: str) -> None:
    make, batches = MODELS[kind]
    losses = []
    for device in ("cpu", DEVICE):
        report = dynorm.convert_model(
            make().to(DEVICE),
            moved(batches(0), device),
            held_out=moved(batches(1), device),
            steps=20,
        )
        losses.append(loss_of(report))
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=1e-5)


@pytest.mark.parametrize("options", [{"to": "derf"}, {"witnesses": 3}])
def test_a_model_in_bfloat16(options: dict[str, Any]) -> None:
    make, batches = MODELS["decoder"]
    fit, held_out = moved(batches(0), DEVICE), moved(batches(1), DEVICE)
    model = make().to(DEVICE, torch.bfloat16)
    report = dynorm.convert_model(model, fit, held_out=held_out, steps=0, **options)
    assert report.output.kl < 3
    assert next(model.parameters()).dtype == torch.bfloat16


def test_annealing() -> None:
    make, batches = MODELS["encoder of images"]
    fit = moved(batches(0), DEVICE)
    model = make().to(DEVICE)
    expected = model(**fit[0]).last_hidden_state
    dynorm.convert_(model, dynorm.find_norms(model, fit[0]), to="annealed")
    assert_close(model(**fit[0]).last_hidden_state, expected, rtol=0, atol=1e-5)
    dynorm.calibrate_(model, fit)
    dynorm.set_anneal_(model, 1.0)
    annealed = model(**fit[0]).last_hidden_state
    dynorm.finalize_(model)
    assert_close(model(**fit[0]).last_hidden_state, annealed, rtol=1e-5, atol=1e-5)


def test_an_inspection_and_first_constants() -> None:
    make, batches = MODELS["encoder of images"]
    errors = []
    for device in ("cpu", DEVICE):
        report = dynorm.inspect_norms(make().to(device), moved(batches(0), device))
        errors.append([site.core.errors["dyisru"] for site in report.sites])
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    fit = moved(batches(0), DEVICE)
    model = make().to(DEVICE)
    dynorm.convert_(model, dynorm.find_norms(model, fit[0]))
    assert len(dynorm.init_from_batch_(model, fit[0]).beta) == len(dynorm_layers(model))


def test_a_fold_leaves_the_outputs() -> None:
    model = encoder_of_images().double().to(DEVICE)
    (batch,) = moved([{"pixel_values": of_images(0)[0]["pixel_values"].double()}], DEVICE)
    expected = model(**batch).last_hidden_state
    result = dynorm.fold_(model, batch)
    assert result.count("affine") > 0
    assert_close(model(**batch).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


def test_a_monitor_of_a_model_on_a_gpu() -> None:
    model = decoder().to(DEVICE)
    dynorm.convert_model(model, moved(of_tokens(0), DEVICE), steps=0)
    model.train()
    with dynorm.Monitor(model) as monitor:
        model(blocks(4, 2).to(DEVICE)).logits.square().mean().backward()
        numbers = monitor.read()
    for path in dynorm_layers(model):
        assert any(path in name for name in numbers)


def test_a_model_is_loaded_on_a_gpu(tmp_path: Path) -> None:
    model = decoder().to(DEVICE)
    dynorm.convert_model(model, moved(of_tokens(0), DEVICE), steps=0)
    tokens = blocks(4, 2).to(DEVICE)
    expected = model(tokens).logits
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model").to(DEVICE)
    assert isinstance(loaded, LlamaForCausalLM)
    assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(encoder_of_texts(), tmp_path / "tiny-bert")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(TEXTS), "utf-8")
    out = tmp_path / "out"
    arguments = ["convert", str(folder), str(out), "--texts", str(texts), "--device", DEVICE]
    arguments += ["--bf16", "--steps", "20", "--held-out", "24"]
    monkeypatch.setattr("sys.argv", ["dynorm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    report = json.loads((out / "report.json").read_text("utf-8"))
    assert report["output"]["cosine_mean"] > 0.5
    dynorm.load(out / "model")
