"""The figures: their words and numbers; that files are valid, and the same in every run."""

from __future__ import annotations

import struct
import sys
import zlib
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dynorm
from dynorm.paper.figures import FIGURES, FORMATS, check_figures, draw, render, with_mean
from dynorm.paper.generality import Reproduction, reproduce, study_all


@pytest.fixture(scope="module")
def reproduction() -> Reproduction:
    return reproduce(generality=study_all(samples=30))


def labels(axes: Axes) -> list[str]:
    return [str(label) for label in axes.get_legend_handles_labels()[1]]


def line(axes: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


def test_figure_1_has_four_curves_between_the_bounds(reproduction: Reproduction) -> None:
    (axes,) = draw("fig1", reproduction).axes
    bounds = [one for one in axes.lines if one.get_linestyle() == "--"]
    assert [one.get_ydata()[0] for one in bounds if len(set(one.get_ydata())) == 1] == [7.0, -7.0]
    assert axes.get_xlim() == (-60, 60)
    x, y = line(axes, r"DyT, $\alpha = 0.05$")
    np.testing.assert_allclose(y, 7 * np.tanh(0.05 * x), atol=1e-12)
    x, y = line(axes, r"DyISRU, $\beta = 500$")
    np.testing.assert_allclose(y, 7 * x / np.sqrt(500 + x * x), atol=1e-12)
    assert len(labels(axes)) == 5


def test_figure_2_has_the_steps_0_1_2_and_9(reproduction: Reproduction) -> None:
    panels = draw("fig2", reproduction).axes
    simulation = reproduction.simulation
    assert [axes.get_title("left") for axes in panels] == [
        f"({a})  $S = {s}$" for a, s in zip("abcd", (0, 1, 2, 9), strict=True)
    ]
    x, y = line(panels[0], "sample")
    assert x.tolist() == simulation.tokens[0].tolist()
    assert y.tolist() == simulation.normalized[0].tolist()
    for axes, step in zip(panels[1:], (1, 2, 9), strict=True):
        x, y = line(axes, "other channels")
        assert y.tolist() == simulation.normalized[step, :-1].tolist()
        (outliers,) = axes.collections
        expected = np.stack([simulation.outliers[:step], simulation.outputs[:step]], axis=-1)
        np.testing.assert_array_equal(np.asarray(outliers.get_offsets()), expected)
        x, y = np.asarray(outliers.get_offsets()).T
        assert axes.get_xlim()[0] < min(x) <= max(x) < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < min(y) <= max(y) < axes.get_ylim()[1]
    x, y = line(panels[3], "through the outliers")
    np.testing.assert_allclose(np.interp(simulation.outliers, x, y), simulation.outputs, atol=1e-3)
    assert "through the outliers" not in labels(panels[1])


def test_figure_3_has_the_fits_over_the_data_and_the_residuals_below(
    reproduction: Reproduction,
) -> None:
    top, bottom = draw("fig3", reproduction).axes
    simulation, fits = reproduction.simulation, reproduction.fits
    x, y = line(top, r"DyT, $\alpha = 0.04861$")
    np.testing.assert_allclose(y, fits["DyT"].function(x))
    assert r"DyISRU, $\beta = 301.1$" in labels(top)
    assert (
        line(top, "other channels, $S = 9$")[1].tolist() == simulation.normalized[9, :-1].tolist()
    )
    for name, mean in (("DyT", "0.33"), ("DyISRU", "0.0048")):
        x, y = line(bottom, f"{name}: ${mean}$")
        assert x.tolist() == simulation.outliers.tolist()
        assert y.tolist() == fits[name].residuals.tolist()


def test_figure_4_has_every_function_down_to_the_closed_form(reproduction: Reproduction) -> None:
    (axes,) = draw("fig4", reproduction).axes
    assert axes.get_yscale() == "log"
    assert [label.split(":")[0] for label in labels(axes)] == [
        "linear",
        "Derf",
        "DyT",
        "DyISRU",
        "closed form",
    ]
    assert line(axes, labels(axes)[-1])[1].max() < 1e-13
    low, high = axes.get_ylim()
    drawn = np.concatenate([line(axes, label)[1] for label in labels(axes)])
    assert low < drawn.min() < drawn.max() < high


def test_figure_5_has_the_study(reproduction: Reproduction) -> None:
    assert reproduction.generality is not None
    samples, *panels = draw("fig5", reproduction).axes
    counts = [sum(patch.get_height() for patch in bars.patches) for bars in samples.containers]
    assert counts == [30, 30, 30]
    for axes, studies in zip(panels, reproduction.generality.axes.values(), strict=True):
        _, y = line(axes, "DyISRU")
        np.testing.assert_allclose(y, [np.median(one.residuals["DyISRU"]) for one in studies])
        wins = [text.get_text() for text in axes.texts]
        assert wins == [f"{100 * one.dyt_wins:.3g}%" for one in studies if one.dyt_wins]
    assert panels[2].texts


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_axes_are_labelled(name: str, reproduction: Reproduction) -> None:
    figure = draw(name, reproduction)
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= width
    assert box.y1 <= height
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert axes.get_xlabel() or axes.get_subplotspec().is_first_row()  # type: ignore[union-attr]


def test_titles_do_not_overlap(reproduction: Reproduction) -> None:
    for axes in draw("fig5", reproduction).axes:
        left, right = (title.get_window_extent() for title in (axes._left_title, axes._right_title))  # type: ignore[attr-defined]
        assert left.width > 0
        assert left.x1 < right.x0 or not axes.get_title("right")


@pytest.mark.parametrize("name", FIGURES)
def test_files_are_valid_and_the_same_in_every_run(name: str, reproduction: Reproduction) -> None:
    figure = draw(name, reproduction)
    png, svg = (render(figure, format) for format in FORMATS)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", png[16:20])[0] >= 1200
    # Every chunk's checksum.
    position = 8
    while position < len(png):
        (length,) = struct.unpack(">I", png[position : position + 4])
        end = position + 8 + length
        assert zlib.crc32(png[position + 4 : end]) == struct.unpack(">I", png[end : end + 4])[0]
        position = end + 4
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20
    assert b"dc:date" not in svg
    again = draw(name, reproduction)
    assert render(again, "svg") == svg
    assert render(again, "png", dpi=60) == render(figure, "png", dpi=60)


def test_the_users_settings_do_not_show_and_stay(reproduction: Reproduction) -> None:
    plain = render(draw("fig1", reproduction), "png")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "lines.linewidth": 9}):
        assert render(draw("fig1", reproduction), "png") == plain
        assert matplotlib.rcParams["font.size"] == 20


