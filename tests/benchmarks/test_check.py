"""Who is wrong is found before anyone is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.speed import run as running
from benchmarks.speed.cases import DTYPES, Case, DyTEager, make_case
from benchmarks.speed.check import CHUNK, WrongResultError, check
from benchmarks.speed.contenders import PASSES, Contender, contenders, enter_modules
from benchmarks.speed.settings import Settings
from dynorm.kernels import backend


def entered(case: Case, stage: str, compiled: bool = False) -> list[Contender]:
    return contenders(case, enter_modules(case, (), compiled), stage)


def in_mode(stage: str) -> Any:
    return torch.set_grad_enabled(stage != "forward")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", PASSES)
def test_all_contenders_are_right(stage: str, dtype: str) -> None:
    case = make_case(37, 24, dtype)
    with in_mode(stage):
        assert check(case, entered(case, stage)) > 12
    # The inputs are those of the next pass.
    assert case.leaf.grad is None
    assert all(not p.requires_grad and p.grad is None for p in case.parameters.values())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.slow
@pytest.mark.parametrize("stage", PASSES)
def test_compiled_contenders_are_right(stage: str) -> None:
    torch.compiler.reset()
    case = make_case(8, 16, "float32")
    with in_mode(stage):
        mine = [
            contender
            for contender in entered(case, stage, compiled=True)
            if contender.name.endswith("compiled")
        ]
        assert [contender.name.split()[0] for contender in mine] == [
            "LayerNorm",
            "DyISRU",
            "DyT",
            "Derf",
        ]
        check(case, mine)
        for contender in mine:
            contender.call()
    torch.compiler.reset()


def test_several_chunks_of_rows_are_one_result() -> None:
    case = make_case(3 * CHUNK // 512 + 5, 512, "float32")
    with in_mode("both"):
        check(case, entered(case, "both"))


def wrong_value(results: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    results[key] = results[key].clone()
    results[key].view(-1)[-1] += 0.2
    return results


def not_a_number(results: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    results[key] = results[key].clone()
    results[key].view(-1)[0] = torch.nan
    return results


def other_dtype(results: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return results | {key: results[key].double()}


def other_shape(results: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return results | {key: results[key].reshape(-1, 1)}


@pytest.mark.parametrize("change", [wrong_value, not_a_number, other_dtype, other_shape])
@pytest.mark.parametrize("key", ["y", "x", "weight", "alpha"])
def test_one_wrong_tensor_is_found(change: Callable[..., dict[str, Tensor]], key: str) -> None:
    case = make_case(5, 8, "float32")
    with in_mode("both"):
        mine = next(
            contender for contender in entered(case, "both") if contender.name == "DyT eager"
        )
        original = mine.results
        assert check(case, [mine]) == 5
        with pytest.raises(WrongResultError, match=r"DyT.*nothing"):
            check(case, [replace(mine, results=lambda: change(original(), key))])


def test_an_output_that_is_not_written_is_found() -> None:
    case = make_case(5, 8, "float32")
    with in_mode("forward"):
        given = next(c for c in entered(case, "forward") if c.name == "copy, output given")
        check(case, [given])
        from benchmarks.speed import contenders as module

        lazy = replace(given, results=partial(module._output_given, case, lambda: case.out))
        with pytest.raises(WrongResultError, match=r"copy.*output"):
            check(case, [lazy])


@pytest.mark.skipif(backend() == "torch", reason="the kernels are not built")
def test_kernels_take_part_with_the_output_given() -> None:
    case = make_case(5, 8, "float32")
    with in_mode("forward"):
        outputs = {contender.name: contender.output for contender in entered(case, "forward")}
    assert outputs["DyISRU, output given"] == outputs["copy, output given"] == "given"
    assert outputs["DyISRU"] == outputs["copy"] == "allocated"


@pytest.mark.parametrize("stage", PASSES)
def test_nothing_is_timed_when_one_is_wrong(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    timed = []
    monkeypatch.setattr(running, "PASSES", (stage,))
    monkeypatch.setattr(running, "measure", lambda *arguments, **options: timed.append(arguments))
    monkeypatch.setattr(
        DyTEager,
        "forward",
        lambda self, x: self.weight * torch.tanh(1.1 * self.alpha * x) + self.bias,
    )
    threads = torch.get_num_threads()
    with pytest.raises(WrongResultError, match="DyT eager"):
        running.run(Settings(sizes=((4, 8),), dtypes=("float32",), compiled=False), block=False)
    assert timed == []
    assert torch.get_num_threads() == threads
