"""Write the layers with their Triton kernels as a kernel repository of the Hugging Face hub.

    python tools/hub_kernel.py build/hub-kernel

The folder has the layout that kernel-builder takes: ``build.toml``, ``flake.nix`` and
``torch-ext/dynorm_kernels``. Its code imports torch and itself only, by relative imports, so that
several versions can be loaded from any place. On a GPU the layers run the Triton kernels, elsewhere
plain torch: the C++ kernels are in the wheel of dynorm.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dynorm.files import replaced_directory
from dynorm.version import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "dynorm"
PACKAGE = "dynorm_kernels"
FILES = (
    "arguments.py",
    "dtypes.py",
    "errors.py",
    "functional.py",
    "theory.py",
    "token_sums.py",
    "kernels/__init__.py",
    "kernels/_cpu.py",
    "kernels/_op.py",
    "kernels/_form.py",
    "kernels/_traced.py",
    "kernels/_triton.py",
    "kernels/_triton_functions.py",
    "kernels/_triton_kernels.py",
    "layers/by_kernel.py",
    "layers/constants.py",
    "layers/derf.py",
    "layers/dyisru.py",
    "layers/dyt.py",
    "layers/linear.py",
    "layers/module.py",
    "layers/pointwise.py",
)
BUILD = """[general]
name = "dynorm-kernels"
version = 1
license = "apache-2.0"
backends = ["cpu", "cuda", "rocm"]

[torch-noarch]
"""
FLAKE = """{
  description = "The point-wise layers of dynorm";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
FACE = f'''"""Point-wise layers in the place of LayerNorm and RMSNorm, from dynorm {__version__}."""

from . import functional, layers
from .layers import Derf, DyISRU, DyT, LinearControl

__all__ = ["Derf", "DyISRU", "DyT", "LinearControl", "functional", "layers"]
'''
LAYERS = '''"""The layers; a program may put them in the place of its own."""

from .derf import Derf
from .dyisru import DyISRU
from .dyt import DyT
from .linear import LinearControl

__all__ = ["Derf", "DyISRU", "DyT", "LinearControl"]
'''
CARD = f"""---
license: apache-2.0
tags:
- kernels
---

# dynorm-kernels

The layers DyISRU, DyT, Derf and LinearControl of dynorm {__version__}, with their Triton kernels. They need no
library but torch.

```python
from kernels import get_kernel

kernel = get_kernel("USER/dynorm-kernels", version=1, trust_remote_code=True)
layer = kernel.DyISRU(768)
```

`tools/hub_kernel.py` of dynorm makes this folder.
"""
_ABSOLUTE = re.compile(r"^(\s*)from dynorm(\.[\w.]+)? import ", re.MULTILINE)


def relative(source: str, depth: int) -> str:
    """Return the source with imports of dynorm relative to a file in a package of this depth."""

    def replace(match: re.Match[str]) -> str:
        indent = match[1]
        module = (match[2] or "").removeprefix(".")
        return f"{indent}from {'.' * depth}{module} import "

    return _ABSOLUTE.sub(replace, source)


def write(folder: Path) -> None:
    """Write the repository into an empty folder."""
    package = folder / "torch-ext" / PACKAGE
    for name in ("kernels", "layers"):
        (package / name).mkdir(parents=True)
    for name in FILES:
        source = (SOURCES / name).read_text("utf-8")
        source = source.replace(
            "install g++, then run python -m dynorm.kernels._build", "pip install dynorm has them"
        )
        (package / name).write_text(relative(source, 1 + name.count("/")), "utf-8")
    (package / "__init__.py").write_text(FACE)
    (package / "layers" / "__init__.py").write_text(LAYERS)
    (folder / "build.toml").write_text(BUILD)
    (folder / "flake.nix").write_text(FLAKE)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text((ROOT / "LICENSE").read_text("utf-8"))


def main() -> None:
    """Write the repository into a new folder."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    with replaced_directory(sys.argv[1]) as folder:
        write(folder)
    print(f"{sys.argv[1]}: publish it with `kernel-builder build-and-upload`")


if __name__ == "__main__":
    main()
