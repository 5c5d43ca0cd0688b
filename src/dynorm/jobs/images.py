"""Images to calibrate and test with: the user's files, which are read when a batch needs them."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynorm.errors import require_library
from dynorm.jobs.sources import read_samples

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

    Of files with the same bytes the first is taken. All are decoded once, for a file may end too
    early. A path that does not exist, or has no image that can be read, is a DataError.
    """
    require_library("PIL.Image", "reading images", "plots")
    from PIL.Image import DecompressionBombError

    def look(file: Path) -> Path:
        Crop(file).read()
        return file

    suffixes = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
    return read_samples(paths, "images", "Pillow", suffixes, look, DecompressionBombError)
