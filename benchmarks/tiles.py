"""Time the Triton kernels with every tile that may suit, next to a copy, torch's norms and cuBLAS.

``python -m benchmarks.tiles`` writes benchmarks/results/tiles.json, after every size. The times are
microseconds of replayed CUDA graphs, in bfloat16; ``host`` has those that a call on few rows takes
the host. A product's outputs are checked before it is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

import dynorm
from benchmarks import gpu
from dynorm import files
from dynorm.kernels import _triton, _triton_product
from dynorm.kernels._form import Form, FunctionCode, Parameters
from dynorm.kernels._triton_product import Tile

RESULTS = Path(__file__).parent / "results" / "tiles.json"
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
FORM = Form(FunctionCode.DYISRU, True, 1.0)
# Elements per program.
FORWARD = (1024, 2048, 4096)
# Rows, columns, and programs on each multiprocessor.
BACKWARD = ((4, 256, 4), (4, 256, 6), (8, 256, 2), (8, 256, 3), (4, 512, 3))
# Rows, columns, depth, warps and stages: for many rows, for at most 64, and for at most 16.
MANY = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 2),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 5),
)
FEW = (
    (64, 32, 128, 4, 4),
    (64, 16, 256, 4, 3),
    (64, 16, 128, 4, 5),
    (64, 32, 256, 4, 3),
)
ONE = (
    (16, 16, 256, 4, 3),
    (16, 16, 512, 4, 3),
    (16, 32, 128, 4, 5),
    (16, 32, 256, 4, 4),
    (16, 32, 256, 4, 3),
)
# With more elements only one program fits on a multiprocessor.
SHARED = 128 * 128
# The two products of a block that write the residual stream: rows, columns and depth.
SHAPES = {
    "ViT-B, 128 images": ((25216, 768, 768), (25216, 768, 3072)),
    "Llama, 8,192 tokens": ((8192, 2048, 2048), (8192, 2048, 5632)),
    "BERT-base, 8,192 tokens": ((8192, 768, 768), (8192, 768, 3072)),
    "MiniLM, 8,192 tokens": ((8192, 384, 384), (8192, 384, 1536)),
    "Llama, 2,048 tokens": ((2048, 2048, 2048),),
    "Llama, 512 tokens": ((512, 2048, 2048),),
    "Llama, 1 token": ((1, 2048, 2048), (1, 2048, 5632)),
    "Llama, 16 tokens": ((16, 2048, 2048), (16, 2048, 5632)),
    "Llama, 64 tokens": ((64, 2048, 2048),),
}
# The largest error of a product in bfloat16, as a share of its size.
MOST_WRONG = 0.01


def main() -> None:
    """Measure, and write the file after every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpu.require_gpu("benchmarks.tiles")
    files.require_writable(options.out, overwrite=True)
    result: dict[str, Any] = {"device": gpu.describe_device(), "host": measure_host(), "rows": []}
    for row in rows():
        result["rows"].append(row)
        files.write_text(options.out, json.dumps(result, indent=1) + "\n")
        print(json.dumps(row), flush=True)


def rows() -> Iterator[dict[str, Any]]:
    """Yield the times of each kernel at each size, by tile; ``chosen`` is the tile that the code takes."""
    for size in gpu.SIZES:
        yield {"kernel": "forward", "size": size, **measure_forward(*size)}
    for size in gpu.SIZES[:2]:
        yield {"kernel": "backward", "size": size, **measure_backward(*size)}
    for model, shapes in SHAPES.items():
        for shape in shapes:
            yield {"kernel": "product", "model": model, "size": shape, **measure_product(*shape)}


def measure_host() -> dict[str, dict[str, float]]:
    """Return the microseconds of the host for layers on few rows, and for a product."""
    columns, width = 768, 2048
    x = torch.randn(gpu.HOST_ROWS, columns, **OPTIONS).requires_grad_()
    grad = torch.randn_like(x)
    calls: dict[str, dict[str, gpu.Contender]] = {"forward": {}, "forward and backward": {}}
    for name, kind in (
        ("DyISRU", dynorm.DyISRU),
        ("RMSNorm", nn.RMSNorm),
        ("LayerNorm", nn.LayerNorm),
    ):
        module = kind(columns).to(**OPTIONS)
        calls["forward"][name] = gpu.without_gradient(module, x.detach())
        calls["forward and backward"][name] = gpu.with_gradient(module, x, grad)
    product = Product(gpu.HOST_ROWS, width, width)
    calls["product"] = {"with residual": product.with_residual, "fused": product.fused}
    times: dict[str, dict[str, float]] = {}
    for title, group in calls.items():
        times[title] = {name: round(1e3 * gpu.host_time(call), 2) for name, call in group.items()}
    return times


def measure_forward(rows: int, columns: int) -> dict[str, Any]:
    """Time a copy, torch's norms and the forward kernel."""
    x, _, parameters = layer_tensors(rows, columns)
    y = torch.empty_like(x)
    times = {"copy": microseconds(lambda: y.copy_(x))}
    for kind in (nn.RMSNorm, nn.LayerNorm):
        norm = gpu.without_gradient(kind(columns, **OPTIONS), x)
        times[kind.__name__] = microseconds(norm)
    for elements in FORWARD:
        with mock.patch.object(_triton, "_TILE", elements):
            times[str(elements)] = microseconds(lambda: _triton.forward(FORM, x, parameters, out=y))
    return {"chosen": str(_triton._TILE), "microseconds": times}


