"""README and docs: snippets run, the outputs shown are near the real ones, names and links exist."""

import contextlib
import importlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
SNIPPET = re.compile(
    r"^```python\n(.*?)^```(?:\n\n(?:[^`\n]+\n\n)?```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL
)
SLOW = {"docs/tutorial.md", "docs/guide.md", "docs/decoder.md", "docs/run-elsewhere.md"}
LONGEST_TABLE = 12


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def with_snippets() -> list:
    pages = []
    for page in PAGES:
        if SNIPPET.search(text_of(page)):
            marks = [pytest.mark.slow] if page in SLOW else []
            pages.append(pytest.param(page, marks=marks))
    return pages


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", with_snippets())
def test_the_snippets_of_a_page_run_and_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code, shown in SNIPPET.findall(text_of(page)):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page, "exec"), names)
            assert is_shown(shown, printed.getvalue()), printed.getvalue()


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows the output: equal words, and numbers within a tenth or 0.03.

    Lines of "..." stand for parts that are left out.
    """
    words = parts_of(printed)
    start = 0
    for passage in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = parts_of(passage)
        while not alike(wanted, words[start : start + len(wanted)]):
            start += 1
            if start + len(wanted) > len(words):
                return False
        start += len(wanted)
    return True


def parts_of(text: str) -> list[str]:
    return re.findall(r"[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?|[^\W\d]+|[^\w\s]", text)


def alike(wanted: list[str], found: list[str]) -> bool:
    return len(wanted) == len(found) and all(map(near, wanted, found))


def near(wanted: str, found: str) -> bool:
    try:
        values = [float(word.replace("−", "-").replace(",", "")) for word in (wanted, found)]
    except ValueError:
        return wanted == found
    return values[0] == pytest.approx(values[1], rel=0.1, abs=0.03)


def test_outputs_are_compared_word_by_word():
    assert is_shown("loss 1.00\n...\nthe end\n", "loss 1.02, and more before the end")
    assert not is_shown("loss 1.00\n", "loss 1.20")
    assert not is_shown("the end\n", "the loss")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_what_exists(page):
    text = text_of(page)
    for name in re.findall(r"(?:`|:: |\s)(dynorm\.[A-Za-z_.]+)(?=[`(\n,])", text):
        module, _, rest = name.rpartition(".")
        if hasattr(importlib.import_module(module), rest):
            continue
        assert importlib.util.find_spec(name) is not None, name
    for path in re.findall(r"`((?:examples|benchmarks|tests|tools|studies)/[\w./]+\.py)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    text = text_of(page)
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in slugs, link


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_short(page):
    rows = 0
    for line in text_of(page).splitlines():
        rows = rows + 1 if line.startswith("|") else 0
        # The head and the line below it are no rows.
        assert rows <= LONGEST_TABLE + 2, line
