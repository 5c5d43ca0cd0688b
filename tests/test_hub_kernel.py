"""The kernel repository for the hub: it loads from any place, without dynorm, and is right."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import dynorm
from tests.fresh import run

SCRIPT = """
import importlib.util, json, os, sys, warnings
warnings.simplefilter("error")
sys.modules["dynorm"] = None
import torch
folder, interpreted = sys.argv[1:]
if interpreted == "1":
    os.environ["TRITON_INTERPRET"] = "1"
# As kernels does: by its path, under a name of its own.
spec = importlib.util.spec_from_file_location(
    "kernel_1", folder + "/__init__.py", submodule_search_locations=[folder]
)
kernel = importlib.util.module_from_spec(spec)
sys.modules["kernel_1"] = kernel
spec.loader.exec_module(kernel)
torch.manual_seed(0)
x = 3 * torch.randn(4, 32)
results = []
for kind in (kernel.DyISRU, kernel.DyT, kernel.Derf, kernel.LinearControl):
    layer = kind(32)
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    y.sin().sum().backward()
    fused = None
    if interpreted == "1":
        from kernel_1.kernels import Form, Parameters, _triton
        form = Form(kind.kernel, kind.logarithmic, layer.scale)
        parameters = Parameters(layer.first_constant, None, layer.weight, layer.bias)
        fused = _triton.forward(form, x, parameters).tolist()
    results.append([y.tolist(), inputs.grad.tolist(), fused])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(__file__).parents[1] / "tools" / "hub_kernel.py"
    spec = importlib.util.spec_from_file_location("hub_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = tmp_path_factory.mktemp("kernel") / "repository"
    folder.mkdir()
    tool.write(folder)
    return folder


def test_the_layers_compute_the_same_without_dynorm(repository: Path) -> None:
    interpreted = "0" if importlib.util.find_spec("triton") is None else "1"
    layers = repository / "torch-ext" / "dynorm_kernels"
    results = json.loads(run(SCRIPT, layers, interpreted, imported="torch"))
    torch.manual_seed(0)
    x = 3 * torch.randn(4, 32)
    kinds = (dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl)
    for (y, gradient, fused), kind in zip(results, kinds, strict=True):
        inputs = x.clone().requires_grad_()
        expected = kind(32)(inputs)
        expected.sin().sum().backward()
        torch.testing.assert_close(torch.tensor(y), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(gradient), inputs.grad, rtol=1e-4, atol=1e-4)
        if interpreted == "1":
            # The kernels of a GPU, in Triton's interpreter.
            y = torch.tensor(fused)
            torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-5)


def test_the_code_imports_torch_and_itself_only(repository: Path) -> None:
    files = list((repository / "torch-ext").rglob("*.py"))
    assert len(files) > 15
    for file in files:
        assert not re.search(r"^\s*(from|import) dynorm", file.read_text(), re.MULTILINE), file
        assert "dynorm.kernels._build" not in file.read_text()


def test_the_build_file_names_a_kernel_without_compiled_parts(repository: Path) -> None:
    build = tomllib.loads((repository / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == "dynorm_kernels"
    assert build["torch-noarch"] == {}
    assert (repository / "flake.nix").is_file()
