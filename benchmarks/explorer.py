"""Measure how smoothly the explorer's page follows the mouse; write results/explorer.json.

``python -m benchmarks.explorer`` drags the outlier to and fro in a headless browser for some
seconds. A frame counts if the numbers on the page have changed since the frame before, so that the
time includes everything from the mouse to the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from dynorm.paper.explorer import save_page
from tests.paper.browser import Browser, chromium

RESULTS = Path(__file__).parent / "results" / "explorer.json"
CHANNELS = (100, 1024)
WATCH = """
window.seen = [];
let last = null;
const cell = document.querySelector("[data-number=outlier-x]");
requestAnimationFrame(function frame(now) {
  if (cell.textContent !== last) { last = cell.textContent; window.seen.push(now); }
  requestAnimationFrame(frame);
});
"""
WORK = """
const began = performance.now();
for (let i = 0; i < 100; i++) { dynorm.set({ steps: i / 10 }); dynorm.numbers(); }
return (performance.now() - began) / 100;
"""


def measure(browser: Browser, page: Path, channels: int, seconds: float) -> dict[str, Any]:
    """Drag the outlier for a while and return the figures of one size."""
    browser.open(page)
    browser.set(channels=channels)
    browser.run(WATCH)
    drag(browser, seconds)
    times = browser.run("return window.seen")
    gaps = sorted(after - before for before, after in pairwise(times))
    count = len(gaps)
    seconds_seen = (times[-1] - times[0]) / 1000
    return {
        "channels": channels,
        "frames": len(times),
        "frames_per_second": round(count / seconds_seen, 1),
        "median_ms": round(gaps[count // 2], 1),
        "95_percent_ms": round(gaps[int(count * 0.95)], 1),
        "mathematics_ms": round(browser.run(WORK), 2),
    }


def drag(browser: Browser, seconds: float) -> None:
    """Press the mouse on the handle, swing it as a hand would, and let go."""
    handle = rectangle(browser, "#handle")
    plot = rectangle(browser, "#main-plot .u-over")
    x = handle["x"] + handle["width"] / 2
    y = handle["y"] + handle["height"] / 2
    middle = plot["x"] + plot["width"] / 2
    reach = 0.4 * plot["width"]
    mouse(browser, "mousePressed", x, y)
    start = time.perf_counter()
    elapsed = 0.0
    while elapsed < seconds:
        x = middle + reach * math.cos(2 * elapsed)
        mouse(browser, "mouseMoved", x, y)
        elapsed = time.perf_counter() - start
    mouse(browser, "mouseReleased", middle, y)


def rectangle(browser: Browser, selector: str) -> dict[str, float]:
    """Return the place and the size of an element of the page."""
    script = f"return document.querySelector('{selector}').getBoundingClientRect().toJSON()"
    return browser.run(script)


def mouse(browser: Browser, kind: str, x: float, y: float) -> None:
    """Send one event of the mouse."""
    event = {
        "type": kind,
        "x": x,
        "y": y,
        "button": "left",
        "buttons": 1,
        "clickCount": 1,
    }
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def main() -> None:
    """Measure every size and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each drag")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        page = save_page(Path(folder) / "explore.html")
        rows = [measure(browser, page, channels, seconds) for channels in CHANNELS]
        version = browser.driver.capabilities["browserVersion"]
    document = {
        "what": "dragging the outlier on the page of dynorm explore, 1280 x 1000, light",
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "graphics": "none, software rendering",
        },
        "browser": f"Chromium {version}, headless, which draws at most 60 frames a second",
        "seconds": seconds,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
