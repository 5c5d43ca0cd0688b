"""Describe the machine that figures hold for: processor, caches, libraries, and how busy it is."""

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

# The flags of a processor that decide how these kernels and torch's run.
FLAGS = (
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)


def describe(device: str = "cpu") -> dict[str, Any]:
    """Return the machine and the versions as plain values; unknown entries are left out or empty."""
    name, flags = _processor()
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine: dict[str, Any] = {
        "cpu": name,
        "architecture": platform.machine(),
        "cores": all_threads(),
        "flags": flags,
        "caches": _caches(),
        "memory_gib": round(memory_bytes / 2**30, 1),
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
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        machine["cuda"] = torch.version.cuda
    return machine


def load_average() -> list[float]:
    """Return the load over 1, 5 and 15 minutes; empty if the system does not report it."""
    if not hasattr(os, "getloadavg"):
        return []
    return [round(value, 2) for value in os.getloadavg()]


def in_words(threads: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def summary(machine: dict[str, Any]) -> str:
    """Return the machine in a line."""
    parts = [machine["cpu"]]
    parts.append("1 core" if machine["cores"] == 1 else f"{machine['cores']} cores")
    flags = machine.get("flags", [])
    if "avx512f" in flags:
        parts.append("AVX-512")
    if "amx_bf16" in flags:
        parts.append("AMX")
    for level, size in machine.get("caches", {}).items():
        parts.append(f"{level} {size}")
    parts.append(machine.get("gpu", ""))
    parts.append(f"kernels: {machine['backend']}")
    parts.append(f"torch {machine['torch']}")
    return ", ".join(part for part in parts if part)


def _processor() -> tuple[str, list[str]]:
    """Return the processor's name and those of its flags that matter here."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    cpu: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        # The first core's values stay.
        cpu.setdefault(key.strip(), value.strip())
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in cpu:
        name += f" (family {cpu['cpu family']}, model {cpu.get('model', '?')})"
    return name, [flag for flag in FLAGS if flag in flags]


def _caches() -> dict[str, str]:
    """Return the size of each cache that the first core uses, by level."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = (index / "type").read_text().strip()
        if kind != "Instruction":
            level = (index / "level").read_text().strip()
            sizes[f"L{level}"] = (index / "size").read_text().strip()
    return sizes
