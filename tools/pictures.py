"""Gather photographs from Debian's packages: ``python tools/pictures.py build/pictures``.

Each becomes one JPEG file, with its shorter side of at most 400 pixels; transparent pixels become
white. The packages are fetched by apt-get, and not installed.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from dynorm.files import replaced_directory

# Which files of each package are photographs; the rest are drawings, icons, and the same picture in
# other sizes.
PACKAGES = {
    "tuxpaint-stamps-default": r"(animals|food|hobbies|household|plants|space|sports|vehicles)/(?!.*cartoon).*png",
    "lomiri-wallpapers-16.04": r"backgrounds/.*jpg",
    "mate-backgrounds": r"mate/nature/.*jpg",
    "lxqt-themes": r"wallpapers/(Butterfly|Valendas|after|apple|butterfly|cloud|drop|flowers|fog|this).*",
    "palapeli-data": r"palapeli/collection/.*jpg",
    "python3-skimage": r"skimage/data/(astro|brick|cam|chelsea|clock|cof|coins|gr|hub|ihc|moon|.*_left|ret|rock).*g",
}
SHORTER_SIDE, SMALLEST = 400, 100


def gather(folder: Path) -> Path:
    """Return a folder with the photographs of all packages; it is there whole, or not at all."""
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "lists" / "partial").mkdir(parents=True)
        # With lists of its own, apt-get needs neither root's rights nor an update by somebody else.
        apt = [
            "apt-get",
            "-qq",
            "-o",
            f"Dir::State::lists={scratch}/lists",
            "-o",
            "APT::Sandbox::User=root",
        ]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "download", *PACKAGES], cwd=scratch, check=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replaced_directory(folder) as new:
            for package, pattern in PACKAGES.items():
                (archive,) = Path(scratch).glob(f"{package}_*.deb")
                tar = subprocess.run(
                    ["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=True
                ).stdout
                for name, image in _images(tar, pattern):
                    if min(image.size) >= SMALLEST:
                        smaller(image).save(new / f"{package}-{Path(name).stem}.jpg", quality=92)
    return folder


def _images(archive: bytes, pattern: str) -> Iterator[tuple[str, Image.Image]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            if file.isfile() and re.search(rf"/{pattern}$", file.name):
                yield file.name, Image.open(files.extractfile(file))


def smaller(image: Image.Image) -> Image.Image:
    """Return a picture in three colours on white, of the size that is kept."""
    scale = min(1.0, SHORTER_SIDE / min(image.size))
    image = image.convert("RGBA").resize(
        [max(1, round(scale * side)) for side in image.size], Image.Resampling.LANCZOS
    )
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


if __name__ == "__main__":
    found = gather(Path(sys.argv[1]))
    print(f"{len(list(found.iterdir()))} photographs are in {found}", file=sys.stderr)
