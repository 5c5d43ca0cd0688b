"""Train a small language model twice, and draw what ``dynorm.Monitor`` sees: one run sticks, one does not.

``python -m benchmarks.monitor`` trains for some four minutes on one core and writes
benchmarks/results/monitor.json and docs/images/monitor.png; with ``--draw`` it only draws. The runs
differ in one thing: the rate of the constants.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynorm
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.report.colours import COLOURS

ROOT = Path(__file__).parent.parent
RESULTS, IMAGE = (
    ROOT / "benchmarks" / "results" / "monitor.json",
    ROOT / "docs" / "images" / "monitor.png",
)
STEPS, WARM_UP, EVERY, RATE = 300, 120, 10, 2e-3
LENGTH, BATCH, WIDTH, LAYERS = 64, 16, 96, 4
RUNS = {"the weights' rate": RATE, "param_groups": None}


def batches() -> Iterator[Tensor]:
    """Yield blocks of the standard library's docstrings, byte by byte; the same in each run."""
    data = torch.tensor(
        list("\n\n".join(standard_library_docstrings(whole=True)).encode()[:500_000])
    )
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def train(constants_lr: float | None) -> dict[str, Any]:
    """Train one model and return its loss and the worst layer's figures, every ten steps."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, data = GPT2LMHeadModel(config), batches()
    first = next(data)
    dynorm.convert_(
        model, dynorm.find_norms(model, first[:2]), center=False, per_channel=False, witnesses=0
    )
    dynorm.init_from_batch_(model, first)
    optimizer = torch.optim.AdamW(
        dynorm.param_groups(model, lr=RATE, weight_decay=0.1, constants_lr=constants_lr)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP)
    )
    log: dict[str, Any] = {
        "steps": [],
        "loss": [],
        "saturated": [],
        "drift": [],
        "size": [],
        "warnings": [],
    }
    losses = []
    with dynorm.Monitor(model) as monitor:
        for step, ids in zip(range(1, STEPS + 1), data, strict=False):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % EVERY == 0:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", dynorm.errors.CalibrationWarning)
                    figures = monitor.read()
                for name in ("saturated", "drift", "size"):
                    log[name].append(
                        round(max(v for key, v in figures.items() if key.startswith(name)), 5)
                    )
                log["steps"].append(step)
                log["loss"].append(round(sum(losses[-EVERY:]) / EVERY, 4))
                log["warnings"] += [[step, str(each.message)] for each in caught]
    return log


def draw(found: dict[str, Any]) -> None:
    """Three panels side by side: the loss, the share of saturated outputs, and the drift of beta."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.1), layout="constrained")
    axes = figure.subplots(1, 3)
    styles = {"the weights' rate": ("0.45", "--"), "param_groups": (COLOURS["dyisru"], "-")}
    titles = {
        "loss": "loss, nats per byte",
        "saturated": "saturated outputs, worst layer",
        "drift": "beta over its start, most moved",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for run, log in found["runs"].items():
            color, line = styles[run]
            axis.plot(log["steps"], log[name], color=color, ls=line, lw=2, label=run)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    log = found["runs"]["the weights' rate"]
    step = log["warnings"][0][0]
    point = step, log["saturated"][log["steps"].index(step)]
    axes[1].plot(*point, "o", color="0.2", ms=7)
    axes[1].annotate("first warning", point, (-8, 6), textcoords="offset points", ha="right")
    axes[0].set_ylim(2.5, 3.6)
    axes[1].set_ylim(0, 1.04)
    axes[2].set_yscale("log")
    axes[0].legend(title="rate of the constants", frameon=False, fontsize=9)
    figure.savefig(IMAGE, dpi=110)


def main() -> None:
    """Train where nothing is asked to be drawn alone, and draw."""
    if "--draw" not in sys.argv[1:]:
        torch.set_num_threads(1)
        made = {
            "by": "python -m benchmarks.monitor",
            "model": f"GPT-2 of {LAYERS} layers and {WIDTH} channels, bytes, rate {RATE:g}",
            "torch": torch.__version__,
            "runs": {name: train(rate) for name, rate in RUNS.items()},
        }
        RESULTS.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    draw(json.loads(Path(RESULTS).read_text("utf-8")))


if __name__ == "__main__":
    main()
