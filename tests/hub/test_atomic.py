"""A save is whole or not at all: full disks, interrupts, killed processes, links, other files in the folder."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import dynorm
from dynorm import files
from dynorm.errors import StorageError
from dynorm.files import replaced_directory
from dynorm.hub import contents, load, plain, save
from tests.hub.folders import fresh, full_disk, leftovers
from tests.hub.models import build, converted, same_state


def test_an_existing_directory_is_replaced_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "m"
    save(converted("dyt"), target)
    with pytest.raises(StorageError, match=r"exist.*overwrite=True"):
        save(converted(), target)
    assert isinstance(load(target, build())[1], dynorm.DyT)
    (target / "tokenizer.json").write_text("{}")
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text("{}")
    (target / "model-00001-of-00002.safetensors").write_text("of an older save")
    save(converted(), target, overwrite=True)
    assert isinstance(load(target, build())[1], dynorm.DyISRU)
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {"dynorm.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert leftovers(tmp_path) == []


def test_no_other_file_stays_where_the_whole_model_is_written(tmp_path: Path) -> None:
    save(converted(), tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("of another model")
    with replaced_directory(tmp_path / "m", overwrite=True, keep_others=False) as new:
        (new / "config.json").write_text("{}")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]


def test_only_a_saved_model_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    save(converted(), tmp_path / "thesis", overwrite=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("")
    with pytest.raises(StorageError, match=r"saved.*empty"):
        save(converted(), tmp_path / "photos", overwrite=True)
    (tmp_path / "file").write_text("")
    for target, message in (
        ("file", "is a file"),
        ("file/m", "the parent of"),
        ("nowhere/m", "the parent of"),
    ):
        with pytest.raises(StorageError, match=message):
            save(converted(), tmp_path / target, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "photos", "thesis"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    save(converted("dyt"), tmp_path / "v1")
    (tmp_path / "latest").symlink_to("v1")
    save(converted(), tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert isinstance(load(tmp_path / "v1", build())[1], dynorm.DyISRU)


def test_files_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(converted(), tmp_path / "m")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()} == {0o640}


@pytest.mark.parametrize("where", [(plain, "save_file"), (files, "_sync"), (Path, "mkdir")])
@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], exists: bool
) -> None:
    model, target = converted(), tmp_path / "m"
    if exists:
        save(converted("dyt"), target)
    with monkeypatch.context() as patch:
        patch.setattr(*where, full_disk)
        with pytest.raises(StorageError, match="No space left"):
            save(model, target, overwrite=True)
    assert leftovers(tmp_path) == []
    assert target.exists() == exists
    if exists:
        assert isinstance(load(target, build())[1], dynorm.DyT)


@pytest.mark.parametrize("full", [False, True])
def test_other_files_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    target = tmp_path / "m"
    save(converted("dyt"), target)
    (target / "notes").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full_disk)
        if full:
            patch.setattr(shutil, "copy2", full_disk)
            with pytest.raises(StorageError, match=r"other files.*space"):
                save(converted(), target, overwrite=True)
        else:
            save(converted(), target, overwrite=True)
    assert (target / "notes").read_text() == "mine"
    assert isinstance(load(target, build())[1], dynorm.DyT if full else dynorm.DyISRU)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("fails", [False, True])
def test_two_renames_serve_where_directories_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    target = tmp_path / "m"
    save(converted("dyt"), target)
    if not fails:
        save(converted(), target, overwrite=True)
    else:
        rename = Path.rename

        def second_fails(self: Path, to: Path) -> Path:
            return full_disk() if self.suffix == ".tmp" else rename(self, to)

        monkeypatch.setattr(Path, "rename", second_fails)
        with pytest.raises(StorageError, match="No space left"):
            save(converted(), target, overwrite=True)
    assert isinstance(load(target, build())[1], dynorm.DyT if fails else dynorm.DyISRU)
    assert leftovers(tmp_path) == []


def test_an_interrupt_passes_through_and_cleans_up(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replaced_directory(tmp_path / "m") as folder:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, shutil, signal, sys
from torch import nn
import dynorm
from dynorm import files
from dynorm.hub import plain, save

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def half(tensors, path, metadata):
    path.write_bytes(b"half of the")
    die()

points = {
    "before": (plain, "save_file", die),
    "half-written": (plain, "save_file", half),
    "before the exchange": (files, "_exchange", die),
    "after the exchange": (shutil, "rmtree", die),
}
for point, (module, name, act) in points.items():
    child = os.fork()
    if not child:
        setattr(module, name, act)
        model = nn.Sequential(nn.Linear(8, 8), dynorm.DyISRU(8), nn.Linear(8, 8), dynorm.DyISRU(8))
        save(model, os.path.join(sys.argv[1], point), overwrite=True)
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
"""


def test_a_killed_save_leaves_a_whole_directory(tmp_path: Path) -> None:
    points = ("before", "half-written", "before the exchange", "after the exchange")
    model = converted("dyt")
    for point in points:
        save(model, tmp_path / point)
    # One process that has imported everything, of which four are forked.
    run = fresh(KILLED, tmp_path)
    assert run.stdout.split("\n")[:-1] == [f"{point}:{-signal.SIGKILL}" for point in points]
    for point in points[:3]:
        assert same_state(load(tmp_path / point, build()), model)
    whole = load(
        tmp_path / points[3],
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)),
    )
    assert isinstance(whole[1], dynorm.DyISRU)


def test_a_model_that_another_process_puts_there_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, read = converted(), converted(), contents.require_weights
    save(old, tmp_path / "m")

    def exchanged(*arguments: Any) -> None:
        monkeypatch.setattr(contents, "require_weights", read)
        save(new, tmp_path / "m", overwrite=True)
        read(*arguments)

    monkeypatch.setattr(contents, "require_weights", exchanged)
    assert same_state(load(tmp_path / "m", build()), new)
