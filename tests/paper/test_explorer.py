"""The explorer: its page is whole and well-formed, and in a real browser it draws, follows, and is right."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import latex2mathml.converter
import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from dynorm import cli, theory
from dynorm.errors import ArgumentError, StorageError
from dynorm.functional import derf, dyisru, dyisru_general, layer_norm, scaled_dyt
from dynorm.paper.explorer import SCRIPTS, build_page
from dynorm.paper.fits import fit
from dynorm.paper.simulation import simulate
from tests.pages import Page
from tests.paper.browser import Browser, chromium, require_browser

STEP = 5.0
PACKAGE = files("dynorm.paper.explorer")


class Form(Page):
    """A page with controls."""

    VOID = Page.VOID | {"input"}


class TestPage:
    def test_it_is_whole(self) -> None:
        text = build_page()
        assert text.startswith("<!doctype html>\n")
        page = Form(text)
        ids = Counter(value for _, name, value in page.attributes if name == "id")
        assert set(ids.values()) == {1}
        wanted = {
            value[1:]
            for _, name, value in page.attributes
            if name == "href" and value.startswith("#")
        }
        assert wanted
        assert wanted <= set(ids)
        assert "$" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
        assert text == build_page()

    def test_it_names_nothing_to_load(self) -> None:
        page = Form(build_page())
        assert not page.tags.keys() & {"img", "iframe", "object", "embed"}
        assert not [
            value for _, name, value in page.attributes if name in ("src", "srcset", "action")
        ]
        assert [
            value for tag, name, value in page.attributes if (tag, name) == ("link", "href")
        ] == ["data:,"]
        assert page.tags["script"] == 2

    def test_scripts_cannot_end_their_element_early(self) -> None:
        for name in (*SCRIPTS, "vendor/uPlot.iife.min.js"):
            assert "</script" not in PACKAGE.joinpath(name).read_text("utf-8").lower()
            assert "<!--" not in PACKAGE.joinpath(name).read_text("utf-8")

    def test_every_script_is_in_it(self) -> None:
        assert {path.name for path in PACKAGE.iterdir() if path.name.endswith(".js")} == set(
            SCRIPTS
        )

    def test_formulas_are_those_of_their_source(self) -> None:
        found = re.findall(
            r'<math alttext="([^"]+)">(.*?)</math>',
            PACKAGE.joinpath("equations.html").read_text("utf-8"),
        )
        assert len(found) > 15
        for source, markup in found:
            assert f">{markup}</math>" in latex2mathml.converter.convert(unescape(source))

    def test_the_bundled_library_is_the_published_one(self) -> None:
        vendor = PACKAGE.joinpath("vendor")
        sums = re.findall(
            r"^([0-9a-f]{64})  (\S+)$",
            vendor.joinpath("README.txt").read_text("utf-8"),
            re.MULTILINE,
        )
        assert {name for _, name in sums} == {path.name for path in vendor.iterdir()} - {
            "README.txt"
        }
        for digest, name in sums:
            assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == digest
        assert vendor.joinpath("LICENSE").read_text("utf-8").strip() in build_page()


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["explore", *arguments])

    def test_it_writes_the_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.run().exit_code == 0
        assert (tmp_path / "explore.html").read_text("utf-8") == build_page()

    def test_a_file_is_not_replaced_unasked(self, tmp_path: Path) -> None:
        path = tmp_path / "page.html"
        path.write_text("mine")
        assert isinstance(self.run("--out", str(path)).exception, StorageError)
        assert path.read_text() == "mine"
        assert self.run("--out", str(path), "--overwrite").exit_code == 0
        assert path.read_text("utf-8") == build_page()

    @pytest.mark.parametrize("name", ["", "file/page.html"])
    def test_paths_that_cannot_be_written(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_text("")
        assert isinstance(self.run("--out", str(tmp_path / name)).exception, StorageError)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "explore.html"
    path.write_text(build_page(), "utf-8")
    return path


@pytest.fixture(scope="module")
def started(page: Path) -> Iterator[Browser]:
    require_browser()
    with chromium() as browser:
        browser.open(page)
        browser.settle()
        yield browser


@pytest.fixture
def browser(started: Browser) -> Browser:
    started.reset()
    return started


def leaves(addresses: list[str]) -> list[str]:
    """Return the addresses that are neither in the file nor the file."""
    return [address for address in addresses if not address.startswith(("file:", "data:"))]


class TestLoading:
    def test_it_complains_of_nothing_and_asks_for_nothing(
        self, browser: Browser, page: Path
    ) -> None:
        browser.open(page)
        state, picture = browser.state(), browser.pixels("main-plot")
        browser.set(channels=50, sigma=1, steps=3, t=0.5, view="sample")
        browser.find("#reset").click()
        browser.settle()
        assert (browser.state(), browser.pixels("main-plot")) == (state, picture)
        assert browser.complaints() == []
        asked = browser.requests()
        assert [address for address in asked if address.startswith("file:")]
        assert leaves(asked) == []

    def test_the_page_forbids_requests_itself(self, browser: Browser) -> None:
        script = (
            "const done = arguments[0]; fetch('http://127.0.0.1:9/')"
            ".then(() => done('sent'), () => done('refused'))"
        )
        assert browser.driver.execute_async_script(script) == "refused"
        assert any("Content Security Policy" in message for message in browser.complaints())


def reference(state: dict[str, Any], constant: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return the values that the page should show, by the Python functions."""
    channels, t = state["channels"], state["t"]
    simulation = simulate(channels, state["sigma"], seed=state["seed"])
    x = torch.from_numpy(simulation.tokens[0].copy())
    x[-1] += STEP * state["steps"]
    y = layer_norm(x, eps=0.0)
    centre, beta = theory.leave_one_out_mean(x), theory.leave_one_out_beta(x)
    b = torch.tensor(constant["dyisru"], dtype=x.dtype)
    on_path = dyisru_general(x, beta ** (1 - t) * b**t, (1 - t) * centre)
    outliers, outputs = torch.from_numpy(simulation.outliers), torch.from_numpy(simulation.outputs)
    functions = functions_of(constant, channels)
    return {
        "x": x,
        "y": y,
        "derivative": theory.layer_norm_derivative(x),
        "path": on_path,
        "outlierX": x[-1],
        "outlierY": y[-1],
        "outlierSlope": theory.layer_norm_derivative(x)[-1],
        "mu": x.mean(),
        "sigma": x.std(correction=0),
        "factor": theory.layer_norm_slope_factor(x),
        "leftOutMean": centre[-1],
        "leftOutVariance": theory.leave_one_out_variance(x)[-1],
        "closedBeta": beta[-1],
        "channelBeta": theory.channel_beta(x)[-1],
        "leaveOneOutMean": centre,
        "leaveOneOutVariance": theory.leave_one_out_variance(x),
        "toLayerNorm": (on_path - y).abs().mean(),
        "toPointwise": (on_path - dyisru(x, b)).abs().mean(),
        **{
            f"residual.{name}": (f(outliers) - outputs).abs().mean()
            for name, f in functions.items()
        },
        "outliers.x": outliers,
        "outliers.y": outputs,
    }


