"""Non-negative least squares, against scipy's solver."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from dynorm.fit.nonnegative import nonnegative_least_squares


def problem(rows: int, unknowns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix and a target whose plain least squares has negative coefficients."""
    rng = np.random.default_rng(seed)
    matrix = rng.random((rows, unknowns)) ** 3
    target = matrix @ rng.normal(size=unknowns) + 0.1 * rng.normal(size=rows)
    return matrix, target


@pytest.mark.parametrize("unknowns", [1, 2, 5, 9, 17])
def test_the_solutions_are_scipys(unknowns: int) -> None:
    zeros = 0
    for seed in range(16):
        matrix, target = problem(200, unknowns, seed)
        solution = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
        expected, _ = nnls(matrix, target)
        assert solution == pytest.approx(expected, abs=1e-8)
        assert ((solution == 0) == (expected == 0)).all()
        zeros += int((expected == 0).sum())
    assert zeros > 0


def test_columns_of_any_unit_give_the_same_coefficients_in_their_units() -> None:
    units = np.array([1e-9, 1e-3, 1.0, 1e4, 1e9])
    matrix, target = problem(60, 5, 0)
    plain = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
    matrix = matrix * units
    scaled = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
    assert scaled * units == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    "case", ["two like columns", "a column of zeros", "more columns than rows", "all point away"]
)
def test_special_equations_have_a_solution_as_good_as_scipys(case: str) -> None:
    for seed in range(8):
        matrix, target = problem(8 if case == "more columns than rows" else 100, 10, seed)
        if case == "two like columns":
            matrix[:, 3] = matrix[:, 2]
        if case == "a column of zeros":
            matrix[:, 3] = 0
        if case == "all point away":
            target = -matrix.sum(1)
        solution = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
        _, expected = nnls(matrix, target)
        assert np.isfinite(solution).all()
        assert solution.min() >= 0
        assert np.linalg.norm(matrix @ solution - target) == pytest.approx(expected, rel=1e-8)
