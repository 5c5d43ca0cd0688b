"""Data sets by name: a stand-in for the library ``datasets`` gives their rows, and the errors of the real one."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dynorm.errors import DataError
from dynorm.jobs.images import Crop, find_images
from dynorm.jobs.texts import read_texts


class Rows(list[Any]):
    """Rows as an IterableDataset has them."""

    features = True

    def decode(self, enable: bool) -> Rows:
        assert not enable
        return self

    def to_iterable_dataset(self) -> Rows:
        return self


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a library with some rows in the place of the real one, and returns a list of the requests."""

    def put(rows: list[Any] | Exception, *, offline: bool = False) -> list[tuple[Any, ...]]:
        called: list[tuple[Any, ...]] = []

        def load_dataset(
            name: str, configuration: str | None, *, split: str, streaming: bool
        ) -> Rows:
            called.append((name, configuration, split, streaming))
            if isinstance(rows, Exception):
                raise rows
            return Rows(rows)

        found: Any = types.ModuleType("datasets")
        found.__spec__ = ModuleSpec("datasets", None)
        found.config, found.load_dataset = (
            types.SimpleNamespace(HF_HUB_OFFLINE=offline),
            load_dataset,
        )
        monkeypatch.setitem(sys.modules, "datasets", found)
        return called

    return put


def test_a_data_set_gives_a_text_per_row(library: Callable[..., Any], tmp_path: Path) -> None:
    rows = [
        {"id": "a name that is no text", "text": f"The text of row {i},\nof two lines."}
        for i in range(3)
    ]
    called = library(rows)
    assert read_texts(["people/talk:plain"]) == [
        f"The text of row {i}, of two lines." for i in range(3)
    ]
    assert called == [("people/talk", "plain", "train", True)]
    # Another name for the column, and earlier downloads.
    called = library([{"label": 1, "words": row["text"]} for row in rows], offline=True)
    assert read_texts(["talk"], whole=True) == [row["text"] for row in rows]
    assert called == [("talk", None, "train", False)]
    # A path that exists is a file.
    (tmp_path / "talk").write_text("The text of a file that exists.")
    assert read_texts([tmp_path / "talk"]) == ["The text of a file that exists."]
    assert len(called) == 1


def test_a_data_set_gives_images_as_their_files(
    library: Callable[..., Any], tmp_path: Path
) -> None:
    held = io.BytesIO()
    Image.new("RGB", (9, 5)).save(held, "PNG")
    Image.new("RGB", (7, 5)).save(tmp_path / "a.png")
    images = [
        {"bytes": held.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]
    library(
        [{"label": 0, "image": image} for image in [*images, {"bytes": b"no image", "path": None}]]
    )
    found, damaged = find_images(["people/pictures"])
    assert [Crop(file).read().size for file in found] == [(9, 5), (7, 5)]
    assert len(damaged) == 1


def test_what_is_no_data_set_is_named(
    library: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(ConnectionError("Couldn't reach 'people/talk' on the Hub"))
    with pytest.raises(DataError, match=r"people/talk.*reach.*HF_HUB_OFFLINE=0"):
        read_texts(["people/talk"])
    library([{"label": 1, "text": "words"}])
    with pytest.raises(DataError, match=r"images.*label, text"):
        find_images(["people/talk"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"people/talk.*install datasets"):
        read_texts(["people/talk"])
