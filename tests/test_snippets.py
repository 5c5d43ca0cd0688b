"""Every snippet of the pages runs, one after another on its page, and so do the cells of the notebook."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_docs import ALL, ROOT

# What the words of a page take for granted: a model, its inputs, and what they call by name.
GPT = """
import contextlib, copy
import dynorm, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
batches = [{"input_ids": torch.randint(0, 32, (4, 8))} for _ in range(6)]
held_out, batch, example = batches[4:], batches[0], (batches[0]["input_ids"],)
"""
BEFORE = {
    "docs/guide.md": GPT,
    "docs/without-norms.md": GPT,
    # The last of the page is for a model with RMSNorms.
    "docs/fold.md": GPT
    + """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
""",
    "docs/witnesses.md": GPT + "sites = dynorm.find_norms(model, **batch)",
    "docs/anneal.md": GPT
    + """
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
arguments = TrainingArguments("runs", max_steps=10, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
loader, total = [batch] * 1000, 1000
def train_step(model, batch):
    if step == 600:
        model.train()(**batch)
""",
}
# Written for a trainer's own arguments, several processes, or compilers that take long; the tests
# named run the same.
ELSEWHERE = {
    "docs/parallel.md": "tests/parallel",
    "docs/deploy.md": "tests/export",
    "docs/howto/processes.md": "tests/jobs/test_ranks.py",
    "docs/howto/programs.md": "tests/hub/test_registration.py",
    "docs/howto/encoder.md": "tests/ecosystem/test_sentence_transformers.py",
}
SLOW = {"docs/tutorial.md", "docs/howto/from-scratch.md", "docs/guide.md", "docs/anneal.md"}
# Each of its snippets begins with a model that has its norms.
AFRESH = {"docs/anneal.md"}


def snippets(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


PAGES = [page for page in ALL if page != "README.md" and page not in ELSEWHERE and snippets(page)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]
)
def test_the_snippets_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(), contextlib.redirect_stdout(None):
        torch.manual_seed(0)
        exec(BEFORE.get(page, ""), names)
        for snippet in snippets(page):
            if page in AFRESH:
                exec(BEFORE[page], names)
            exec(compile(snippet, page, "exec"), names)


@pytest.mark.parametrize("page", sorted(ELSEWHERE))
def test_the_snippets_that_other_tests_run_are_code(page: str) -> None:
    assert (ROOT / ELSEWHERE[page]).exists()
    assert [compile(snippet, page, "exec") for snippet in snippets(page)]


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    document = json.loads((ROOT / "docs" / "one-norm.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    with torch.random.fork_rng(), contextlib.redirect_stdout(None):
        for cell in cells:
            exec(compile(cell, "one-norm.ipynb", "exec"), names)
    import matplotlib.pyplot as plt

    plt.close("all")
    assert names["errors"]["with"] < 0.7 * names["errors"]["without"]
    assert names["report"].output.cosine_mean > 0.95
    # What stands in the page was computed by these cells.
    shown = [output for cell in document["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    printed = next(
        output for output in shown if "without" in str(output.get("data", {}).get("text/plain"))
    )
    said = json.loads("".join(printed["data"]["text/plain"]).replace("'", '"'))
    assert said == pytest.approx(names["errors"], rel=0.02)
