"""The machine that figures hold for: the processor, its caches, the libraries, and how busy the machine is."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.settings import all_threads
from dynorm import __version__
from dynorm.kernels import backend

# What decides how these kernels and torch's run, of the hundred flags of a processor.
FLAGS = (
    "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16",
    "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip


def describe(device: str = "cpu") -> dict[str, Any]:
    """Return the machine and the versions as plain values; unknown entries are left out or empty."""
    name, flags = _processor()
    found: dict[str, Any] = {
        "cpu": name,
        "architecture": platform.machine(),
        "cores": all_threads(),
        "flags": flags,
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dynorm": __version__,
        "backend": backend(device),
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        }
        found["cuda"] = torch.version.cuda
    return found


def load_average() -> list[float]:
    """Return how many processes ran or waited, over 1, 5 and 15 minutes; empty if the system does not report it."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def summary(machine: dict[str, Any]) -> str:
    """Return the machine in a line."""
    parts = [machine["cpu"], f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"]
    flags = machine.get("flags", [])
    parts += [name for flag, name in (("avx512f", "AVX-512"), ("amx_bf16", "AMX")) if flag in flags]
    parts += (
        [", ".join(f"{level} {size}" for level, size in machine["caches"].items())]
        if "caches" in machine
        else []
    )
    parts += [machine["gpu"]] if "gpu" in machine else []
    return ", ".join(
        part
        for part in [*parts, f"kernels: {machine['backend']}", f"torch {machine['torch']}"]
        if part
    )


def _processor() -> tuple[str, list[str]]:
    """Return the processor's name and those of its flags that matter here."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    cpu = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in cpu:
        name += f" (family {cpu['cpu family']}, model {cpu.get('model', '?')})"
    return name, [flag for flag in FLAGS if flag in flags]


def _caches() -> dict[str, str]:
    """Return the size of each cache that the first core uses, by level."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (index / name).read_text().strip() for name in ("level", "type", "size")
        )
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found
