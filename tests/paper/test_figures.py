"""The figures: their words and numbers; that files are valid, and the same in every run."""

import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynorm.errors import ArgumentError
from dynorm.paper.figures import FIGURES, draw, render
from dynorm.paper.fits import Array
from dynorm.paper.generality import Reproduction, reproduce

every_figure = pytest.mark.parametrize("name", FIGURES)


@pytest.fixture(scope="module")
def reproduction() -> Reproduction:
    return reproduce(1)


@pytest.fixture(scope="module")
def figures(reproduction: Reproduction) -> dict[str, Figure]:
    return {name: draw(name, reproduction) for name in FIGURES}


def labels(axes: Axes) -> list[str]:
    return [str(label) for label in axes.get_legend_handles_labels()[1]]


def line(axes: Axes, label: str) -> tuple[Array, Array]:
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


def test_figure_1_has_four_curves_between_the_bounds(figures: dict[str, Figure]) -> None:
    (axes,) = figures["fig1"].axes
    x, y = line(axes, r"DyT, $\alpha = 0.05$")
    np.testing.assert_allclose(y, 7 * np.tanh(0.05 * x), atol=1e-12)
    x, y = line(axes, r"DyISRU, $\beta = 500$")
    np.testing.assert_allclose(y, 7 * x / np.sqrt(500 + x * x), atol=1e-12)
    assert line(axes, labels(axes)[-1])[1].tolist() == [7, 7]
    assert len(labels(axes)) == 5


def test_figure_2_has_the_steps_0_1_2_and_9(
    reproduction: Reproduction, figures: dict[str, Figure]
) -> None:
    panels = figures["fig2"].axes
    simulation = reproduction.simulation
    x, y = line(panels[0], "sample")
    assert x.tolist() == simulation.tokens[0].tolist()
    assert y.tolist() == simulation.normalized[0].tolist()
    for axes, step in zip(panels[1:], (1, 2, 9), strict=True):
        assert axes.get_title("left").endswith(f"$S = {step}$")
        _, y = line(axes, "other channels")
        assert y.tolist() == simulation.normalized[step, :-1].tolist()
        (outliers,) = axes.collections
        expected = np.stack([simulation.outliers[:step], simulation.outputs[:step]], axis=-1)
        np.testing.assert_array_equal(np.asarray(outliers.get_offsets()), expected)
    x, y = line(panels[3], "through the outliers")
    np.testing.assert_allclose(np.interp(simulation.outliers, x, y), simulation.outputs, atol=1e-3)


def test_figure_3_has_the_fits_over_the_data_and_the_residuals_below(
    reproduction: Reproduction, figures: dict[str, Figure]
) -> None:
    top, bottom = figures["fig3"].axes
    simulation, fits = reproduction.simulation, reproduction.fits
    x, y = line(top, r"DyT, $\alpha = 0.04861$")
    np.testing.assert_allclose(y, fits["DyT"].function(x))
    assert r"DyISRU, $\beta = 301.1$" in labels(top)
    for name, mean in (("DyT", "0.33"), ("DyISRU", "0.0048")):
        x, y = line(bottom, f"{name}: {mean}")
        assert x.tolist() == simulation.outliers.tolist()
        assert y.tolist() == fits[name].residuals.tolist()


@every_figure
def test_nothing_is_cut_off_and_axes_are_labelled(name: str, figures: dict[str, Figure]) -> None:
    figure = figures[name]
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= width
    assert box.y1 <= height
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert figure.axes[-1].get_xlabel()


def test_files_are_valid_and_the_same_in_every_run(
    reproduction: Reproduction, figures: dict[str, Figure]
) -> None:
    drawings = figures["fig3"], draw("fig3", reproduction)
    png, again = (render(figure, dpi=60) for figure in drawings)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert again == png


def test_the_users_settings_do_not_show_and_stay(
    reproduction: Reproduction, figures: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No window system is touched.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plain = render(figures["fig1"], dpi=60)
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "lines.linewidth": 9}):
        assert render(draw("fig1", reproduction), dpi=60) == plain
        assert matplotlib.rcParams["font.size"] == 20


def test_a_missing_matplotlib_is_named(
    reproduction: Reproduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"matplotlib.*dynorm\[paper\]"):
        draw("fig1", reproduction)