def measure_backward(rows: int, columns: int) -> dict[str, Any]:
    """Time the kernels of a backward pass with all gradients."""
    x, grad, parameters = layer_tensors(rows, columns)
    times = {}
    for *tile, programs in BACKWARD:
        with (
            mock.patch.object(_triton, "tile", return_value=tile),
            mock.patch.object(_triton, "_RESIDENT", programs),
        ):
            times[named(*tile, programs)] = microseconds(
                lambda: _triton.gradients(FORM, grad, x, parameters, None, (True,) * 6)
            )
    chosen = named(*_triton.tile(columns), _triton._RESIDENT)
    return {"chosen": chosen, "microseconds": times}


def measure_product(rows: int, columns: int, depth: int) -> dict[str, Any]:
    """Time cuBLAS, the product with a residual and an RMSNorm that follows, and the fused product."""
    product = Product(rows, columns, depth)
    # Else torch compiles for any number of rows from the second size on.
    torch.compiler.reset()
    times = {
        "cuBLAS": microseconds(product.alone),
        "with residual": microseconds(product.with_residual),
        "with residual and RMSNorm": microseconds(product.normed),
        "compiled": microseconds(torch.compile(product.unfused, dynamic=False)),
    }
    for sizes in candidates(rows):
        for programs in (1, 2):
            tile = Tile(*sizes)._replace(programs=programs)
            if programs > 1 and tile.rows * tile.columns > SHARED:
                continue
            with mock.patch.object(_triton_product, "tile_for", return_value=tile):
                try:
                    product.check()
                    times[named(*sizes, programs)] = microseconds(product.fused)
                except OutOfResources as error:
                    print(f"{tile} does not fit: {error}", flush=True)
    chosen = _triton_product.tile_for(rows, columns, product.x.device)
    return {"chosen": named(*chosen[:6]), "microseconds": times}


def candidates(rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the tiles of products with a number of rows."""
    if rows <= 16:
        return ONE
    if rows <= 64:
        return FEW
    return MANY


class Product:
    """The tensors of a product with its residual, and what is computed from them."""

    def __init__(self, rows: int, columns: int, depth: int) -> None:
        self.x = torch.randn(rows, depth, **OPTIONS)
        self.weight: Tensor = torch.randn(columns, depth, **OPTIONS) / depth**0.5
        self.residual = torch.randn(rows, columns, **OPTIONS)
        self.ones = torch.ones(columns, **OPTIONS)
        bias = torch.zeros(columns, **OPTIONS)
        self.parameters = Parameters(torch.ones(1, **OPTIONS), weight=self.ones, bias=bias)
        self.total = torch.empty_like(self.residual)
        self.y = torch.empty_like(self.residual)

    def alone(self) -> Tensor:
        """Return the product."""
        return self.x @ self.weight.t()

    def with_residual(self) -> Tensor:
        """Return the product with its residual, in one call."""
        return torch.addmm(self.residual, self.x, self.weight.t())

    def normed(self) -> tuple[Tensor, Tensor]:
        """Return the same and its RMSNorm, in two calls."""
        total = self.with_residual()
        return total, F.rms_norm(total, self.ones.shape, self.ones)

    def unfused(self) -> tuple[Tensor, Tensor]:
        """Return the same, for a compiler."""
        total = self.x @ self.weight.t() + self.residual
        return total, F.rms_norm(total, self.ones.shape, self.ones)

    def fused(self) -> None:
        """Write the product with its residual, and DyISRU of it."""
        pointers = (None, None, self.residual)
        _triton_product.product(
            *(self.x, self.weight, False, pointers, self.parameters, FORM, self.total, self.y)
        )

    def check(self) -> None:
        """Compare the outputs of the fused product with the definition."""
        self.fused()
        total = self.x.float() @ self.weight.float().t() + self.residual.float()
        parameters = [None if number is None else number.float() for number in self.parameters]
        y = FORM.definition(self.total.float(), parameters)
        for found, expected in ((self.total, total), (self.y, y)):
            wrong = float((found.float() - expected).norm() / expected.norm())
            assert wrong <= MOST_WRONG, f"the fused product is off by {wrong:.3f} of its size"


def layer_tensors(rows: int, columns: int) -> tuple[Tensor, Tensor, Parameters]:
    """Return an input, the gradient of the output and the parameters of a layer."""
    x, grad = torch.randn(2, rows, columns, **OPTIONS)
    weight, bias = torch.randn(2, columns, **OPTIONS)
    return x, grad, Parameters(torch.full((1,), 0.7, **OPTIONS), weight=weight, bias=bias)


def named(*numbers: int) -> str:
    """Return the name of a tile: its sizes, for a product its warps and stages, and its programs."""
    return " x ".join(str(number) for number in numbers)


def microseconds(call: gpu.Contender) -> float:
    """Return the time of a call in a replayed CUDA graph."""
    return round(1e3 * gpu.device_time(call), 2)


if __name__ == "__main__":
    main()
