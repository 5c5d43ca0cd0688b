"""Train a small language model twice, and draw the figures of ``dynorm.Monitor``: one run gets stuck.

``python -m benchmarks.monitor`` trains for about four minutes on one core and writes
benchmarks/results/monitor.json and docs/images/monitor.png; with ``--draw`` it only draws. The runs
differ only in the rate of the constants.
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
RESULTS = ROOT / "benchmarks" / "results" / "monitor.json"
IMAGE = ROOT / "docs" / "images" / "monitor.png"
STEPS = 300
WARM_UP = 120
# Steps from one reading of the monitor to the next.
EVERY = 10
RATE = 2e-3
LENGTH = 64
BATCH = 16
WIDTH = 96
LAYERS = 4
# The rate of the constants in each run; None leaves it to param_groups.
RUNS = {"the weights' rate": RATE, "param_groups": None}


def batches() -> Iterator[Tensor]:
    """Yield blocks of bytes of the standard library's docstrings, the same ones in each run."""
    text = "\n\n".join(standard_library_docstrings(whole=True))
    data = torch.tensor(list(text.encode()[:500_000]))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        blocks = [data[start : start + LENGTH] for start in starts.tolist()]
        yield torch.stack(blocks)


def train(constants_lr: float | None) -> dict[str, Any]:
    """Train one model and return its loss and the worst layer's figures, every ten steps."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    data = batches()
    first = next(data)
    sites = dynorm.find_norms(model, first[:2])
    dynorm.convert_(model, sites, center=False, per_channel=False, witnesses=0)
    dynorm.init_from_batch_(model, first)
    groups = dynorm.param_groups(model, lr=RATE, weight_decay=0.1, constants_lr=constants_lr)
    optimizer = torch.optim.AdamW(groups)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
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
                    values = [value for key, value in figures.items() if key.startswith(name)]
                    log[name].append(round(max(values), 5))
                log["steps"].append(step)
                log["loss"].append(round(sum(losses[-EVERY:]) / EVERY, 4))
                for warning in caught:
                    log["warnings"].append([step, str(warning.message)])
    return log


def draw(document: dict[str, Any]) -> None:
    """Draw the loss, the share of saturated outputs, and the drift of beta side by side."""
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
        for run, log in document["runs"].items():
            color, line = styles[run]
            style = {"color": color, "ls": line, "lw": 2}
            axis.plot(log["steps"], log[name], label=run, **style)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    log = document["runs"]["the weights' rate"]
    first_warning = log["warnings"][0]
    step = first_warning[0]
    point = (step, log["saturated"][log["steps"].index(step)])
    axes[1].plot(*point, "o", color="0.2", ms=7)
    axes[1].annotate(
        "first warning",
        point,
        (-8, 6),
        textcoords="offset points",
        ha="right",
    )
    axes[0].set_ylim(2.5, 3.6)
    axes[1].set_ylim(0, 1.04)
    axes[2].set_yscale("log")
    axes[0].legend(title="rate of the constants", frameon=False, fontsize=9)
    figure.savefig(IMAGE, dpi=110)


def main() -> None:
    """Train, unless only the picture is asked for, and draw."""
    if "--draw" not in sys.argv[1:]:
        torch.set_num_threads(1)
        document = {
            "by": "python -m benchmarks.monitor",
            "model": f"GPT-2 of {LAYERS} layers and {WIDTH} channels, bytes, rate {RATE:g}",
            "torch": torch.__version__,
            "runs": {name: train(rate) for name, rate in RUNS.items()},
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    draw(json.loads(RESULTS.read_text("utf-8")))


if __name__ == "__main__":
    main()