def functions_of(constant: dict[str, float], channels: int) -> dict[str, Any]:
    """Return the point-wise functions, whatever the number of points that they are asked for."""
    scale = math.sqrt(channels - 1)
    ratio = {name: torch.tensor([value], dtype=torch.float64) for name, value in constant.items()}
    return {
        "dyt": lambda x: scaled_dyt(x.expand(channels, -1), ratio["dyt"], dim=0)[0],
        "derf": lambda x: derf(x, ratio["derf"], scale=scale),
        "dyisru": lambda x: dyisru(x, ratio["dyisru"], scale=scale),
    }


def shown(numbers: dict[str, Any], name: str) -> torch.Tensor:
    """Return one of the page's numbers or lists."""
    first, _, second = name.partition(".")
    value = numbers[first]
    if isinstance(value, list) and second:
        value = [item[second] for item in value]
    elif second:
        value = value[second]
    return torch.tensor(value, dtype=torch.float64)


def assert_same(
    numbers: dict[str, Any], name: str, expected: torch.Tensor, size: float = 1.0
) -> None:
    """Compare to a relative 1e-9; values that are small by cancellation, relative to the cancelled ones."""
    assert_close(
        shown(numbers, name),
        expected,
        rtol=1e-9,
        atol=1e-12 * size,
        msg=lambda words: f"{name}: {words}",
    )


