"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dynorm
from dynorm.files import replaced_directory, require_writable, write_text


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "one")
    write_text(str(path), "zwölf")
    assert path.read_bytes() == "zwölf".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("name", ["missing/a.txt", "a\0b", "folder", "a" * 300])
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(dynorm.errors.StorageError, match="cannot be written"):
        write_text(tmp_path / name, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_ctrl_c_between_two_renames_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    write_text(path / "config.json", "old")
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if source.name == "new":
            raise KeyboardInterrupt
        replace(source, target)

    with pytest.raises(KeyboardInterrupt), replaced_directory(path, overwrite=True):
        monkeypatch.setattr(os, "replace", interrupted)
    assert (path / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_the_system_does_not_take_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(dynorm.errors.StorageError, match="can be written"):
        require_writable(tmp_path / "a\0b")
