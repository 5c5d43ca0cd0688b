"""Results of runs that never were, for the plan, the sums and the page."""

from __future__ import annotations

import math
from typing import Any

from studies.plan import LONG, SMALL, Part
from studies.settings import Settings


def record(
    settings: Settings, loss: float | None, step: float = 0.2, **more: Any
) -> dict[str, Any]:
    return {
        "name": settings.name,
        "settings": settings.to_dict(),
        "diverged": loss is None,
        "loss": loss,
        "steps_taken": settings.steps,
        "train_loss": loss,
        "accuracy": None if loss is None else 0.5,
        # Four by which a rate is chosen, and four that are reported.
        "parts": None if loss is None else [*[loss] * 4, *(loss - 0.1, loss + 0.1) * 2],
        "seconds": step * settings.steps,
        "wall_seconds": step * settings.steps + 30,
        "seconds_per_step": step,
        "parameters": 1_000_000,
        "constants": {},
    } | more


def results(*settings_and_losses: tuple[Settings, float | None]) -> dict[str, dict[str, Any]]:
    return {settings.name: record(settings, loss) for settings, loss in settings_and_losses}


def imagined(part: Part) -> dict[str, dict[str, Any]]:
    """Each arm a parabola over the logarithm of its rate; the highest rate of LayerNorm diverges."""
    found = {}
    for place, sweep in enumerate(part.sweeps()):
        middle = math.log(sweep[len(sweep) // 2].lr)
        for settings in sweep:
            lost = settings.arm == "layernorm" and settings.lr == 1.6e-2
            loss = (
                None if lost else 1.5 + 0.04 * place + 0.15 * (math.log(settings.lr) - middle) ** 2
            )
            found[settings.name] = record(settings, loss)
    return found


def imagined_log(name: str) -> list[dict[str, Any]]:
    steps = 3000 if "-3000-" in name else 600
    lines: list[dict[str, Any]] = []
    for step in range(steps // 24, steps + 1, steps // 24):
        line: dict[str, Any] = {"step": step, "loss": 1.5 + 4 * math.exp(-6 * step / steps)}
        if step % (steps // 6) == 0:
            line["held_out"] = line["loss"] + 0.05 + 0.001 * (len(name) % 40)
        if "dy" in name or "linear" in name or "derf" in name:
            line["beta"] = [10 * (site + 1) ** (1 + step / steps) for site in range(13)]
        lines.append(line)
    return lines


EVERYTHING = imagined(SMALL) | imagined(LONG)
