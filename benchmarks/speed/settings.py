"""Read the settings of a measurement from the command line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.cases import DTYPES
from benchmarks.speed.contenders import NAMES

SIZES = (
    (16, 384),
    (128, 768),
    (512, 768),
    (2048, 1024),
    (8192, 1024),
    (8192, 4096),
)
QUICK_SIZES = ((16, 384), (512, 768))
# Some twenty tensors of this size are held at once.
MOST_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Settings:
    """The inputs, and the most rounds and seconds for a group of contenders.

    Ratios are of the first number of threads.
    """

    sizes: tuple[tuple[int, int], ...] = SIZES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: tuple[int, ...] = (1,)
    only: tuple[str, ...] = ()
    device: str = "cpu"
    compiled: bool = True
    rounds: int = 31
    seconds: float = 4.0
    seed: int = 0


def make_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a parsed command line."""
    most = all_threads()
    if arguments.quick:
        defaults = Settings(
            sizes=QUICK_SIZES,
            dtypes=("float32",),
            threads=(most,),
            compiled=False,
            rounds=11,
            seconds=1.0,
        )
    elif arguments.device != "cpu" or most == 1:
        defaults = Settings(threads=(most,))
    else:
        defaults = Settings(threads=(most, 1))
    return Settings(
        sizes=arguments.sizes or defaults.sizes,
        dtypes=arguments.dtypes or defaults.dtypes,
        threads=arguments.threads or defaults.threads,
        only=tuple(arguments.only),
        device=arguments.device,
        compiled=defaults.compiled and not arguments.no_compile,
        rounds=defaults.rounds,
        seconds=arguments.seconds or defaults.seconds,
        seed=arguments.seed,
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser; it refuses impossible settings before anything runs."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.speed",
        description="Check the results of the layers, kernels and their peers, then time them side "
        "by side.",
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a transformers model to time as a whole, too")
    add("--name", help="the model's name in tables; the folder's name by default")
    add(
        "--sizes",
        type=_list_of(_size),
        help="rows x channels, separated by commas, such as 16x384,512x768",
    )
    add(
        "--dtypes",
        type=_list_of(_dtype),
        help=f"some of {', '.join(DTYPES)}; the first two by default",
    )
    add(
        "--threads",
        type=_list_of(_threads),
        help="numbers or all; all,1 by default; ratios are of the first number",
    )
    add(
        "--only",
        action="append",
        default=[],
        type=_glob,
        help="glob of contenders, such as 'DyISRU*'; repeatable",
    )
    add("--device", type=_device, default="cpu", help="cpu or cuda")
    add(
        "--quick",
        action="store_true",
        help="a minute: two sizes, float32, all threads, few rounds, nothing compiled",
    )
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add("--no-block", action="store_true", help="leave the GPT-2 block out")
    add(
        "--seconds",
        type=_seconds,
        help="most seconds for a group of contenders; 4, or 1 with --quick",
    )
    add("--seed", type=int, default=0, help="seed of the inputs and of the order in each round")
    add("--out", type=Path, help="write the results here as JSON")
    add("--plot", type=Path, help="draw the results here as PNG")
    add("--json", action="store_true", help="print the results as JSON, and nothing else")
    return parser


def all_threads() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of several values with commas between them, without repetitions."""

    def parse_list(text: str) -> tuple[Any, ...]:
        values = [parse(part.strip()) for part in text.split(",")]
        return tuple(dict.fromkeys(values))

    return parse_list


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"a size must be rows x channels, such as 512x768, got {text!r}"
        )
    rows = int(match[1])
    channels = int(match[2])
    if rows < 1 or channels < 2 or rows * channels > MOST_ELEMENTS:
        raise argparse.ArgumentTypeError(
            f"a size must have at least 1 row, 2 channels and at most {MOST_ELEMENTS:,} elements, "
            f"got {text!r}"
        )
    return rows, channels


def _glob(text: str) -> str:
    if not any(fnmatchcase(name, text) for name in NAMES):
        raise argparse.ArgumentTypeError(
            f"a glob must match a contender, got {text!r}: {'; '.join(NAMES)}"
        )
    return text


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"a dtype must be one of {', '.join(DTYPES)}, got {text!r}"
        )
    return text


def _threads(text: str) -> int:
    most = all_threads()
    if text == "all":
        return most
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"threads must be 'all' or from 1 to the {most} cores here, got {text!r}"
        )
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds must be a positive number, got {text}")
    return seconds


def _device(text: str) -> str:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"device must be cpu or cuda, got {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(
            "torch cannot use 'cuda' here: there is no GPU, or torch has none"
        )
    return text
