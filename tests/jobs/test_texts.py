"""Texts: paragraphs of files, docstrings of Python, and an error for each file that is no text."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from dynorm.errors import DataError
from dynorm.jobs.texts import read_texts, split_texts, standard_library_docstrings

LONG = "A paragraph that is long enough"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_paragraphs(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.txt", f"{LONG},\n  folded.\n \t\nshort\n\n\n{LONG} too.\n\n{LONG},  folded."
    )
    assert read_texts([file]) == [f"{LONG}, folded.", f"{LONG} too."]
    assert read_texts([str(file)]) == read_texts([file])


def test_line_ends_and_byte_order_marks_of_windows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", f"\ufeff{LONG} 1.\r\n\r\n{LONG} 2.\r\n")
    assert read_texts([file]) == [f"{LONG} 1.", f"{LONG} 2."]
    script = write(tmp_path / "a.py", f'\ufeff"""{LONG}."""\n')
    assert read_texts([script]) == [f"{LONG}."]


def test_docstrings(tmp_path: Path) -> None:
    source = f'"""{LONG} 1.\n\nNot this one, of the same docstring."""\ndef f():\n    """{LONG} 2."""\n    "\\d"\n'
    file = write(tmp_path / "a.py", source)
    assert read_texts([file]) == [f"{LONG} 1.", f"{LONG} 2."]
    assert read_texts([file], whole=True)[0] == f"{LONG} 1.\n\nNot this one, of the same docstring."


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.md", f"{LONG} b.")
    write(tmp_path / "a.rst", f"{LONG} a.")
    write(tmp_path / "weights.bin", b"\xff\x00")
    assert read_texts([tmp_path]) == [f"{LONG} a.", f"{LONG} b."]
    # A file that is named is read, whatever its name.
    assert read_texts([write(tmp_path / "c.log", f"{LONG} c."), tmp_path / "a.rst"]) == [
        f"{LONG} c.",
        f"{LONG} a.",
    ]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", "", r"20 characters.*a\.txt"),
        ("a.txt", "short\n\nshorter", "has none"),
        (
            "a.txt",
            f"{LONG} ".encode() + b"\xe9t\xe9",
            r"UTF-8.*a\.txt.*byte 32",
        ),
        ("a.bin", b"\x89PNG\r\n\x1a\n\xff", "must be UTF-8"),
        ("a.txt", f"{LONG}\0\0", "NUL bytes"),
        ("a.py", "def f(:\n", r"Python.*a\.py.*line 1"),
        ("a.py", "x = 1" + " + 1" * 20_000, r"a\.py is not: RecursionError"),
        ("a.py", "x = " + "-" * 20_000 + "1", r"a\.py is not: MemoryError"),
        ("a.py", "x = 1\n", "has none"),
    ],
)
def test_files_that_are_no_texts(
    tmp_path: Path, name: str, content: str | bytes, match: str
) -> None:
    good = write(tmp_path / "good.txt", f"{LONG}.")
    with pytest.raises(DataError, match=match):
        read_texts([good, write(tmp_path / name, content)])


def test_paths_without_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"exist.*nowhere"):
        read_texts([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="has none"):
        read_texts([tmp_path])
    # Too few texts are refused where they are split.
    assert read_texts([]) == []


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object) -> str:
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path / "a.txt", LONG)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataError, match=r"readable.*a\.txt.*Permission"):
        read_texts([file])


def test_the_standard_library_without_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it, because to read all takes seconds."""
    shutil.copytree(Path(sysconfig.get_path("stdlib"), "json"), tmp_path / "json")
    for name in ("test", "site-packages"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.py", f'"""{LONG}."""')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    texts = standard_library_docstrings.__wrapped__()
    assert 10 < len(texts) == len(set(texts))
    assert f"{LONG}." not in texts
    assert min(map(len, texts)) >= 20
    assert all(text == " ".join(text.split()) for text in texts)


def test_a_file_without_blank_lines_has_a_text_per_line(tmp_path: Path) -> None:
    lines = [f"{LONG} {i}." for i in range(3)]
    assert read_texts([write(tmp_path / "lines.txt", "\n".join(lines) + "\n")]) == lines
    assert read_texts([write(tmp_path / "lines.txt", "\n".join(lines) + "\n")], whole=True) == lines
    folded = read_texts(
        [write(tmp_path / "paragraphs.txt", "\n".join(lines[:2]) + "\n\n" + lines[2])]
    )
    assert folded == [" ".join(lines[:2]), lines[2]]


def test_split() -> None:
    texts = [f"text {i}" for i in range(10)]
    fit, held_out = split_texts(texts, 3, seed=1)
    assert (len(fit), len(held_out)) == (7, 3)
    assert sorted(fit + held_out) == sorted(texts)
    assert split_texts(texts, 3, seed=1) == (fit, held_out)
    assert split_texts(texts, 3, seed=2) != (fit, held_out)
    assert texts == [f"text {i}" for i in range(10)]
    assert len(split_texts(texts, 5)[0]) == 5


def test_splits_that_cannot_be() -> None:
    assert [len(part) for part in split_texts([str(i) for i in range(10)], 6)] == [8, 2]
    with pytest.raises(DataError, match=r"least 8.*--held-out.*got 7"):
        split_texts([str(i) for i in range(7)], 6)
