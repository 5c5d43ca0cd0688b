"""Measure the cost of a norm and of its replacements under encryption: ``python -m benchmarks.encrypted``.

It takes a minute. It runs examples/encrypted_inference.py, which needs the extra ``encrypted``, and writes
benchmarks/results/encrypted.json.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.speed.machine import describe, load_average
from dynorm.files import write_text
from examples.encrypted_inference import DEGREE, ROUNDS, measured

RESULTS = Path(__file__).parent / "results" / "encrypted.json"


def main() -> None:
    """Measure and write the file."""
    torch.set_num_threads(1)
    rows = measured()
    made = {
        "by": "python -m benchmarks.encrypted",
        "tenseal": version("tenseal"),
        "degree": DEGREE,
        "rounds": ROUNDS,
        "machine": describe(),
        "load": load_average(),
    }
    write_text(RESULTS, json.dumps(made | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
