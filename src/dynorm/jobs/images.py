"""Images to calibrate and test with, read from the user's files when a batch needs them."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynorm.errors import DataError, require_library
from dynorm.jobs.texts import files_of

# The smallest side of a crop, relative to the shorter side of the image.
_SMALLEST = 0.5
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Crop:
    """A part of an image file: number 0 is the image itself, others are random squares."""

    file: Path
    number: int = 0

    def read(self) -> Any:
        """Return the part as an RGB image of PIL, rotated as its EXIF data ask."""
        from PIL import Image
        from transformers.image_utils import load_image

        with Image.open(self.file) as opened:
            image = load_image(opened)
        if not self.number:
            return image
        draw = random.Random(f"{self.file.name} {self.number}")
        width, height = image.size
        side = draw.uniform(_SMALLEST, 1) * min(width, height)
        left = draw.uniform(0, width - side)
        top = draw.uniform(0, height - side)
        return image.crop((int(left), int(top), int(left + side) + 1, int(top + side) + 1))


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """Find images in files and folders, each once even if several files have the same bytes.

    All are decoded, to notice truncated files. A path without images, or an image that cannot be
    read, is a DataError.
    """
    require_library("PIL.Image", "reading images")
    from PIL.Image import DecompressionBombError

    images: dict[bytes, Path] = {}
    for path in map(Path, paths):
        files = files_of(path, "images", _SUFFIXES)
        if not files:
            raise DataError(f"images must be files that Pillow can read, but {path} has none")
        for file in files:
            try:
                Crop(file).read()
            # Pillow raises different errors for different formats.
            except (OSError, EOFError, SyntaxError, ValueError, DecompressionBombError) as error:
                raise DataError(
                    f"images must be files that Pillow can read, but {file} is not: {error}; "
                    "remove it"
                ) from error
            images.setdefault(hashlib.sha256(file.read_bytes()).digest(), file)
    return list(images.values())
