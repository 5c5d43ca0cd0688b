"""How smoothly the explorer's page follows the mouse: ``python -m benchmarks.explorer`` writes results/explorer.json.

A real, headless browser drags the outlier to and fro for some seconds. A frame counts when the
numbers on the page have changed since the frame before, so the measured time is the whole way from
the mouse to the picture.
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
    seen = browser.run("return window.seen")
    gaps = sorted(after - before for before, after in pairwise(seen))
    return {
        "channels": channels,
        "frames": len(seen),
        "frames_per_second": round(1000 * len(gaps) / (seen[-1] - seen[0]), 1),
        "median_ms": round(gaps[len(gaps) // 2], 1),
        "95_percent_ms": round(gaps[int(len(gaps) * 0.95)], 1),
        "mathematics_ms": round(browser.run(WORK), 2),
    }


def drag(browser: Browser, seconds: float) -> None:
    """Press the mouse on the handle, swing it as a hand would, and let go."""
    box = browser.run("return document.querySelector('#handle').getBoundingClientRect().toJSON()")
    plot = browser.run(
        "return document.querySelector('#main-plot .u-over').getBoundingClientRect().toJSON()"
    )
    x, y, reach = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, 0.4 * plot["width"]
    middle = plot["x"] + plot["width"] / 2
    mouse(browser, "mousePressed", x, y)
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        mouse(browser, "mouseMoved", middle + reach * math.cos(2 * elapsed), y)
    mouse(browser, "mouseReleased", middle, y)


def mouse(browser: Browser, kind: str, x: float, y: float) -> None:
    """Send one event of the mouse."""
    event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def main() -> None:
    """Measure every size and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each drag takes")
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