SETTINGS = [
    {},
    {"steps": 9, "t": 0.5},
    {"channels": 2, "steps": 3, "t": 0.25, "alpha": 0.1, "derf": 0.2, "beta": 40},
    {"channels": 3, "seed": 7, "steps": 1.5, "t": 1},
    {"channels": 7, "seed": 42, "sigma": 0.5, "steps": -4, "t": 0.75, "beta": "closed"},
    {"channels": 50, "seed": 4294967295, "sigma": 3.25, "steps": 0.01, "alpha": 0.3},
    {
        "channels": 100,
        "seed": 2,
        "sigma": 10,
        "steps": 7,
        "t": 0.1,
        "derf": 0.011,
        "beta": 12345.678,
    },
    {"channels": 1000, "seed": 3, "sigma": 1, "steps": 12, "t": 0.999},
]


class TestNumbers:
    @pytest.mark.parametrize(
        "choices", SETTINGS, ids=lambda choices: "-".join(f"{k}{v}" for k, v in choices.items())
    )
    def test_they_are_those_of_python(self, choices: dict[str, Any], browser: Browser) -> None:
        """One page for all of its numbers, because a page takes longest to load."""
        assert browser.set(**choices)
        numbers, state = browser.numbers(), browser.state()
        self.check_values(numbers, state)
        self.check_curves(numbers)
        if state["channels"] > 2:
            self.check_fits(numbers, state)
        assert browser.set(witness="outlier")
        self.check_witness(browser.numbers())

    def check_values(self, numbers: dict[str, Any], state: dict[str, Any]) -> None:
        constant = numbers["constant"]
        spread = max(1.0, float(torch.tensor(numbers["x"]).square().sum()))
        for name, expected in reference(state, constant).items():
            size = (
                spread
                if name in ("channelBeta", "closedBeta", "leftOutVariance", "leaveOneOutVariance")
                else 1.0
            )
            assert_same(numbers, name, expected, size)
        assert numbers["closedResidual"] < 1e-12

    def check_curves(self, numbers: dict[str, Any]) -> None:
        curves = numbers["curves"]
        x = torch.tensor(curves["x"], dtype=torch.float64, requires_grad=True)
        functions = functions_of(numbers["constant"], len(numbers["x"]))
        functions["closed"] = lambda x: dyisru_general(
            x,
            shown(numbers, "closedBeta"),
            numbers["leftOutMean"],
            scale=math.sqrt(len(numbers["x"]) - 1),
        )
        for name, function in functions.items():
            y = function(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
            assert_same(curves["value"], name, y.detach())
            if len(numbers["x"]) > 2 or name != "closed":
                assert_same(curves["slope"], name, slope)
            if name != "closed":
                assert_same(curves["residual"], name, y.detach() - shown(curves["value"], "closed"))

    def check_fits(self, numbers: dict[str, Any], state: dict[str, Any]) -> None:
        simulation = simulate(state["channels"], state["sigma"], seed=state["seed"])
        for name, title in (("dyt", "DyT"), ("derf", "Derf"), ("dyisru", "DyISRU")):
            found = fit(title, simulation.outliers, simulation.outputs, state["channels"])
            assert_same(numbers, f"fits.{name}", torch.tensor(found.value, dtype=torch.float64))
            assert_same(
                numbers,
                f"residualAtFit.{name}",
                torch.tensor(found.mean_absolute_residual, dtype=torch.float64),
            )

    def test_the_papers_figures(self, browser: Browser) -> None:
        cell = {
            name: browser.find(f"[data-number={name}]").text
            for name in ("dyt-fit", "dyisru-fit", "channel-beta")
        }
        assert cell == {"dyt-fit": "0.04861", "dyisru-fit": "301.06", "channel-beta": "292.204"}
        assert browser.find("[data-number=dyt-residual-fit]").text == "0.328"
        assert browser.find("[data-number=dyisru-residual-fit]").text == "0.00481"
        assert re.fullmatch(r"\S+ × 10⁻¹\S", browser.find("[data-number=closed-residual]").text)

    def test_two_channels_have_no_fit(self, browser: Browser) -> None:
        simulation = simulate(2)
        with pytest.raises(ArgumentError):
            fit("DyT", simulation.outliers, simulation.outputs, 2)
        before = browser.numbers()["constant"]
        assert browser.set(channels=2)
        numbers = browser.numbers()
        assert set(numbers["fits"].values()) == {None}
        assert numbers["constant"] == before
        assert "best" in browser.find("#alpha-complaint").text
        assert browser.find("[data-number=dyt-fit]").text == "none"
        assert browser.set(channels=100)
        assert browser.find("#alpha-complaint").text == ""
        assert browser.numbers()["constant"] == before

    def check_witness(self, numbers: dict[str, Any]) -> None:
        x, y = shown(numbers, "x"), shown(numbers, "y")
        beta, outlier = shown(numbers, "constant.dyisru"), torch.tensor([len(x) - 1])
        gain = torch.ones(1, dtype=x.dtype)
        expected = dyisru(x, beta, scale=math.sqrt(len(x) - 1), witnesses=outlier, gain=gain)
        assert_same(numbers, "witness", expected)
        assert_same(numbers, "witnessToLayerNorm", (expected - y).abs().mean())
        alone = dyisru(x, beta, scale=math.sqrt(len(x) - 1))
        assert_same(numbers, "pointwiseToLayerNorm", (alone - y).abs().mean())

    def test_with_a_witness_the_others_shrink_as_layer_norms_do(self, browser: Browser) -> None:
        browser.set(steps=9)
        before = browser.pixels("main-plot")
        browser.find("#witness").click()
        browser.settle()
        assert browser.state()["witness"] == "outlier"
        assert browser.pixels("main-plot") != before
        numbers = browser.numbers()
        # The rest is the centre, which moves with the outlier.
        assert numbers["witnessToLayerNorm"] < 0.25 * numbers["pointwiseToLayerNorm"]
        x, y, seen = (shown(numbers, name)[:-1] for name in ("x", "y", "witness"))
        steep = (y[-1] - y[0]) / (x[-1] - x[0])
        assert float((seen[-1] - seen[0]) / (x[-1] - x[0])) == pytest.approx(float(steep), rel=0.05)
        assert browser.find("[data-number=witness-to-layer-norm]").text != ""
        browser.find("#reset").click()
        browser.settle()
        assert not browser.find("#witness").is_selected()


def move_slider(browser: Browser, name: str, keys: str) -> None:
    browser.find(f"#{name}-slider").send_keys(keys)
    browser.settle()


def type_in(browser: Browser, name: str, text: str) -> None:
    field = browser.find(f"#{name}")
    field.clear()
    field.send_keys(text)
    browser.settle()


PLOTS = ("main-plot", "residual-plot", "slope-plot")
FRAGMENT = """const done = arguments[0];
const wait = () => (location.hash ? done(location.hash) : setTimeout(wait, 20));
wait();"""


class TestControls:
    def test_every_slider_changes_the_picture(self, browser: Browser) -> None:
        from selenium.webdriver.common.keys import Keys

        # The outlier and the annealed layer are not in all of them.
        parts = {"steps": {"main-plot", "slope-plot"}, "t": {"main-plot"}}
        before = {plot: browser.pixels(plot) for plot in PLOTS}
        for name in ("steps", "t", "channels", "sigma", "alpha", "derf", "beta"):
            choice = browser.state()[name]
            move_slider(browser, name, Keys.PAGE_UP)
            now = browser.state()[name]
            assert now != choice
            changed = {plot for plot in PLOTS if browser.pixels(plot) != before[plot]}
            assert changed == parts.get(name, set(PLOTS)), name
            number = browser.find(f"#{name}").get_property("valueAsNumber")
            assert number == pytest.approx(now, rel=1e-5)
            browser.find("#reset").click()
            browser.settle()

    def test_another_sample(self, browser: Browser) -> None:
        before = browser.pixels("main-plot")
        browser.find("#seed-next").click()
        browser.settle()
        assert browser.state()["seed"] == 2
        assert browser.pixels("main-plot") != before

    def test_layers_come_and_go(self, browser: Browser) -> None:
        before = browser.pixels("main-plot")
        for layer in ("points", "closed", "dyt", "derf", "dyisru", "path"):
            box = browser.find(f"[data-layer={layer}]")
            for is_there in (False, True):
                box.click()
                browser.settle()
                assert (browser.pixels("main-plot") == before) == is_there, layer

    def test_fits_follow_the_sample_until_moved_by_hand(self, browser: Browser) -> None:
        browser.find("#beta-closed").click()
        browser.set(sigma=3)
        numbers = browser.numbers()
        assert numbers["constant"]["dyisru"] == numbers["closedBeta"]
        assert numbers["constant"]["dyt"] == numbers["fits"]["dyt"]
        type_in(browser, "beta", "250")
        assert browser.find("#beta-closed").get_attribute("aria-pressed") == "false"
        browser.find("#beta-fit").click()
        browser.settle()
        numbers = browser.numbers()
        assert numbers["constant"]["dyisru"] == numbers["fits"]["dyisru"]
        assert browser.find("#beta-fit").get_attribute("aria-pressed") == "true"

    def test_a_position_is_a_number_of_steps(self, browser: Browser) -> None:
        type_in(browser, "position", "20")
        assert browser.numbers()["outlierX"] == pytest.approx(20, rel=1e-14)
        sample = simulate().tokens[0]
        assert browser.state()["steps"] == pytest.approx((20 - sample[-1]) / STEP, rel=1e-12)

    def test_a_number_can_be_typed_sign_by_sign(self, browser: Browser) -> None:
        for name, text in (
            ("position", "-20.55"),
            ("steps", "0.05"),
            ("sigma", "1.05"),
            ("channels", "120"),
        ):
            field = browser.find(f"#{name}")
            field.clear()
            for sign in text:
                field.send_keys(sign)
                browser.settle()
            assert (field.get_property("value"), field.get_attribute("aria-invalid")) == (
                text,
                None,
            )
        assert browser.state()["steps"] == 0.05

    BAD = (
        ("channels", "1", "from 2 to 4096, got 1"),
        ("channels", "2.5", "whole number"),
        ("channels", "", "whole number"),
        ("sigma", "0", "positive"),
        ("sigma", "-2", "positive"),
        ("sigma", "", "positive.*, got nothing"),
        ("seed", "-1", "seed"),
        ("steps", "", "number"),
        ("steps", "1e99", "number"),
        ("alpha", "0", "positive"),
        ("beta", "-3", "positive"),
        ("t", "1.5", "from 0 to 1"),
    )

    def test_bad_input_is_named_and_the_picture_stays(self, browser: Browser) -> None:
        for name, text, words in self.BAD:
            self.check_complaint(name, text, words, browser)

    def check_complaint(self, name: str, text: str, words: str, browser: Browser) -> None:
        before, state = browser.pixels("main-plot"), browser.state()
        field = browser.find(f"#{name}")
        # As a paste would do it: typing goes through shorter numbers, which may be good ones.
        browser.run(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))",
            field,
            text,
        )
        browser.settle()
        complaint = browser.find(f"#{name}-complaint")
        assert re.search(words, complaint.text)
        assert complaint.is_displayed()
        assert field.get_attribute("aria-invalid") == "true"
        assert (browser.pixels("main-plot"), browser.state()) == (before, state)
        browser.find("#reset").click()
        browser.settle()
        assert complaint.text == ""
        assert field.get_attribute("aria-invalid") is None
        assert field.get_property("value") != text

    def test_equal_channels_are_refused(self, browser: Browser) -> None:
        # Not every position is met to the last bit, as it becomes an S: this is the first sample
        # where it is.
        samples = ((seed, *simulate(2, seed=seed).tokens[0]) for seed in range(100))
        seed, other = next(
            (s, low) for s, low, high in samples if high + STEP * ((low - high) / STEP) == low
        )
        assert browser.set(channels=2, seed=seed)
        state, before = browser.state(), browser.pixels("main-plot")
        assert not browser.set(position=float(other))
        assert "equal" in browser.find("#position-complaint").text
        assert (browser.state(), browser.pixels("main-plot")) == (state, before)

    def test_the_address_keeps_the_settings(self, browser: Browser, page: Path) -> None:
        choices = {
            "channels": 50,
            "beta": "closed",
            "alpha": 0.2,
            "t": 0.5,
            "hidden": "derf.path",
            "view": "sample",
        }
        assert browser.set(**choices)
        fragment = browser.driver.execute_async_script(FRAGMENT)
        picture = browser.pixels("main-plot")
        browser.open(page, fragment)
        browser.settle()
        assert browser.state().items() >= choices.items()
        assert browser.pixels("main-plot") == picture

    def test_a_link_with_settings_is_followed(self, browser: Browser) -> None:
        browser.run("location.hash = '#channels=7&steps=2'")
        browser.settle()
        browser.settle()
        assert (browser.state()["channels"], browser.state()["steps"]) == (7, 2)

    def test_a_complaint_goes_when_the_value_changes_otherwise(self, browser: Browser) -> None:
        from selenium.webdriver.common.keys import Keys

        browser.find("#steps").clear()
        assert browser.find("#steps-complaint").text != ""
        browser.find("#handle").send_keys(Keys.ARROW_RIGHT)
        browser.settle()
        assert browser.find("#steps-complaint").text == ""
        assert browser.find("#steps").get_property("valueAsNumber") == pytest.approx(5.1)

    def test_nonsense_in_the_address_is_ignored(self, browser: Browser, page: Path) -> None:
        browser.open(page, "#channels=1&sigma=x&t=&view=none&seed=5&unknown=3")
        browser.settle()
        assert browser.state() == {
            **browser.state(),
            "channels": 100,
            "sigma": 2,
            "t": 0,
            "view": "all",
            "seed": 5,
        }
        assert browser.complaints() == []


