"""A headless Chromium for tests, from Debian, with access to its complaints and requests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)
FRAME = (
    "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
)


def require_browser() -> None:
    """Skip without a browser, and say why; with DYNORM_BROWSER=required fail instead.

    DYNORM_BROWSER=hidden skips on every machine, as on one that has no browser.
    """
    mode = os.environ.get("DYNORM_BROWSER", "")
    if mode not in ("", "required", "hidden"):
        pytest.fail(f"DYNORM_BROWSER must be required or hidden, or not be set, got {mode!r}")
    if mode == "hidden":
        pytest.skip("DYNORM_BROWSER=hidden: run as on a machine without a browser")
    missing = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    if not missing:
        return
    words = f"{' and '.join(missing)} missing: apt-get install chromium chromium-driver"
    if mode == "required":
        pytest.fail(f"DYNORM_BROWSER=required, but {words}")
    pytest.skip(words)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser, and end it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With both paths given, Selenium looks for no driver and downloads none.
    driver = webdriver.Chrome(service=Service(str(DRIVER)), options=options)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """The page in the browser, in the words of the tests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page anew, light and on a desk, with nothing left of the one before."""
        self.driver.get("about:blank")
        self.look(1280, 1000, "light")
        self.complaints()
        self.requests()
        self.driver.get(page.as_uri() + fragment)

    def reset(self) -> None:
        """Bring the page back to how it was loaded, which takes a fraction of the time."""
        self.look(1280, 1000, "light")
        self.run(
            "document.activeElement.blur(); scrollTo(0, 0); "
            "history.replaceState(null, '', location.pathname);"
            "document.querySelector('#reset').click()"
        )
        self.settle()
        self.complaints()

    def look(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the screen, and whether the reader likes it light or dark."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Return the messages of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses asked for since the last call."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script and return its result."""
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until all changes have been drawn."""
        self.driver.execute_async_script(FRAME)

    def set(self, **choices: Any) -> bool:
        """Make choices as a reader would; return whether the page took them all."""
        taken = self.run("return dynorm.set(arguments[0])", choices)
        self.settle()
        return bool(taken)

    def state(self) -> dict[str, Any]:
        """Return the reader's choices."""
        return dict(self.run("return dynorm.state()"))

    def numbers(self) -> dict[str, Any]:
        """Return the shown values, to full precision."""
        return dict(self.run("return dynorm.numbers()"))

    def find(self, selector: str) -> Any:
        """Return an element."""
        return self.driver.find_element("css selector", selector)

    def pixels(self, plot: str) -> str:
        """Return the picture of a plot, as a data URL."""
        return str(
            self.run(
                "return document.querySelector(arguments[0] + ' canvas').toDataURL()", f"#{plot}"
            )
        )
