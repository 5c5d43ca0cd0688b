"""Non-negative least squares, against scipy's solver and against the conditions of an optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor

from dynorm.fit.nonnegative import nonnegative_least_squares


def problems(
    count: int, rows: int, unknowns: int, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return matrices and targets whose plain least squares has negative coefficients."""
    rng = np.random.default_rng(seed)
    matrices = []
    targets = []
    for _ in range(count):
        matrix = rng.random((rows, unknowns)) ** 3
        matrices.append(matrix)
        targets.append(matrix @ rng.normal(size=unknowns) + 0.1 * rng.normal(size=rows))
    return matrices, targets


def solve(matrices: list[np.ndarray], targets: list[np.ndarray]) -> Tensor:
    matrix = torch.from_numpy(np.stack(matrices))
    target = torch.from_numpy(np.stack(targets))
    return nonnegative_least_squares(matrix.mT @ matrix, (matrix.mT @ target[:, :, None])[:, :, 0])


@pytest.mark.parametrize("unknowns", [1, 2, 5, 9, 40])
def test_the_solutions_are_scipys(unknowns: int) -> None:
    matrices, targets = problems(16, 200, unknowns)
    solutions = solve(matrices, targets)
    zeros = 0
    for matrix, target, solution in zip(matrices, targets, solutions, strict=True):
        expected, _ = nnls(matrix, target)
        assert solution.numpy() == pytest.approx(expected, abs=1e-8)
        assert ((solution == 0).numpy() == (expected == 0)).all()
        zeros += int((expected == 0).sum())
    assert zeros > 0


def test_an_optimum_without_negative_values_is_that_of_plain_least_squares() -> None:
    matrices, _ = problems(4, 100, 6)
    wanted = torch.rand(4, 6, dtype=torch.float64) + 0.1
    targets = [m @ g for m, g in zip(matrices, wanted.numpy(), strict=True)]
    assert torch.allclose(solve(matrices, targets), wanted, rtol=1e-8)


def test_nothing_lessens_the_error_at_a_solution() -> None:
    """Where a coefficient is positive the error's slope is 0, and where it is 0 the error would grow."""
    matrices, targets = problems(32, 30, 12, seed=1)
    for matrix, target, solution in zip(
        matrices, targets, solve(matrices, targets).numpy(), strict=True
    ):
        slope = matrix.T @ (matrix @ solution - target)
        size = np.abs(matrix.T @ target).max()
        assert solution.min() >= 0
        assert np.abs(slope[solution > 0]).max(initial=0) < 1e-9 * size
        assert slope[solution == 0].min(initial=0) > -1e-9 * size


def test_the_problems_of_a_batch_do_not_influence_each_other() -> None:
    matrices, targets = problems(8, 50, 7)
    together = solve(matrices, targets)
    for matrix, target, solution in zip(matrices, targets, together, strict=True):
        assert torch.allclose(solve([matrix], [target])[0], solution, rtol=1e-12)


def test_columns_of_any_unit_give_the_same_coefficients_in_their_units() -> None:
    matrices, targets = problems(8, 60, 5)
    units = np.array([1e-9, 1e-3, 1.0, 1e4, 1e9])
    plain = solve(matrices, targets)
    scaled = solve([m * units for m in matrices], targets)
    assert torch.allclose(scaled * torch.from_numpy(units), plain, rtol=1e-6)


@pytest.mark.parametrize(
    "case", ["two like columns", "a column of zeros", "more columns than rows"]
)
def test_singular_equations_have_a_solution_as_good_as_scipys(case: str) -> None:
    rows = 8 if case == "more columns than rows" else 100
    matrices, targets = problems(8, rows, 10)
    for matrix in matrices:
        if case == "two like columns":
            matrix[:, 3] = matrix[:, 2]
        if case == "a column of zeros":
            matrix[:, 3] = 0
    for matrix, target, solution in zip(
        matrices, targets, solve(matrices, targets).numpy(), strict=True
    ):
        _, expected = nnls(matrix, target)
        error = np.linalg.norm(matrix @ solution - target)
        assert np.isfinite(solution).all()
        assert solution.min() >= 0
        assert error == pytest.approx(expected, rel=1e-8)


def test_a_target_that_every_column_points_away_from_gives_zeros() -> None:
    matrices, _ = problems(3, 20, 4)
    solutions = solve(matrices, [-m.sum(1) for m in matrices])
    assert torch.equal(solutions, torch.zeros(3, 4, dtype=torch.float64))


def test_a_target_of_zeros_gives_zeros() -> None:
    matrices, _ = problems(3, 20, 4)
    assert torch.equal(solve(matrices, [np.zeros(20)] * 3), torch.zeros(3, 4, dtype=torch.float64))
