"""Images to calibrate and test with: the user's files, which are read when a batch needs them."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynorm.errors import DataError, require_library

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# The shortest side of a crop, in shorter sides of the image.
_SMALLEST = 0.5


@dataclass(frozen=True)
class Crop:
    """A part of an image file: number 0 is the whole image, each other number a square of it, at random."""

    file: Path
    number: int = 0

    def read(self) -> Any:
        """Return the part as an image of PIL in three colours, turned as the camera says."""
        from PIL import Image
        from transformers.image_utils import load_image

        with Image.open(self.file) as opened:
            image = load_image(opened)
        if not self.number:
            return image
        draw = random.Random(f"{self.file.name} {self.number}")
        side = draw.uniform(_SMALLEST, 1) * min(image.size)
        left, top = (draw.uniform(0, length - side) for length in image.size)
        return image.crop((int(left), int(top), int(left + side) + 1, int(top + side) + 1))


def find_images(paths: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Find images in files and folders, each once; return those that can be read, and the names of the others.

    Folders are searched for .jpg, .jpeg, .png, .webp, .bmp, .gif, .tif and .tiff files. Of files with the same bytes
    the first is taken. All are decoded once, for a file may end too early.

    Raises:
        ArgumentError: Pillow is not installed.
        DataError: a path does not exist, or has no image that can be read.
    """
    require_library("PIL.Image", "reading images", "plots")
    found: dict[bytes, Path] = {}
    damaged: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"images must come from files and folders that exist, but {path} does not")
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        digests = {file: _digest(file) for file in (inside if path.is_dir() else [path])}
        damaged += [str(file) for file, digest in digests.items() if digest is None]
        if not any(digests.values()):
            raise DataError(f"images must be files that Pillow can read, but {path} has none, of {len(digests)}")
        for file, digest in digests.items():
            if digest is not None:
                found.setdefault(digest, file)
    return list(found.values()), damaged


def _digest(file: Path) -> bytes | None:
    """Return a digest of an image file's bytes, or None where it cannot be read."""
    from PIL.Image import DecompressionBombError

    try:
        Crop(file).read()
        return hashlib.sha256(file.read_bytes()).digest()
    # Which of them Pillow raises depends on the format.
    except (OSError, SyntaxError, ValueError, DecompressionBombError):
        return None
