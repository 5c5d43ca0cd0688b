"""With ``--json``, or away from a terminal, no command writes to standard error, nor does any library that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertModel

from tests.fresh import run
from tests.jobs.conftest import TEXTS, save, tiny_bert

COMMANDS = {
    # Fewer steps may make the loss no smaller, of which it warns.
    "convert": "tiny converted --texts texts.txt --held-out 16 --max-length 16 --steps 8",
    "inspect": "tiny --texts texts.txt --samples 8 --out inspection.html",
    "fold": "tiny folded",
    "paper": "--samples 1",
    "prove": "--only appendix-b --out proofs.html",
    "explore": "",
}
SCRIPT = """
import os, sys
from dynorm.cli import main
for words in sys.argv[1].splitlines():
    sys.argv = ["dynorm", *words.split()]
    os.dup2(os.open(sys.argv[1] + ".err", os.O_WRONLY | os.O_CREAT), 2)
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each command ran, and left its standard error in a file."""
    folder = tmp_path_factory.mktemp("silence")
    save(BertModel(tiny_bert()), folder / "tiny")
    (folder / "texts.txt").write_text("\n\n".join(TEXTS), "utf-8")
    lines = []
    for name, words in COMMANDS.items():
        json = ["--json"] if name in ("convert", "inspect", "fold") else []
        lines.append(" ".join([name, words, *json]))
    # Libraries are imported under the eyes of the test.
    run(SCRIPT, "\n".join(lines), imported="torch", folder=folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_nothing_to_standard_error(folder: Path, command: str) -> None:
    assert (folder / f"{command}.err").read_text() == ""