def test_no_window_system_is_touched(
    reproduction: Reproduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert isinstance(draw("fig2", reproduction), Figure)


@pytest.mark.parametrize(
    ("mean", "text"), [(0.327, "DyT: $0.33$"), (5.9e-16, r"DyT: $5.9 \times 10^{-16}$")]
)
def test_means_in_legends(mean: float, text: str) -> None:
    assert with_mean("DyT", mean) == text


def test_other_samples_are_drawn_too() -> None:
    few = reproduce(channels=3, sigma=0.5, seed=9)
    for name in ("fig2", "fig3", "fig4"):
        assert draw(name, few).axes


def test_unknown_names_are_refused_with_the_known_ones(reproduction: Reproduction) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"fig5.*\'fig6\'"):
        draw("fig6", reproduction)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"svg.*\'gif\'"):
        render(draw("fig1", reproduction), "gif")
    with pytest.raises(dynorm.errors.ArgumentError, match=r"fig5.*shows"):
        draw("fig5", reproduce())
    with pytest.raises(dynorm.errors.ArgumentError, match=r"leave.*seed"):
        check_figures(["fig1", "fig5"], with_study=False)


def test_without_matplotlib_the_message_says_what_to_install(
    reproduction: Reproduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        dynorm.errors.ArgumentError,
        match=r"matplotlib.*dynorm\[paper\]",
    ):
        draw("fig1", reproduction)
