"""Build the CPU kernels: ``python src/dynorm/kernels/_build.py``; needs a C++17 compiler and Python's headers.

The module has Python's limited interface and is called with addresses, so that it depends on no
version of torch. ``CXX`` names the compiler, ``DYNORM_CXXFLAGS`` adds flags to compile and link
with; an argument is another place for the module, which ``DYNORM_NATIVE`` then names.
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
# Comparisons with NaN are kept, so no -ffast-math; gcc 12 takes the undefined operand of its own
# intrinsics for a bug.
FLAGS = shlex.split(
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-uninitialized "
    "-Wno-maybe-uninitialized "
    "-fno-math-errno -fno-trapping-math -ffp-contract=fast"
)
# gcc's alone: steps of vectors that are computed side by side are mixed, so that none waits for its
# own.
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
    """Compile and link, the files side by side, and return the module's path; it appears whole or not at all."""
    compiler = (
        os.environ.get("CXX")
        or shutil.which("g++")
        or shutil.which("clang++")
        or shutil.which("c++")
    )
    if compiler is None:
        raise RuntimeError(
            "building the kernels needs a C++17 compiler: install g++, or name one in CXX"
        )
    extra = shlex.split(os.environ.get("DYNORM_CXXFLAGS", ""))
    scheduled = [] if sys.platform == "darwin" or "clang" in compiler else SCHEDULED
    base = [
        *shlex.split(compiler),
        *FLAGS,
        *scheduled,
        f"-I{sysconfig.get_paths()['include']}",
        *extra,
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as directory:

        def compile_(name: str) -> str:
            built = str(Path(directory, f"{name}.o"))
            _run([*base, *SETS.get(name, []), "-c", str(SOURCES / f"{name}.cpp"), "-o", built])
            return built

        names = [*FILES, *(SETS if platform.machine().lower() in ("x86_64", "amd64") else ())]
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