class TestHandle:
    def test_the_mouse_drags_the_outlier(self, browser: Browser) -> None:
        from selenium.webdriver import ActionChains

        before = browser.numbers()
        handle = browser.find("#handle")
        start = handle.rect["x"]
        action = (
            ActionChains(browser.driver, duration=20)
            .move_to_element_with_offset(handle, 9, 3)
            .click_and_hold()
        )
        action.move_by_offset(-150, 30).release().perform()
        browser.settle()
        after = browser.numbers()
        width = browser.run("return document.querySelector('#main-plot .u-over').clientWidth")
        span = before["curves"]["x"][-1] * 2
        assert after["outlierX"] - before["outlierX"] == pytest.approx(
            -150 / width * span, abs=span / width
        )
        assert handle.rect["x"] - start == pytest.approx(-150, abs=1.5)
        assert after["mu"] != before["mu"]
        assert browser.find("[data-number=outlier-x]").text == f"{after['outlierX']:.6g}".replace(
            "-", "−"
        )

    def test_it_lies_on_the_point(self, browser: Browser) -> None:
        numbers = browser.numbers()
        box = browser.run(
            "return document.querySelector('#main-plot .u-over').getBoundingClientRect().toJSON()"
        )
        handle = browser.run(
            "return document.querySelector('#handle').getBoundingClientRect().toJSON()"
        )
        x, y, reach = numbers["outlierX"], numbers["outlierY"], numbers["curves"]["x"][-1]
        assert handle["x"] + 22 - box["x"] == pytest.approx(
            (x + reach) / (2 * reach) * box["width"], abs=1.5
        )
        most = 1.14 * math.sqrt(99)
        assert handle["y"] + 22 - box["y"] == pytest.approx(
            (most - y) / (2 * most) * box["height"], abs=1.5
        )

    def test_a_drag_ends_at_the_edge_and_the_axes_stand_still(self, browser: Browser) -> None:
        from selenium.webdriver import ActionChains

        reach = browser.numbers()["curves"]["x"][-1]
        action = ActionChains(browser.driver, duration=20).click_and_hold(browser.find("#handle"))
        action.move_by_offset(400, 0).perform()
        browser.settle()
        held = browser.numbers()
        ActionChains(browser.driver).release().perform()
        assert held["curves"]["x"][-1] == reach
        assert held["outlierX"] == pytest.approx(0.98 * reach)

    def test_a_finger_drags_it_too(self, browser: Browser) -> None:
        browser.look(390, 844, "light")
        browser.run("document.querySelector('#main-plot').scrollIntoView({block: 'center'})")
        browser.settle()
        before = browser.numbers()["outlierX"]
        box = browser.run(
            "return document.querySelector('#handle').getBoundingClientRect().toJSON()"
        )
        x, y = box["x"] + 22, box["y"] + 22
        for kind, points in (
            ("touchStart", [{"x": x, "y": y}]),
            # Upwards too, which elsewhere on the page would scroll it.
            ("touchMove", [{"x": x - 20, "y": y - 40}]),
            ("touchMove", [{"x": x - 60, "y": y - 90}]),
            ("touchEnd", []),
        ):
            browser.driver.execute_cdp_cmd(
                "Input.dispatchTouchEvent", {"type": kind, "touchPoints": points}
            )
        browser.settle()
        assert browser.numbers()["outlierX"] < before - 10

    def test_the_keyboard_moves_it(self, browser: Browser) -> None:
        from selenium.webdriver.common.keys import Keys

        handle = browser.find("#handle")
        for key, steps in ((Keys.ARROW_RIGHT, 5.1), (Keys.PAGE_DOWN, 4.1), (Keys.ARROW_DOWN, 4.0)):
            handle.send_keys(key)
            browser.settle()
            assert browser.state()["steps"] == pytest.approx(steps)
        assert float(handle.get_attribute("aria-valuenow")) == browser.numbers()["outlierX"]
        assert "LayerNorm gives" in handle.get_attribute("aria-valuetext")
        for key, sign in ((Keys.HOME, -1), (Keys.END, 1)):
            handle.send_keys(key)
            browser.settle()
            assert sign * browser.numbers()["outlierX"] > 50

    def test_it_and_every_control_can_be_reached_and_has_a_name(self, browser: Browser) -> None:
        script = """return [...document.querySelectorAll('input, button, a[href], [role=slider]')].map((element) => [
            element.id || element.textContent || element.dataset.layer, element.tabIndex,
            element.getAttribute('aria-label') || element.labels?.[0]?.textContent || element.textContent])"""
        rows = browser.run(script)
        assert len(rows) > 30
        assert [name for name, index, words in rows if index < 0 or not words.strip()] == []
        browser.run("document.querySelector('#handle').focus()")
        assert "rgb" in browser.run(
            "return getComputedStyle(document.querySelector('#handle'), '::before').boxShadow"
        )


