"""Gather photographs from Debian's packages: ``python tools/pictures.py build/pictures``.

Each photograph becomes one JPEG file, with its shorter side of at most 400 pixels. Transparent
pixels become white. apt-get downloads the packages, and does not install them.
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
SHORTER_SIDE = 400
SMALLEST = 100


def gather(folder: Path) -> Path:
    """Return a folder with the photographs of all packages; on an error, write nothing."""
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        _download(Path(scratch))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replaced_directory(folder) as new:
            for package, pattern in PACKAGES.items():
                (archive,) = Path(scratch).glob(f"{package}_*.deb")
                for name, image in _images(_unpacked(archive), pattern):
                    if min(image.size) >= SMALLEST:
                        file = new / f"{package}-{Path(name).stem}.jpg"
                        smaller(image).save(file, quality=92)
    return folder


def _download(folder: Path) -> None:
    """Download the packages into a folder."""
    (folder / "lists" / "partial").mkdir(parents=True)
    # With its own lists, apt-get needs neither root's rights nor an earlier update.
    apt = ["apt-get", "-qq"]
    apt += ["-o", f"Dir::State::lists={folder}/lists"]
    apt += ["-o", "APT::Sandbox::User=root"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True)


def _unpacked(package: Path) -> bytes:
    """Return the files of a Debian package as a tar archive."""
    command = ["dpkg-deb", "--fsys-tarfile", package]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _images(archive: bytes, pattern: str) -> Iterator[tuple[str, Image.Image]]:
    """Yield the names and images of the files in an archive that match the pattern."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            if file.isfile() and re.search(rf"/{pattern}$", file.name):
                yield file.name, Image.open(files.extractfile(file))


def smaller(image: Image.Image) -> Image.Image:
    """Return a picture in three colours on white, with its shorter side of at most ``SHORTER_SIDE`` pixels."""
    scale = min(1.0, SHORTER_SIDE / min(image.size))
    size = [max(1, round(scale * side)) for side in image.size]
    image = image.convert("RGBA").resize(size, Image.Resampling.LANCZOS)
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


if __name__ == "__main__":
    pictures = gather(Path(sys.argv[1]))
    count = len(list(pictures.iterdir()))
    print(f"{count} photographs are in {pictures}", file=sys.stderr)
