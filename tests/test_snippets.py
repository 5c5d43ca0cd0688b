"""Every snippet of the pages runs, one after another on its page, and so do the cells of the notebook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dynorm
from tests.parallel.launch import launch, values
from tests.snippet_cases import is_shown, outputs, snippets
from tests.test_docs import ALL, ROOT

# Names that the pages use without a definition: a model, its inputs, and others.
GPT = """
import contextlib, copy
import dynorm, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
batches = [{"input_ids": torch.randint(0, 32, (4, 8))} for _ in range(6)]
held_out, batch, example = batches[4:], batches[0], (batches[0]["input_ids"],)
"""
# The same, trained on a real text.
TRAINED = (
    GPT
    + """
import os
from pathlib import Path
config = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
text = torch.tensor(list(Path(os.__file__).read_bytes()[:32768]))
batches = [{"input_ids": block} for block in text.view(32, 16, 64)]
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for step in range(150):
    loss = model(**batches[step % 32], labels=batches[step % 32]["input_ids"]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
batches, held_out = batches[:24], batches[24:]
"""
)
ENCODER = """
from pathlib import Path
from tests.ecosystem.models import bert, saved
Path("converted").mkdir()
saved(bert(), Path("converted/model"))
"""
DEPLOYED = """
import torch
from benchmarks.compiled import converted, inputs, tiny_model
example = inputs("llama", 2, 8)
batches = [inputs("llama", rows, 8) for rows in (2, 3, 4)]
model = converted(tiny_model("llama"), example).requires_grad_(False)
"""
BEFORE = {
    "docs/deploy.md": DEPLOYED,
    "docs/howto/encoder.md": ENCODER,
    "docs/guide.md": TRAINED,
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
# Below: in two processes, or in a program that imports dynorm by itself. In tests/hub: without
# dynorm, or with a stand-in for the hub.
ELSEWHERE = {
    "docs/parallel.md",
    "docs/howto/processes.md",
    "docs/howto/programs.md",
    "docs/howto/without-dynorm.md",
}
SLOW = {
    "docs/tutorial.md",
    "docs/howto/from-scratch.md",
    "docs/guide.md",
    "docs/anneal.md",
    "docs/deploy.md",
}
# Snippets that begin with a new model: each that trains, and the second that quantizes.
AFRESH = {"docs/anneal.md": range(100), "docs/deploy.md": range(4, 5)}
# The outputs shown are those of a random model, which transformers 5.0 builds differently.
NEEDS_TRANSFORMERS = {"docs/howto/speech.md": "5.1"}
NEEDS = {
    "docs/deploy.md": ["torchao", "onnxscript"],
    "docs/howto/encoder.md": ["sentence_transformers"],
}
PAGES = [page for page in ALL if page != "README.md" and page not in ELSEWHERE and snippets(page)]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]
)
def test_the_snippets_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in NEEDS.get(page, []):
        pytest.importorskip(library)
    if page in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", minversion=NEEDS_TRANSFORMERS[page])
    monkeypatch.chdir(tmp_path)
    # It compiles for half a minute; tests/export packages models, and runs them.
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", lambda program, **_: program)
    for snippet, printed, shown in zip(
        snippets(page), printed_by(page), outputs(page), strict=True
    ):
        assert shown is None or is_shown(shown, printed), printed
        # A reader sees how a verdict or an error looks.
        if re.search(r"print\(.*(report|measure|verdict)", snippet):
            assert shown is not None, printed


def printed_by(page: str) -> list[str]:
    """Run the snippets of a page, and return the output of each."""
    names: dict[str, Any] = {}
    printed = []
    with torch.random.fork_rng(), contextlib.redirect_stdout(None):
        torch.manual_seed(0)
        exec(BEFORE.get(page, ""), names)
        for number, snippet in enumerate(snippets(page)):
            if number in AFRESH.get(page, ()):
                exec(BEFORE[page], names)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(snippet, page, "exec"), names)
            printed.append(output.getvalue())
    return printed


def test_an_output_that_is_stale_is_noticed() -> None:
    printed = "Little was lost: 0.998 of\n  1,024. The rest.\nsite  error\na.norm  0.20\n"
    assert is_shown("Little was lost: 0.99 of 1,000.\n...\na.norm 0.21\n", printed)
    assert not is_shown("Little was lost: 0.80 of 1,024.\n", printed)
    assert not is_shown("Much was lost: 0.998 of 1,024.\n", printed)
    assert not is_shown("a.norm 0.20\n...\nLittle was lost\n", printed)
    assert not is_shown("a.norm 0.20 more\n", printed)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_guide_begins_with_the_main_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(None):
        exec(GPT, names)
        exec(snippets("docs/guide.md")[0], names)
    model, batch = names["model"], names["held_out"][0]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    layers = [module for module in model.modules() if isinstance(module, dynorm.DyISRU)]
    assert not norms
    assert len(layers) == 5
    torch.testing.assert_close(dynorm.load("converted")(**batch).logits, model(**batch).logits)


@pytest.mark.slow
def test_the_snippets_for_several_processes_run(tmp_path: Path) -> None:
    found = launch("tests.snippet_cases", 2, tmp_path, "tensor_parallel", "several_processes")
    # The summed gradients and the trained weights must be equal on both ranks.
    first, second = values(found, "tensor_parallel")
    assert set(first) == {"blocks.0.norm1.log_beta", "blocks.0.norm2.log_beta"}
    assert min(first.values()) > 0
    assert first == second
    first, second = values(found, "several_processes")
    assert sum("log_beta" in name for name in first) == 5
    assert first == second


# lm_eval is not installed. It takes the name of the folder from a string of arguments.
LM_EVAL = """
from transformers import AutoModel
def simple_evaluate(model, model_args, tasks):
    loaded = AutoModel.from_pretrained(model_args.removeprefix("pretrained="))
    return type(loaded.embeddings.LayerNorm).__name__
"""


@pytest.mark.slow
def test_the_snippets_for_programs_run(tmp_path: Path) -> None:
    models = pytest.importorskip("tests.ecosystem.models")
    (tmp_path / "converted").mkdir()
    dynorm.save(models.bert(), tmp_path / "converted" / "model")
    (tmp_path / "lm_eval.py").write_text(LM_EVAL, "utf-8")
    # tests/hub runs the page's sitecustomize.py, and checks that without it and without an import of
    # dynorm the program is refused.
    _, call = snippets("docs/howto/programs.md")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", call + "print(results)"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "DyISRU", run.stderr


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
    # The outputs in the page were computed by these cells.
    shown = [output for cell in document["cells"] for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    printed = next(
        output for output in shown if "without" in str(output.get("data", {}).get("text/plain"))
    )
    said = json.loads("".join(printed["data"]["text/plain"]).replace("'", '"'))
    assert said == pytest.approx(names["errors"], rel=0.02)
