"""Compare norms on a model of yours: LayerNorm, RMSNorm, DyISRU, DyT and Derf, each at several learning rates.

    python examples/compare_norms.py --model my_module:build --data input.txt --out norms.png

``build(norm)`` returns a fresh language model that makes each of its norms by ``norm(width)``. If ``build`` takes no
argument, the norms of its model are found, and compared with the layers that replace them. The model maps integers
(B, T) to logits (B, T, vocabulary), as a tensor, as the first of a tuple (nanoGPT), or in ``.logits`` (transformers).
The data is a file of bytes, or a ``.bin`` file of 16-bit tokens.

Runs with the same seed begin with the same weights and see the same batches. Without options a small model learns the
bytes of torch's Python sources, for a few steps only.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dynorm
from dynorm.errors import require_library

Norm = Callable[[int], nn.Module]
Build = Callable[..., nn.Module]
OWN = "its own"
NORMS: dict[str, Norm] = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "DyISRU": dynorm.DyISRU,
    "DyT": dynorm.DyT,
    "Derf": dynorm.Derf,
    "DyT, published": lambda width: dynorm.DyT(width, scale=1),
}
# The held-out loss is measured so often in a run.
MEASUREMENTS = 10


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, norm: Norm, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = norm(width)
        self.norm2 = norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, then channels."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class SmallModel(nn.Module):
    """The model without ``--model``: a language model of bytes."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 64)
        self.positions = nn.Embedding(256, 64)
        self.blocks = nn.Sequential(Block(norm, 64, 4), Block(norm, 64, 4))
        self.norm = norm(64)
        self.head = nn.Linear(64, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (B, T, 256)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.bytes(ids) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


@dataclass
class Run:
    """The course of a training: held-out losses in nats, and steps and seconds of training before each."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class Data:
    """Integers to train on, and the last tenth to measure on."""

    def __init__(self, path: Path | None, options: argparse.Namespace) -> None:
        if path is None:
            files = sorted(Path(torch.__file__).parent.glob("*.py"))
            content = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        else:
            content = np.fromfile(path, np.uint16 if path.suffix == ".bin" else np.uint8)
        self.content = torch.from_numpy(content.astype(np.int32))
        self.length = options.length
        self.device = options.device
        self.split = len(content) * 9 // 10
        if len(content) - self.split < 2 * self.length:
            raise SystemExit(
                f"the data must have {20 * self.length} integers or more, got {len(content)}"
            )

    def batch(
        self, size: int, draw: torch.Generator, *, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return random pieces of one part (size, T), and for each integer the one after it."""
        first, end = (self.split, len(self.content)) if held_out else (0, self.split)
        starts = torch.randint(first, end - self.length, (size, 1), generator=draw)
        pieces = self.content[starts + torch.arange(self.length + 1)].long().to(self.device)
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def fresh(build: Build, name: str, batch: Tensor) -> nn.Module:
    """Return a new model with one kind of norm, whose constants are set by its recipe."""
    if inspect.signature(build).parameters:
        model = build(NORMS[name]).to(batch.device)
    else:
        model = build().to(batch.device)
        if name != OWN:
            dynorm.convert_(model, dynorm.find_norms(model, batch), to=name.lower())
    if name == "DyT, published":
        dynorm.init_as_published_(model)
    elif name in ("DyISRU", "DyT", "Derf"):
        dynorm.init_from_batch_(model, batch)
    return model.train()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats."""
    # nanoGPT returns all logits only with targets.
    takes_targets = "targets" in inspect.signature(model.forward).parameters
    output = model(inputs, targets) if takes_targets else model(inputs)
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    if logits.shape[:2] != inputs.shape:
        raise SystemExit(
            f"the model must map integers {tuple(inputs.shape)} to logits (B, T, vocabulary), got "
            f"{tuple(logits.shape)}: let build return a module that does"
        )
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Data, size: int) -> float:
    """Return the loss on pieces that are the same in all runs."""
    model.eval()
    losses = []
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):
        losses.append(float(loss_of(model, *data.batch(size, draw, held_out=True))))
    model.train()
    return fmean(losses)


def train(
    build: Build, name: str, lr: float, seed: int, data: Data, options: argparse.Namespace
) -> Run:
    """Train with AdamW, a warm-up and a cosine to a tenth; a loss that is lost ends the run."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    batches = [data.batch(options.batch, draw) for _ in range(options.steps)]
    model = fresh(build, name, batches[0][0])
    # The groups have different rates, and the schedule multiplies each of them.
    optimizer = torch.optim.AdamW(dynorm.param_groups(model, lr=lr, weight_decay=0.1))
    warm_up = max(options.steps // 10, 1)

    def share(step: int) -> float:
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
        return cosine * min((step + 1) / warm_up, 1.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    run = Run()
    for step, (inputs, targets) in enumerate(batches, start=1):
        started = time.perf_counter()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # To read the loss is to wait for a GPU.
        is_lost = not loss.item() < 100
        run.times.append(time.perf_counter() - started)
        if is_lost:
            run.losses.append(math.inf)
            break
        if step % max(options.steps // MEASUREMENTS, 1) == 0 or step == options.steps:
            run.steps.append(step)
            run.seconds.append(sum(run.times))
            run.losses.append(held_out_loss(model, data, options.batch))
    return run


def shown(runs: Sequence[Run]) -> str:
    """Return the last loss, the mean over the seeds with half their range."""
    losses = [run.losses[-1] for run in runs]
    if math.inf in losses:
        return "lost"
    spread = f" ± {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
    return f"{fmean(losses):.3f}{spread}"


def best_rate(runs: dict[float, list[Run]]) -> float:
    """Return the rate with the lowest mean loss."""
    return min(runs, key=lambda lr: fmean(run.losses[-1] for run in runs[lr]))


def table_of(results: dict[str, dict[float, list[Run]]], options: argparse.Namespace) -> Table:
    """Return the loss at each rate, and the time of a step."""
    table = Table(title=f"Loss after {options.steps} steps, by rate")
    table.add_column("norm")
    for lr in options.rates:
        table.add_column(f"{lr:g}", justify="right")
    table.add_column("ms per step", justify="right")
    for name, runs in results.items():
        best = best_rate(runs)
        cells = []
        for lr in options.rates:
            cells.append(f"[bold]{shown(runs[lr])}[/bold]" if lr == best else shown(runs[lr]))
        step = median(median(run.times) for seeds in runs.values() for run in seeds)
        table.add_row(name, *cells, f"{1e3 * step:.1f}")
    return table


def draw_curves(results: dict[str, dict[float, list[Run]]], path: Path) -> None:
    """Draw the held-out loss of each norm at its best rate, over steps and over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    for name, runs in results.items():
        best = best_rate(runs)
        run = runs[best][0]
        finite = len(run.steps)
        over_steps.plot(run.steps, run.losses[:finite], label=f"{name}, rate {best:g}")
        over_time.plot(run.seconds, run.losses[:finite])
    over_steps.set(xlabel="step", ylabel="held-out loss, nats")
    over_time.set(xlabel="seconds of training")
    over_steps.legend()
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="module:function, the module in this folder or installed")
    parser.add_argument(
        "--data", type=Path, help="a file of bytes, or a .bin file of 16-bit tokens"
    )
    parser.add_argument("--out", type=Path, help="a picture to write, such as norms.png")
    parser.add_argument(
        "--norms",
        nargs="+",
        choices=[OWN, *NORMS],
        metavar="NORM",
        help=f"some of: {'; '.join(NORMS)}",
    )
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates to try")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs at each rate")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data must be a file, got {options.data}: check the path")
    is_demonstration = options.model is None
    options.steps = options.steps or (30 if is_demonstration else 300)
    options.rates = options.rates or (
        [2e-3, 8e-3] if is_demonstration else [5e-4, 1e-3, 2e-3, 4e-3]
    )
    return options


def build_of(model: str) -> Build:
    """Return the function that ``--model`` names."""
    name, _, function = model.partition(":")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the module imports is another matter.
        if error.name != name:
            raise
        raise SystemExit(
            f"--model must name a module in this folder or an installed one, got {name!r}: check "
            "the folder and the name, which has no .py"
        ) from error
    build = getattr(module, function or "build", None)
    if not callable(build):
        raise SystemExit(
            f"--model must name a function of {name}, got {function or 'build'!r}: write "
            "module:function"
        )
    return build


def names_for(build: Build, wanted: list[str] | None) -> list[str]:
    """Return the norms to compare, or refuse one that the model cannot have."""
    allowed = list(NORMS)
    if not inspect.signature(build).parameters:
        allowed = [OWN, "DyISRU", "DyT", "Derf"]
    for name in wanted or []:
        if name not in allowed:
            raise SystemExit(
                f"--norms must be some of {'; '.join(allowed)}, got {name!r}: a model of build() is "
                "compared with layers in the place of its norms, one of build(norm) with any norm"
            )
    return wanted or allowed[:5]


def main() -> None:
    """Train at every rate with every norm, and print the table."""
    options = arguments()
    if options.out is not None:
        require_library("matplotlib", "a picture")
    build: Build = SmallModel
    if options.model is not None:
        build = build_of(options.model)
    names = names_for(build, options.norms)
    data = Data(options.data, options)
    results: dict[str, dict[float, list[Run]]] = {}
    for name in names:
        results[name] = {}
        for lr in options.rates:
            runs = [train(build, name, lr, seed, data, options) for seed in range(options.seeds)]
            results[name][lr] = runs
            print(f"{name} at {lr:g}: {shown(runs)}", flush=True)
    Console().print(table_of(results, options))
    print("Losses are mean cross-entropies of held-out data, in nats. Times need a quiet machine.")
    for name, runs in results.items():
        best = best_rate(runs)
        if len(runs) > 2 and best in (min(runs), max(runs)):
            print(f"{name} is best at the end of the rates: try some beyond {best:g}")
    if options.out is not None:
        draw_curves(results, options.out)
        print(f"wrote {options.out}")
    for name, runs in results.items():
        losses = runs[best_rate(runs)][0].losses
        if not losses[-1] < losses[0] - 0.1:
            raise SystemExit(
                f"{name} learned nothing at any rate: the model or the rates do not fit"
            )


if __name__ == "__main__":
    main()