class TestLook:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_words_can_be_read(self, scheme: str, browser: Browser) -> None:
        browser.look(1280, 1000, scheme)
        script = """const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(arguments[0].map((name) => [name, style.getPropertyValue('--' + name).trim()]))"""
        names = [
            "page",
            "card",
            "ink",
            "soft",
            "wrong",
            "dyt",
            "derf",
            "dyisru",
            "path",
            "points",
            "closed",
        ]
        colours = browser.run(script, names)
        for name in names[2:]:
            least = 4.5 if name in ("ink", "soft", "wrong", "dyisru") else 3
            for ground in ("page", "card"):
                assert contrast(colours[name], colours[ground]) >= least, (name, ground)

    @pytest.mark.parametrize("width", [320, 390, 1280])
    def test_nothing_is_wider_than_the_screen(self, width: int, browser: Browser) -> None:
        browser.look(width, 844, "light")
        assert browser.set(
            channels=99, sigma=6.12345, alpha=0.0123456, derf=0.0123456, beta=98765.4321
        )
        assert browser.run("return document.documentElement.scrollWidth") <= width
        # A smaller screen than any phone's may have to push the table aside.
        table = browser.run(
            "const box = document.querySelector('.scroll'); return [box.scrollWidth, "
            "box.clientWidth]"
        )
        assert table[0] <= table[1] or width == 320
        canvas = browser.run(
            "return document.querySelector('canvas').getBoundingClientRect().toJSON()"
        )
        assert 0.5 * width < canvas["width"] < width

    def test_the_plots_follow_the_window(self, browser: Browser) -> None:
        wide = browser.run("return document.querySelector('canvas').clientWidth")
        browser.look(1000, 900, "light")
        browser.settle()
        browser.settle()
        assert 200 < browser.run("return document.querySelector('canvas').clientWidth") < wide


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def relative(colour: str) -> float:
        digits = colour.removeprefix("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((relative(first), relative(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize(
    ("mode", "outcome", "message"),
    [
        ("", pytest.skip.Exception, "chromedriver missing: apt-get install"),
        ("required", pytest.fail.Exception, "required, but .*chromedriver missing"),
        ("hidden", pytest.skip.Exception, r"machine.*without"),
        ("yes", pytest.fail.Exception, r"required.*hidden"),
    ],
)
def test_without_a_browser(
    mode: str,
    outcome: type[BaseException],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "chromium").touch()
    monkeypatch.setattr("tests.paper.browser.CHROMIUM", tmp_path / "chromium")
    monkeypatch.setattr("tests.paper.browser.DRIVER", tmp_path / "chromedriver")
    monkeypatch.setenv("DYNORM_BROWSER", mode)
    with pytest.raises(outcome, match=message):
        require_browser()
