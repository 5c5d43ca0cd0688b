"""torch.export and AOTInductor: exported, saved, loaded and run where dynorm is not imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.testing import assert_close

import dynorm
from benchmarks.compiled import converted, first, inputs, tiny_model
from tests.export.fresh import run_fresh

pytest.importorskip("transformers")
LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl]
TEXT = ["bert", "gpt2"]
SHAPES = [(3, 13), (1, 2), (7, 64)]
# torch.export's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
    # Strict export sees transformers collect outputs in a global variable.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
    # torch's too: importing Inductor warns.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

LOAD = """
import sys, torch
for saved in sys.argv[1:]:
    aoti, folder = saved.endswith("aoti.pt2"), saved.rpartition("/")[0]
    function = torch._inductor.aoti_load_package(saved) if aoti else torch.export.load(saved).module()
    with torch.no_grad():
        found = [function(**example) for example in torch.load(folder + "/examples.pt")]
    torch.save([y if isinstance(y, torch.Tensor) else y[0] for y in found], saved + ".results")
print("dynorm" in sys.modules, "transformers" in sys.modules)
"""


class Layers(nn.Module):
    """Layers of one input, so that one graph or package holds all of them."""

    def __init__(
        self, classes: list[type[dynorm.layers.PointwiseNorm]], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cls(6, center=True, dtype=dtype) for cls in classes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.2, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


def exported(
    model: nn.Module, example: dict[str, Tensor], *, strict: bool = False
) -> ExportedProgram:
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
    return torch.export.export(model, (), kwargs=example, dynamic_shapes=shapes, strict=strict)


class Both(nn.Module):
    """The layers beside GPT-2, so that each is exported twice and packaged once: half of the test's time is g++'s."""

    def __init__(self, layers: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.layers, self.model = layers, model

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return torch.cat(
            [self.layers(x).flatten(), first(self.model(input_ids=input_ids)).flatten()]
        )


def model_and_examples(kind: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model, and examples of several shapes, the first to trace with."""
    examples = [inputs(kind, *shape) for shape in [(2, 8), *SHAPES]]
    model = converted(tiny_model(kind), examples[0])
    if kind != "gpt2":
        return model, examples
    # Pure ones, and all with witnesses, whose channels are large.
    layers = Layers([*LAYERS[:3], *LAYERS]).eval()
    for layer in layers.layers[3:]:
        layer.set_witnesses_((4, 1), (0.3, 2.0))
    sizes = torch.tensor([1.0, 30, 1, 1, 9, 1])
    return Both(layers, model), [
        {"x": sizes * torch.randn(*e["input_ids"].shape, 6), **e} for e in examples
    ]


@pytest.mark.slow
def test_save_load_run_in_a_fresh_process(tmp_path: Path) -> None:
    """Exported, strictly and not, and packaged by AOTInductor; one process loads all of them."""
    expected: dict[Path, list[Tensor]] = {}
    for kind in TEXT:
        model, examples = model_and_examples(kind)
        folder = tmp_path / kind
        folder.mkdir()
        program = exported(model, examples[0])
        torch.export.save(program, folder / "non-strict.pt2")
        torch.export.save(exported(model, examples[0], strict=True), folder / "strict.pt2")
        if kind != "bert":
            torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "aoti.pt2"))
        torch.save(examples, folder / "examples.pt")
        with torch.no_grad():
            results = [first(model(**example)) for example in examples]
        expected |= dict.fromkeys(folder.glob("*.pt2"), results)
    said = run_fresh(LOAD, *expected)
    assert said.split() == ["False", "False"]
    assert len(expected) == 5
    for path, results in expected.items():
        for got, result in zip(torch.load(f"{path}.results"), results, strict=True):
            assert_close(got, result, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_export_of_the_other_models(kind: str) -> None:
    example = inputs(kind, 2, 8)
    model = converted(tiny_model(kind), example)
    shapes = {
        name: {0: Dim.DYNAMIC} if kind == "vit" else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        for name in example
    }
    program = torch.export.export(model, (), kwargs=example, dynamic_shapes=shapes)
    assert not [name for name in targets(program) if "norm" in name]
    other = inputs(kind, 5, 17)
    with torch.no_grad():
        assert_close(first(program.module()(**other)), first(model(**other)), rtol=1e-5, atol=1e-5)


def targets(program: ExportedProgram) -> list[str]:
    return [
        str(node.target)
        for node in program.run_decompositions().graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_layer_reduces_nothing_in_any_dtype(dtype: torch.dtype) -> None:
    layers = Layers(LAYERS, dtype)
    x = torch.randn(3, 5, 6, dtype=dtype)
    program = exported(layers, {"x": x})
    words = ("sum", "mean", "var", "norm", "amax", "bmm", "mm.")
    assert not [name for name in targets(program) if any(word in name for word in words)]
    other = torch.randn(1, 9, 6, dtype=dtype)
    assert_close(program.module()(x=other), layers(other))


@pytest.mark.parametrize("state", ["program", "module", "unflattened"])
def test_an_exported_model_is_refused_clearly(state: str) -> None:
    model, example = Layers(LAYERS[:3]).eval(), {"x": torch.randn(2, 8, 6)}
    program: Any = exported(model, example)
    given = {
        "program": lambda: program,
        "module": program.module,
        "unflattened": lambda: torch.export.unflatten(program),
    }
    surgery: list[Callable[[Any], Any]] = [
        lambda it: dynorm.find_norms(it, **example),
        lambda it: dynorm.convert_(it, []),
        lambda it: dynorm.calibrate_(it, [example]),
    ]
    for call in surgery:
        with pytest.raises(dynorm.errors.ModelError, match=r"exported.*module"):
            call(given[state]())
