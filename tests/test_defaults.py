"""Another default device or dtype of torch changes no result: every factory call names its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm

SOURCES = Path(dynorm.__file__).parent
# Functions that make a tensor, or a generator, on the default device.
FACTORIES = {
    "Generator",
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
# These give the default dtype, whatever their arguments are.
OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
# No model of a user's gets there: the paper's own simulations.
EXEMPT_ROOMS = {"paper"}
# A tensor that is thrown away, of which only the device, or the order of axes, matters.
EXEMPT_DTYPES = {"jobs/checkpoint.py: torch.empty(0, device=device)"}


def lacking(source: str, where: str) -> list[str]:
    """Return a line for each factory call that leaves its device or dtype to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_torch = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        )
        if not is_torch:
            continue
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        name = node.func.attr
        if name not in FACTORIES:
            continue
        given = {keyword.arg for keyword in node.keywords}
        # Options for several calls, whose names are not in the call.
        if None in given:
            continue
        # A generator takes its device first.
        has_device = "device" in given or (name == "Generator" and bool(node.args))
        call = f"{where}: {ast.unparse(node)}"
        if not has_device:
            found.append(f"{call} lacks device=")
        is_exempt = call in EXEMPT_DTYPES or where in EXEMPT_DTYPES
        if name in OF_DEFAULT_DTYPE and "dtype" not in given and not is_exempt:
            found.append(f"{call} lacks dtype=")
    return found


def test_every_factory_call_names_its_device_and_dtype() -> None:
    found: list[str] = []
    for path in sorted(SOURCES.rglob("*.py")):
        where = path.relative_to(SOURCES)
        if where.parts[0] not in EXEMPT_ROOMS:
            found += lacking(path.read_text(), where.as_posix())
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.zeros(3)", 2),
        ("torch.zeros(3, device=x.device)", 1),
        ("torch.zeros(3, device='cpu', dtype=torch.long)", 0),
        ("torch.arange(3)", 1),
        ("torch.Generator()", 1),
        ("torch.Generator(device)", 0),
        ("torch.zeros_like(x)", 0),
        ("x.new_zeros(3)", 0),
        ("torch.tensor([1.0], dtype=torch.float64)", 1),
    ],
)
def test_calls_that_lack_them_are_found(source: str, count: int) -> None:
    assert len(lacking(source, "somewhere.py")) == count


class Small(nn.Module):
    """LayerNorm, RMSNorm and one without a tensor, with a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(16)
        self.up = nn.Linear(16, 16)
        self.second = nn.RMSNorm(16, eps=1e-6)
        self.down = nn.Linear(16, 16)
        self.last = nn.LayerNorm(16, elementwise_affine=False)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.first(x)).relu()
        x = x + self.down(self.second(x)).relu()
        return self.head(self.last(x))  # type: ignore[no-any-return]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def whole_way(to: str, witnesses: int, folder: Path, under: Any) -> dict[str, Any]:
    """Return all that a model is on its way from find_norms to a loaded folder, in order."""
    torch.manual_seed(0)
    model, original, empty = Small().eval(), Small().eval(), Small()
    original.load_state_dict(model.state_dict())
    x, held_out = torch.randn(2, 24, 16), torch.randn(8, 24, 16)
    found: dict[str, Any] = {}
    with under:
        sites = dynorm.find_norms(model, x)
        found["sites"] = [site.to_dict() for site in sites]
        inspected = dynorm.inspect_norms(model, [x], seed=1)
        found["inspected"] = inspected.to_dict()
        dynorm.convert_(model, sites, to=to, witnesses=witnesses)
        found["calibrated"] = dynorm.calibrate_(model, [x, held_out]).to_dict()
        found["refined"] = dynorm.refine_(model, [x, held_out], steps=2).to_dict()
        measured = dynorm.measure(model, [held_out], original=original)
        found["measured"] = measured.to_dict()
        measured.to_html(folder.with_suffix(".html"))
        found["page"] = folder.with_suffix(".html").read_text()
        found["folded"] = dynorm.fold_(model, x).to_dict()
        dynorm.save(model, folder)
        loaded = dynorm.load(folder, empty)
    found["output"] = loaded(held_out)
    return found


UNDER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize(("to", "witnesses"), [("dyt", 0), ("dyisru", 2)])
def test_other_defaults_change_nothing(to: str, witnesses: int, under: str, tmp_path: Path) -> None:
    # Under a device, as under any mode of torch, the layers compute by their plain definition.
    usual = torch.device("cpu") if under == "meta" else nullcontext()
    expected = whole_way(to, witnesses, tmp_path / "a", usual)
    found = whole_way(to, witnesses, tmp_path / "b", UNDER[under]())
    output = expected.pop("output")
    assert torch.equal(found.pop("output"), output)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert str(found[name]) == str(value), name
