"""The build hook of wheels and editable installs: it compiles the CPU kernels, for which it needs no torch."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Put the kernels into the wheel, which is then one for this platform; without a compiler it is for any."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; where that fails, say so, and leave the layers to plain torch."""
        built = runpy.run_path(str(Path(self.root, "src", "dynorm", "kernels", "_build.py")))
        target: Path = built["TARGET"]
        try:
            if version != "editable" or not target.exists():
                built["build"]()
        except RuntimeError as error:
            self.app.display_warning(
                f"dynorm is built without its CPU kernels, so plain torch serves: {error}"
            )
            return
        build_data["artifacts"].append(target.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        # The limited interface of 3.11 serves every later Python.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
