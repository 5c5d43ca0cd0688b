"""Photograph the first screen of the demo's report, for docs/: ``python -m benchmarks.report_picture``.

The figures are from benchmarks/results/demo.json, and Chromium shows the page.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from dynorm.report import ModelReport, OutputReport, SiteReport
from dynorm.report.sizes import LargeToken, TokenSizes
from dynorm.report.stats import Bin, CoreFit, Picture

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "benchmarks" / "results" / "demo.json"
IMAGE = ROOT / "docs" / "images" / "report.png"


def token_sizes(sizes: dict[str, Any]) -> TokenSizes:
    """Return the sizes of a site's tokens from their JSON."""
    tokens = tuple(LargeToken(**token) for token in sizes["tokens"])
    explained = {int(count): share for count, share in sizes["explained"].items()}
    return TokenSizes(**sizes | {"tokens": tokens, "explained": explained})


def site(row: dict[str, Any]) -> SiteReport:
    """Return a site of the report.

    The first screen does not show the sampled points, which are not in the JSON.
    """
    bins = []
    x = []
    y = []
    for values in row["bins"]:
        interval = Bin(**values)
        bins.append(interval)
        x.append(interval.x)
        y.append(interval.mean)
    names = {field.name for field in fields(SiteReport)}
    arguments: dict[str, Any] = {"why": ""}
    for name, value in row.items():
        if name in names:
            arguments[name] = value
    arguments["sizes"] = token_sizes(row["sizes"])
    arguments["picture"] = Picture(x, y, bins, sigma=1.0)
    arguments["sums"] = ([1.0], [1.0])
    arguments["fit"] = CoreFit(**row["fit"])
    return SiteReport(**arguments)


def take_picture(page: Path, picture: Path) -> None:
    """Let Chromium save a picture of a page, with its profile in the picture's folder."""
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={picture.parent}/profile",
        "--window-size=1000,1200",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Write docs/images/report.png."""
    document = json.loads(DEMO.read_text("utf-8"))
    # Earlier runs have it by another name.
    document["meta"].setdefault("worst_sample", document["meta"].get("worst_text"))
    document["sites"] = [site(row) for row in document["sites"]]
    document["output"] = OutputReport(**document["output"])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        picture = Path(folder) / "report.png"
        ModelReport(**document).to_html(page)
        first_screen, *_ = page.read_text("utf-8").split("<h2>Every site</h2>")
        page.write_text(first_screen, "utf-8")
        take_picture(page, picture)
        with Image.open(picture) as image:
            full = image.convert("RGB")
        empty = Image.new("RGB", full.size, full.getpixel((0, 0)))
        _, _, _, bottom = ImageChops.difference(full, empty).getbbox()
        cropped = full.crop((0, 0, 1000, bottom + 24))
        cropped.quantize(256).save(IMAGE, optimize=True)


if __name__ == "__main__":
    main()
