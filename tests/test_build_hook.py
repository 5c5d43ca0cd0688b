"""The wheel's build hook: with a compiler a wheel of this platform; without one a plain wheel, and one line on it."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run_hook(
    monkeypatch: pytest.MonkeyPatch, root: Path, version: str = "standard"
) -> tuple[dict[str, Any], list[str]]:
    """Return the data that the hook gives to hatchling, and its warnings."""
    for name in (
        "hatchling",
        "hatchling.builders",
        "hatchling.builders.hooks",
        "hatchling.builders.hooks.plugin",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = ModuleType("interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings: list[str] = []
    hook = module.KernelHook()
    hook.root, hook.app = str(root), SimpleNamespace(display_warning=warnings.append)
    data: dict[str, Any] = {"artifacts": [], "pure_python": True}
    hook.initialize(version, data)
    return data, warnings


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with only the build script: its compiler below writes an empty file for each output."""
    kernels = tmp_path / "src/dynorm/kernels"
    kernels.mkdir(parents=True)
    (kernels / "_build.py").write_text((ROOT / "src/dynorm/kernels/_build.py").read_text())
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    return tmp_path


def test_a_wheel_with_kernels_is_one_of_its_platform(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(checkout / "compiler"))
    data, warnings = run_hook(monkeypatch, checkout)
    assert data["artifacts"] == ["src/dynorm/kernels/_native.abi3.so"]
    assert (checkout / data["artifacts"][0]).exists()
    assert data["pure_python"] is False
    assert data["tag"].startswith("cp311-abi3-")
    assert not data["tag"].endswith("any")
    assert not warnings


def test_without_a_compiler_the_wheel_is_plain_and_says_so_once(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(checkout))
    data, warnings = run_hook(monkeypatch, checkout)
    assert data == {"artifacts": [], "pure_python": True}
    assert len(warnings) == 1
    assert "install g++" in warnings[0]
    assert "plain torch" in warnings[0]


def test_an_editable_install_keeps_the_kernels_that_are_there(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checkout / "src/dynorm/kernels/_native.abi3.so"
    target.write_bytes(b"built")
    monkeypatch.setenv("CXX", str(checkout / "compiler"))
    data, _ = run_hook(monkeypatch, checkout, "editable")
    assert target.read_bytes() == b"built"
    assert data["artifacts"]


def test_the_source_archive_has_all_that_a_build_needs_and_no_runs_of_the_study() -> None:
    # hatchling reads the patterns with this library.
    pathspec = pytest.importorskip("pathspec")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]
    spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    source = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    needed = [*source, ROOT / "hatch_build.py", ROOT / "README.md", ROOT / "LICENSE"]
    runs = [path for path in (ROOT / "studies" / "results").rglob("*") if path.is_file()]
    assert runs
    for paths, excluded in ((needed, False), (runs, True)):
        for path in paths:
            assert spec.match_file(path.relative_to(ROOT).as_posix()) == excluded, path


def test_the_floor_is_the_declared_one() -> None:
    """``make floor`` takes the lowest versions of all that the library itself imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["convert"]]
    lines = (ROOT / "constraints-floor.txt").read_text("utf-8").splitlines()
    for requirement in requirements:
        name, lowest = requirement.split(">=")
        assert f"{name}=={lowest}.*" in lines
