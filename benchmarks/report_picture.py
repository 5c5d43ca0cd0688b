"""Photograph the first screen of the demo's report, for docs/: ``python -m benchmarks.report_picture``.

It is the page that ``make demo`` left in build/demo, and Chromium shows it.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "build" / "demo" / "report.html"
IMAGE = ROOT / "docs" / "images" / "report.png"


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
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        picture = Path(folder) / "report.png"
        first_screen, *_ = DEMO.read_text("utf-8").split("<h2>Every norm</h2>")
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
