"""The pages of the study from its runs: ``python -m studies.report`` writes study.json, pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dynorm.errors import DataError
from dynorm.files import require_writable, write_bytes, write_text
from studies.arms import SHOWN
from studies.plan import LONG, LONGEST, PLAN, SIDE, SMALL, Part
from studies.runs import ROOT, RUNS, dumps, read_all, read_log
from studies.summary import summarize
from studies.tables import (
    NOT_YET,
    answers,
    checkpoints,
    functions,
    headline,
    left,
    on_the_way,
    opening,
    rates,
    table,
    titled,
)
from studies.train import main

STUDY = ROOT / "studies" / "results" / "study.json"
PAGE = ROOT / "docs" / "study.md"
DETAILS = ROOT / "docs" / "study-runs.md"
# The marks of the first page; all others are on the second.
FIRST = ("headline", "curves")
IMAGES = ROOT / "docs" / "images"
CAPTIONS = {
    "study-rates": "Held-out loss of each arm over its learning rate, seed 0: squares as published, or "
    "as tuned by the authors, diamonds annealed. A triangle at the top lies above the panel, or "
    "diverged.",
    "study-curves": "Held-out loss over the steps, each arm at its best rate, seed 0.",
    "study-constants": "The constant of every norm's site as it moved, at the arm's best rate, seed 0; the first site "
    "is dark, the last light.",
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    runs: Annotated[Path, typer.Option(help="Folder of results and logs.")] = RUNS,
    study: Annotated[Path, typer.Option(help="The summary to write.")] = STUDY,
    page: Annotated[
        Path, typer.Option(help="The page whose marked parts are written anew.")
    ] = PAGE,
    details: Annotated[
        Path, typer.Option(help="The page of all runs, whose marked parts are written too.")
    ] = DETAILS,
    images: Annotated[Path, typer.Option(help="Folder of the pictures.")] = IMAGES,
) -> None:
    """Write the summary, the pictures, and the marked parts of both pages.

    Example: python -m studies.report
    """
    from studies.pictures import draw

    for file in (study, page, details, images / "study-rates.png"):
        require_writable(file)
    log = partial(read_log, out=runs)
    found = summarize(read_all(runs), log=log)
    texts = {}
    for file, marked in ((page, first_parts(found)), (details, other_parts(found))):
        text = file.read_text("utf-8") if file.exists() else ""
        texts[file] = with_parts(text, marked)
    pictures = draw(found, log)
    for name, picture in pictures.items():
        write_bytes(images / f"{name}.png", picture)
    write_text(study, dumps(found, indent=1) + "\n")
    for file, text in texts.items():
        write_text(file, text)
    typer.echo(f"{sum(group['runs'] for group in found['groups'].values())} runs: {study}, {page}")


def with_parts(text: str, marked: Mapping[str, str]) -> str:
    """Return the page with its marked parts written anew.

    Args:
        text: the page.
        marked: the parts by their mark.

    Raises:
        DataError: the page lacks a mark.
    """
    for key, part in marked.items():
        start, end = f"<!-- study {key}: made by python -m studies.report -->", "<!-- end -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise DataError(
                f"the page must have the marks {start} and {end}, but one is missing: put it back"
            )
        text = f"{before}{start}\n{part}\n{end}{after}"
    return text


def first_parts(study: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the first page by their mark."""
    return {key: part for key, part in parts(study).items() if key in FIRST}


def other_parts(study: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page of all runs by their mark."""
    return {key: part for key, part in parts(study).items() if key not in FIRST}


def parts(study: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of both pages by their mark."""
    found = {
        "headline": headline(study),
        "opening": opening(study),
        "answers": answers(study),
        "functions": functions(study),
        "good-rates": rates(study),
    }
    found |= {part.key: table(part, study) for part in PLAN if part not in (LONGEST, *SIDE)}
    found["long"] = "\n\n".join(filter(None, (found["long"], titled([LONGEST], study))))
    found["variants"] = titled(SIDE, study) or f"{NOT_YET.capitalize()}."
    drawn = has_runs(study, SMALL) or has_runs(study, LONG)
    for name, caption in CAPTIONS.items():
        there = drawn and (name != "study-constants" or has_constants(study))
        image = f"![{caption}](images/{name}.png)\n\n{caption}"
        found[name.removeprefix("study-")] = image if there else f"{NOT_YET.capitalize()}."
    found |= {
        "checkpoints": checkpoints(study),
        "on-the-way": on_the_way(study),
        "left": left(study),
    }
    return found


def has_runs(study: Mapping[str, Any], part: Part) -> bool:
    """Whether a part has a run that can be drawn."""
    groups = (study["groups"].get(sweep[0].group) for sweep in part.sweeps())
    return any(group is not None and group["best_lr"] is not None for group in groups)


def has_constants(study: Mapping[str, Any]) -> bool:
    """Whether an arm whose constants are drawn has a run."""
    names = (
        sweep[0].group for part in (SMALL, LONG) for sweep in part.sweeps() if sweep[0].arm in SHOWN
    )
    return any(
        (study["groups"].get(name) or {"best_lr": None})["best_lr"] is not None for name in names
    )


if __name__ == "__main__":
    main(app, "studies.report")
