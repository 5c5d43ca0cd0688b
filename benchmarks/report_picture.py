"""Photograph the first screen of the demo's report, for docs/: ``python -m benchmarks.report_picture``.

The figures are those of benchmarks/results/demo.json, the page is today's; Chromium shows it.
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
DEMO, IMAGE = ROOT / "benchmarks" / "results" / "demo.json", ROOT / "docs" / "images" / "report.png"


def site(row: dict[str, Any]) -> SiteReport:
    """Return a site of the report; no JSON holds its sampled points, which are not on the first screen."""
    sizes = row["sizes"]
    tokens = tuple(LargeToken(**token) for token in sizes["tokens"])
    explained = {int(count): share for count, share in sizes["explained"].items()}
    bins = [Bin(**each) for each in row["bins"]]
    nested = {
        "sizes": TokenSizes(**sizes | {"tokens": tokens, "explained": explained}),
        "picture": Picture(
            [each.x for each in bins], [each.mean for each in bins], bins, sigma=1.0
        ),
        "sums": ([1.0], [1.0]),
        "fit": CoreFit(**row["fit"]),
    }
    known = {
        name: value
        for name, value in row.items()
        if name in {each.name for each in fields(SiteReport)}
    }
    return SiteReport(**{"why": ""} | known | nested)


def main() -> None:
    """Write docs/images/report.png."""
    found = json.loads(DEMO.read_text("utf-8"))
    # Its name in earlier runs.
    found["meta"].setdefault("worst_sample", found["meta"].get("worst_text"))
    nested = {
        "sites": [site(row) for row in found["sites"]],
        "output": OutputReport(**found["output"]),
    }
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "report.png"
        ModelReport(**found | nested).to_html(page)
        page.write_text(page.read_text("utf-8").split("<h2>Every site</h2>")[0], "utf-8")
        browser = [
            "chromium",
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        into = ["--window-size=1000,1200", f"--screenshot={shot}", page.as_uri()]
        subprocess.run(
            [*browser, f"--user-data-dir={folder}/profile", *into], check=True, capture_output=True
        )
        with Image.open(shot) as image:
            full = image.convert("RGB")
        empty = Image.new("RGB", full.size, full.getpixel((0, 0)))
        bottom = ImageChops.difference(full, empty).getbbox()[3]
        full.crop((0, 0, 1000, bottom + 24)).quantize(256).save(IMAGE, optimize=True)


if __name__ == "__main__":
    main()
