"""Imports point one way, and importing dynorm does not load what only some of its functions need."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dynorm
from dynorm.__main__ import main
from dynorm.after_import import _Finder, call_after_import
from tests.fresh import run

SOURCES = Path(dynorm.__file__).parent
# Numbers and layers, no model.
GROUND = (
    ("version",),
    ("after_import",),
    ("errors",),
    ("dtypes",),
    ("arguments",),
    ("plain",),
    ("files",),
    ("table",),
    ("wrappers",),
    ("token_sums",),
    ("functional",),
    ("theory",),
    ("kernels",),
    ("layers",),
    ("family",),
)
# Verbs on a model.
TOOLS = (
    ("site",),
    ("batches",),
    ("guard",),
    ("outputs",),
    ("find",),
    ("replace",),
    ("recipe",),
    ("broadcast",),
    ("fit",),
    ("train",),
    ("fold",),
    ("report",),
    ("hub",),
)
# Files, folders, processes and words.
JOBS = (
    ("jobs",),
    # The package's face, dynorm/__init__.py, which imports all of the above.
    ("",),
    ("paper",),
    ("cli",),
    ("__main__",),
)
ORDER = (*GROUND, *TOOLS, *JOBS)
RANK = {unit: rank for rank, units in enumerate(ORDER) for unit in units}
OPTIONAL = [
    "transformers",
    "matplotlib",
    "triton",
    "scipy",
    "sympy",
    "mpmath",
    "latex2mathml",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
    "sentence_transformers",
    "torchao",
    "accelerate",
    "typer",
    "rich",
    "jinja2",
    "pandas",
    "huggingface_hub",
    "tokenizers",
    "gguf",
    "datasets",
]


def imported(
    source: str, module: tuple[str, ...], *, is_package: bool = False, hints: bool = True
) -> set[tuple[str, ...]]:
    """Return the dotted names that ``source`` imports, wherever in the file; relative ones made absolute.

    Without ``hints``, not those that only type checkers read.
    """
    package = module if is_package else module[:-1]
    names = set()
    tree = ast.parse(source)
    if not hints:
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            parent += tuple(node.module.split(".")) if node.module else ()
            names |= {(*parent, alias.name) for alias in node.names}
    return names


def violations(source: str, module: tuple[str, ...], *, is_package: bool = False) -> list[str]:
    """Return a line for each import of ``module`` (``("dynorm", unit, ...)``) that points down the order."""
    unit = module[1]
    if unit not in RANK:
        return [
            f"{unit} has no place in the order of imports: give it one in {Path(__file__).name}"
        ]
    found = []
    for name in sorted(imported(source, module, is_package=is_package)):
        if name[0] != "dynorm":
            continue
        target = name[1] if len(name) > 1 and name[1] in RANK else ""
        if target != unit and RANK[target] >= RANK[unit]:
            found.append(f"{'.'.join(module)} imports {'.'.join(name)}")
    return found


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    """Return every file behind the package's face, with its dotted name."""
    files = sorted(path for path in SOURCES.rglob("*.py") if path != SOURCES / "__init__.py")
    dotted = [("dynorm", *path.relative_to(SOURCES).with_suffix("").parts) for path in files]
    return [
        (path, name[:-1] if name[-1] == "__init__" else name)
        for path, name in zip(files, dotted, strict=True)
    ]


def test_imports_point_one_way() -> None:
    files = modules()
    assert ("dynorm", "functional") in [name for _, name in files]
    found = [
        line
        for path, name in files
        for line in violations(path.read_text(), name, is_package=path.name == "__init__.py")
    ]
    assert found == []
    assert {name[1] for _, name in files} == set(RANK) - {""}


