"""README and docs show the committed results, and name only existing things."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dynorm
from benchmarks.models import models_table
from benchmarks.tables import PAGES, renewed
from tests.snippet_cases import is_shown, outputs, snippets

ROOT = Path(__file__).parent.parent
ALL = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_tables_are_those_of_the_committed_results(page: str) -> None:
    assert renewed(page) == (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("page", ALL)
def test_pages_name_only_what_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    # In code, and in the directives of the reference; not names of files, such as `dynorm.json`.
    for names in re.findall(r"(?:`|:: |\s)dynorm\.([A-Za-z_.]+)(?=[`(\n,])", text):
        assert exists(f"dynorm.{names}"), names


def test_the_first_snippet_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = snippets("README.md")[0]
    shown = outputs("README.md")[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(snippet, {})
    assert shown is not None
    assert is_shown(shown, capsys.readouterr().out)
    assert (tmp_path / "saved" / "dynorm.json").exists()


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module, _, rest = name.rpartition(".")
    if importlib.util.find_spec(module) is None:
        return False
    return (
        hasattr(importlib.import_module(module), rest) or importlib.util.find_spec(name) is not None
    )


@pytest.mark.parametrize("page", ALL)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, heading in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", path.read_text("utf-8")):
        aim = path.parent / target if target else path
        assert aim.exists(), target
        if heading:
            assert heading in headings(aim), f"{target}#{heading}"


def headings(page: Path) -> set[str]:
    """The headings of a page as links have them; in code, # begins a comment."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    missing = [
        name
        for name in dynorm.__all__
        if not isinstance(getattr(dynorm, name), ModuleType)
        and not re.search(rf":: {name}\b", text)
    ]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in ALL if snippets(page)])
def test_a_page_imports_dynorm_before_it_uses_it(page: str) -> None:
    for snippet in snippets(page):
        if re.search(r"^\s*(?:import|from) dynorm", snippet, re.MULTILINE):
            return
        assert not re.search(r"\bdynorm\.[a-z]", snippet), snippet


def test_every_extra_is_on_the_page_about_installing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "docs"}
    table = (ROOT / "docs" / "install.md").read_text("utf-8").split("| extra | for |")[1]
    for extra in extras:
        assert re.search(rf"^\|[^|]*`{extra}`", table, re.MULTILINE), extra


@pytest.mark.parametrize("page", ALL)
def test_commands_that_need_an_extra_have_it_near(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    needs = {
        "paper": r"^dynorm (?:paper|prove)\b",
        "gguf": r"\.gguf`? (?:file|works)|^dynorm .*\.gguf",
    }
    for extra, command in needs.items():
        if re.search(command, text, re.MULTILINE):
            assert re.search(
                rf"`?{extra}`?\s+extra|extra\s+`?{extra}`?|^\|[^|]*`{extra}`", text, re.MULTILINE
            ), extra


@pytest.mark.parametrize(
    ("page", "row", "name"),
    [
        ("decoder", r"SmolLM2[^|]*, 192 witnesses", "smollm2"),
        ("vision", r"DINOv2-small[^|]*, 128 witnesses", "dinov2"),
        ("speech", r"Whisper[^|]*, 128 witnesses", "whisper"),
    ],
)
def test_a_kind_of_model_has_one_recipe(page: str, row: str, name: str) -> None:
    [command] = re.findall(rf"\| {row} \| `(.*?)`", models_table())
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text("utf-8")
    commands = re.findall(r"^dynorm convert .*", text, re.MULTILINE)
    assert command in [shown.removesuffix(" --keep-original") for shown in commands]
    # `make demo` runs the same, on its own files.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    options, _, steps = command.removeprefix("dynorm convert MODEL OUT ").partition(" --steps ")
    options = options.replace("FILES", r"\S+")
    assert re.search(rf"^OPTIONS_{name} := {options} ", makefile, re.MULTILINE)
    assert re.search(rf"^STEPS_{name} := {steps or 0}$", makefile, re.MULTILINE)


def test_pages_lead_to_the_recipe_for_a_decoder() -> None:
    links = {"README.md": "docs/howto", "docs/models.md": "howto", "docs/witnesses.md": "howto"}
    for page, folder in links.items():
        assert f"]({folder}/decoder.md)" in (ROOT / page).read_text("utf-8"), page


def test_the_readme_has_at_most_a_thousand_words() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1000


@pytest.mark.parametrize("page", ["speed", "fold", "deploy", "study"])
def test_a_page_of_results_begins_with_the_answer_and_a_short_table(page: str) -> None:
    lines = (ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    # Only the title is above the table: no other heading, formula or program.
    above = [line for line in lines[1:start] if line.startswith(("#", "$$", "```"))]
    assert above == []
    rows = 0
    while lines[start + rows].startswith("|"):
        rows += 1
    assert rows <= 2 + 10


def test_the_pictures_have_a_background_so_that_they_can_be_read_on_a_dark_page() -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = sorted((Path(__file__).parents[1] / "docs" / "images").glob("*.png"))
    assert pictures
    for path in pictures:
        least, _ = image.open(path).convert("RGBA").getchannel("A").getextrema()
        assert least == 255, path
