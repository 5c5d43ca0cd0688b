"""Build the CPU kernels: ``python src/dynorm/kernels/_build.py``.

This needs a C++17 compiler and Python's headers. The module uses Python's limited interface and is
called with addresses, so that it works with every version of torch. ``CXX`` names the compiler,
``DYNORM_CXXFLAGS`` adds flags to compile and link with. An argument is another path for the module;
``DYNORM_NATIVE`` names it when dynorm runs.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
TARGET = Path(__file__).parent / "_native.abi3.so"
# Without -ffast-math, which drops comparisons with NaN. The two warnings are off because gcc 12
# reports an undefined operand in its own intrinsics.
FLAGS = shlex.split(
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-uninitialized "
    "-Wno-maybe-uninitialized "
    "-fno-math-errno -fno-trapping-math -ffp-contract=fast"
)
# Only gcc has these: they interleave the steps of vectors that are computed side by side, so that
# no step waits for the one before it.
SCHEDULED = ["-fschedule-insns", "-fsched-pressure"]
SETS = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx2",
        "-mfma",
        "-mf16c",
    ],
}
FILES = ("module", "plan", "kernels_portable")


def build(target: Path = TARGET) -> Path:
    """Compile the files side by side, link them, and return the path of the complete module."""
    compiler = os.environ.get("CXX")
    for name in ("g++", "clang++", "c++"):
        compiler = compiler or shutil.which(name)
    if compiler is None:
        raise RuntimeError(
            "building the kernels needs a C++17 compiler: install g++, or name one in CXX"
        )
    extra = shlex.split(os.environ.get("DYNORM_CXXFLAGS", ""))
    base = [*shlex.split(compiler), *FLAGS]
    if sys.platform != "darwin" and "clang" not in compiler:
        base += SCHEDULED
    base += [f"-I{sysconfig.get_paths()['include']}", *extra]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as directory:

        def compile_(name: str) -> str:
            built = str(Path(directory, f"{name}.o"))
            _run([*base, *SETS.get(name, []), "-c", str(SOURCES / f"{name}.cpp"), "-o", built])
            return built

        names = list(FILES)
        if platform.machine().lower() in ("x86_64", "amd64"):
            names += SETS
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_, names))
        linked = Path(directory, target.name)
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        _run([*base, "-shared", *undefined, *objects, "-o", str(linked)])
        os.replace(linked, target)
    return target


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode or run.stderr:
        sys.stderr.write(run.stderr)
    if run.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{run.stderr[-2000:]}")


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:2])))