def circles(uses: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[str]:
    """Return the files that import themselves by way of others; ``uses`` has the names that each file imports."""

    def targets(name: tuple[str, ...]) -> set[tuple[str, ...]]:
        # A name of a module is that module's; the package's face imports everything and nothing
        # imports it in turn.
        return {
            found for path in uses[name] if (found := path if path in uses else path[:-1]) in uses
        }

    found = []
    for start in uses:
        seen: set[tuple[str, ...]] = set()
        remaining = targets(start)
        while remaining - seen:
            seen |= remaining
            remaining = set().union(*map(targets, remaining))
        if start in seen:
            found.append(".".join(start))
    return found


def test_no_file_imports_itself_by_way_of_others() -> None:
    uses = {
        name: imported(path.read_text(), name, is_package=path.name == "__init__.py", hints=False)
        for path, name in modules()
    }
    assert circles(uses) == []


def test_a_circle_of_files_is_found() -> None:
    uses = {
        ("dynorm", "a"): {("dynorm", "b", "name")},
        ("dynorm", "b"): {("dynorm", "c"), ("torch",)},
        ("dynorm", "c"): {("dynorm", "a", "other")},
        ("dynorm", "d"): {("dynorm", "a")},
    }
    assert circles(uses) == ["dynorm.a", "dynorm.b", "dynorm.c"]


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import dynorm.layers", "dynorm.functional"),
        ("from dynorm.layers.dyt import DyT", "dynorm.kernels"),
        ("from dynorm import theory", "dynorm.functional"),
        ("from dynorm import DyISRU", "dynorm.replace.specs"),
        ("import dynorm", "dynorm.hub"),
        ("from .. import cli", "dynorm.paper.figures"),
        ("from ..replace import specs", "dynorm.layers.dyt"),
        ("if TYPE_CHECKING:\n    from dynorm.hub import load", "dynorm.layers.dyt"),
        ("def f():\n    from dynorm.replace.specs import Plan", "dynorm.layers.dyt"),
        ("import torch", "dynorm.unheard_of"),
    ],
)
def test_imports_down_the_order_are_found(source: str, module: str) -> None:
    assert len(violations(source, tuple(module.split(".")))) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from dynorm.functional import dyt", "dynorm.theory"),
        (
            "from dynorm import functional, errors\nfrom dynorm.version import __version__",
            "dynorm.layers.dyt",
        ),
        ("from ._base import PointwiseNorm\nfrom ..functional import dyt", "dynorm.layers.dyt"),
        ("from dynorm.replace.specs import Plan", "dynorm.replace.convert"),
        ("import torch, rich", "dynorm.cli"),
        ("from dynorm import convert_", "dynorm.cli"),
        ("from dynorm.cli import main", "dynorm.__main__"),
    ],
)
def test_imports_up_the_order_pass(source: str, module: str) -> None:
    assert violations(source, tuple(module.split("."))) == []


def test_functional_imports_torch_and_the_errors_only() -> None:
    names = imported((SOURCES / "functional.py").read_text(), ("dynorm", "functional"))
    foreign = {name[:2] for name in names if name[0] not in sys.stdlib_module_names}
    assert foreign == {
        ("torch",),
        ("torch", "Tensor"),
        ("dynorm", "arguments"),
        ("dynorm", "errors"),
        ("dynorm", "token_sums"),
    }


def test_importing_dynorm_loads_no_optional_library() -> None:
    # One process, one step after another. Less what torch itself loads, which differs from build to
    # build.
    script = """
import json, sys, torch
before = set(sys.modules)
import dynorm
loaded = sorted(set(sys.modules) - before)
dynorm.measure, dynorm.load, dynorm.convert_model
import dynorm.cli, dynorm.paper
heavy = [name for name in ("matplotlib", "scipy", "sympy", "transformers") if name in sys.modules]
print(json.dumps([loaded, "torch.distributed.tensor" in sys.modules, heavy]))
"""
    loaded, tensors, heavy = json.loads(run(script, imported="torch"))
    assert not {name.split(".")[0] for name in loaded} & set(OPTIONAL)
    # Only the mathematics and the layers: a verb is imported at its first use.
    rooms = {name.split(".")[1] for name in loaded if name.startswith("dynorm.")}
    assert rooms == {
        "after_import",
        "arguments",
        "dtypes",
        "errors",
        "functional",
        "kernels",
        "layers",
        "theory",
        "token_sums",
        "version",
        "wrappers",
    }
    # Tensors over several devices are loaded by those who use them.
    assert not tensors
    # The help of the command loads no heavy library.
    assert heavy == []


def test_a_call_waits_for_an_import_that_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "waited_for.py"
    file.write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    listener = SimpleNamespace(seen=[])
    monkeypatch.setitem(sys.modules, "listener", listener)
    call_after_import("waited_for", "listener:seen.append")
    assert importlib.util.find_spec("waited_for") is not None
    with pytest.raises(ImportError):
        importlib.import_module("waited_for")
    assert listener.seen == []
    file.write_text("value = 1  # of another size")
    importlib.invalidate_caches()
    module = importlib.import_module("waited_for")
    assert importlib.reload(module).value == 1
    assert listener.seen == [module]
    call_after_import("waited_for", "listener:seen.append")
    assert listener.seen == [module, module]
    monkeypatch.delitem(sys.modules, "waited_for")


def test_two_copies_of_the_package_may_wait_for_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for_twice.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    listener = SimpleNamespace(seen=[])
    monkeypatch.setitem(sys.modules, "listener", listener)
    of_copy = _Finder()
    of_copy.waiting["waited_for_twice"] = "listener:seen.append"
    monkeypatch.setattr(sys, "meta_path", [of_copy, *sys.meta_path])
    call_after_import("waited_for_twice", "listener:seen.append")
    module = importlib.import_module("waited_for_twice")
    assert listener.seen == [module, module]
    monkeypatch.delitem(sys.modules, "waited_for_twice")


@pytest.mark.parametrize(("command", "extra"), [("convert", "convert"), ("prove", "paper")])
def test_a_command_without_its_libraries_names_the_extra(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr("sys.argv", ["dynorm", command])
    with pytest.raises(SystemExit, match=rf"typer must be installed.*dynorm\[{extra}\]"):
        main()
