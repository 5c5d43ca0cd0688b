"""Compare the speed of the layers with torch's norms on a CPU: ``python -m benchmarks.speed``.

Every output and gradient is first compared with the definition in float64; a wrong one ends the
run before anything is timed. The results are benchmarks/results/speed.json and
docs/images/speed.png. ``--quick`` takes a minute and writes nothing.
"""

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

import dynorm
from benchmarks.timing import machine, measure, ratio
from dynorm import functional
from dynorm.jobs import load_pretrained
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.json"
PICTURE = ROOT / "docs" / "images" / "speed.png"
# Rows and channels.
SIZES = ((16, 384), (128, 768), (512, 768), (2048, 1024), (8192, 1024), (8192, 4096))
QUICK = ((16, 384), (512, 768))
# Allowed errors, relative to 1 + |value|: the plain formulas round after every operation.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-5}
ROUNDS = 21
QUICK_ROUNDS = 7
# The layers of a whole model, and their witnesses.
WITNESSES = {"DyISRU": 0, "DyISRU, 4 witnesses": 4}
COLOURS = {"DyISRU": "#1f77b4", "DyT": "#d95f02", "Derf": "#2ca02c", "RMSNorm": "#8a8a8a"}
Row = dict[str, Any]


class DyTFormula(nn.Module):
    """``weight * tanh(alpha * x) + bias``, one operation of torch at a time (arXiv 2503.10622)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of x."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


CONTENDERS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "DyISRU": dynorm.DyISRU,
    "DyT": partial(dynorm.DyT, scale=1.0),
    "Derf": partial(dynorm.Derf, scale=1.0),
    "DyT, its formula in torch": DyTFormula,
}
"""The modules that compete, by name."""


def defined(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a module by the definition of its function."""
    weight = module.weight
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, weight, module.bias, module.eps)
    if isinstance(module, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        return functional.rms_norm(x, weight, None, eps)
    if isinstance(module, dynorm.DyISRU):
        return functional.dyisru(x, module.beta(), weight, module.bias, scale=module.scale)
    if isinstance(module, dynorm.Derf):
        return functional.derf(x, module.alpha, module.shift, weight, module.bias)
    return functional.dyt(x, module.alpha, weight, module.bias)


def check(module: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Compare output and gradients with the definition in float64, or exit."""
    tolerance = TOLERANCES[x.dtype]
    exact = copy.deepcopy(module).double()
    exact_x = x.detach().double().requires_grad_()
    expected = defined(exact, exact_x)
    expected.backward(grad.double())
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(grad)
    pairs = {"output": (y, expected, 1.0), "gradient of x": (leaf.grad, exact_x.grad, 1.0)}
    for (name, parameter), exact_parameter in zip(
        module.named_parameters(), exact.parameters(), strict=True
    ):
        # Terms of both signs: n of them add up to about sqrt(n), and torch sums those of LayerNorm
        # in the dtype itself.
        terms = x.numel() / parameter.numel()
        size = terms if isinstance(module, nn.LayerNorm) else math.sqrt(terms)
        pairs[f"gradient of {name}"] = (parameter.grad, exact_parameter.grad, size)
    for what, (result, reference, size) in pairs.items():
        result, reference = result.detach(), reference.detach()
        error = ((result.double() - reference).abs() / (size + reference.abs())).max()
        # A negated comparison also refuses NaN.
        if not float(error) <= tolerance:
            sys.exit(f"{module}: the {what} is off by {float(error):.2g}; nothing was timed")
    module.zero_grad()


def operations(size: tuple[int, int], dtype: torch.dtype, rounds: int) -> list[Row]:
    """Check and time all contenders on one input: forward without a gradient, and with backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).to(dtype)
    grad = torch.randn(size, generator=generator).to(dtype)
    leaf = x.detach().requires_grad_()
    modules = {name: make(size[1]).to(dtype) for name, make in CONTENDERS.items()}
    for module in modules.values():
        check(module, x, grad)

    def forward(module: nn.Module) -> None:
        with torch.no_grad():
            module(x)

    def both(module: nn.Module) -> None:
        leaf.grad = None
        module.zero_grad()
        module(leaf).backward(grad)

    rows = []
    for name, run in (("forward", forward), ("forward and backward", both)):
        calls = {contender: partial(run, module) for contender, module in modules.items()}
        # The least that memory allows: a copy reads one tensor and writes one.
        calls["copy"] = partial(torch.clone, x)
        times = measure(calls, rounds)
        rows.append(
            {
                "size": list(size),
                "dtype": str(dtype).removeprefix("torch."),
                "pass": name,
                "microseconds": {n: rounded(1e6, t) for n, t in times.items()},
                "as_fast_as_layer_norm": {n: ratio(times["LayerNorm"], times[n]) for n in times},
            }
        )
    return rows


def whole_model(texts: int, tokens: int, rounds: int) -> Row:
    """Time all-MiniLM-L6-v2 with its norms, with layers, strict and not, and with identities, the limit."""
    original = load_pretrained(folder()).model.eval()
    ids = torch.randint(1000, (texts, tokens), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    sites = dynorm.find_norms(original, **inputs)
    models = {"norms": original}
    for name, witnesses in WITNESSES.items():
        models[name] = copy.deepcopy(original)
        dynorm.convert_(models[name], sites, witnesses=witnesses)
        dynorm.calibrate_(models[name], [inputs])
    models["identities"] = copy.deepcopy(original)
    for site in sites:
        models["identities"].set_submodule(site.path, nn.Identity())
    with torch.no_grad():
        for name in WITNESSES:
            output = models[name](**inputs).last_hidden_state
            # Under a mode the layers are computed by the definition.
            with BaseTorchFunctionMode():
                expected = models[name](**inputs).last_hidden_state
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
        times = measure({name: partial(m, **inputs) for name, m in models.items()}, rounds)
    return {
        "model": "all-MiniLM-L6-v2",
        "input": f"{texts} x {tokens} tokens",
        "milliseconds": {name: rounded(1e3, t) for name, t in times.items()},
        "over_identities": {n: ratio(times[n], times["identities"]) for n in ("norms", *WITNESSES)},
    }


def rounded(unit: float, times: list[float]) -> float:
    """Return the median of some seconds in another unit."""
    return float(f"{unit * statistics.median(times):.4g}")


def draw(document: Row) -> Figure:
    """Draw how many times as fast as LayerNorm each layer is, by size, in float32."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, 2, sharey=True), ("forward", "forward and backward"), strict=True
    ):
        rows = []
        for row in document["operations"]:
            if row["pass"] == name and row["dtype"] == "float32":
                rows.append(row)
        axes.axhline(1, color="#111111", lw=1.2, label="LayerNorm")
        for contender, colour in COLOURS.items():
            medians = [row["as_fast_as_layer_norm"][contender][0] for row in rows]
            axes.plot(range(len(rows)), medians, "o-", color=colour, ms=4, label=contender)
        sizes = ["{}\n× {}".format(*row["size"]) for row in rows]
        axes.set_xticks(range(len(rows)), sizes, fontsize=8)
        axes.set(title=f"{name}, float32", yscale="log")
        axes.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.grid(axis="y", color="#e4e4e4", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if name == "forward":
            axes.set_ylabel("times as fast as torch's LayerNorm")
            figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Check, measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes and few rounds")
    parser.add_argument("--out", type=Path, help="another file for the results")
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    document: Row = {
        "command": "python -m benchmarks.speed",
        "machine": machine(),
        "rounds": rounds,
        "operations": [],
        "models": [],
    }
    for size in QUICK if options.quick else SIZES:
        for dtype in TOLERANCES:
            for row in operations(size, dtype, rounds):
                document["operations"].append(row)
                print(json.dumps(row), flush=True)
    for texts, tokens in ((1, 32), (8, 128)):
        row = whole_model(texts, tokens, rounds)
        document["models"].append(row)
        print(json.dumps(row), flush=True)
    out = options.out
    if not options.quick:
        out = out or RESULTS
        draw(document).savefig(PICTURE, dpi=110, metadata={"Software": None})
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
