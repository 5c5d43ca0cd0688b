"""Measure the loss on a task: find the Debian package of a synopsis, before and after the conversion.

``python -m benchmarks.retrieval build/demo/model`` writes benchmarks/results/retrieval.json. The
synopsis of a package is the query and the long descriptions of 1,500 packages are searched, by the
cosine of mean-pooled embeddings. No stage of the conversion has seen any of these texts. They are
the descriptions in Debian's package lists, which ``make retrieval`` fetches first. If the texts are
the same, the rows of other models stay. ``--check`` writes nothing. It fails if a model loses more
of the original's mean reciprocal rank than its committed row, by more than the noise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dynorm.files import write_text
from dynorm.jobs import Pretrained, encode, load_pretrained, make_batches
from dynorm.jobs.job import library_versions
from tools.demo_model import folder

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "retrieval.json"
TEXTS = ROOT / "build" / "debian-descriptions.txt"
PACKAGES = 1500
SEEDS = 3
BATCH = 32
LENGTH = 256
# The noise of a loss: this number of standard deviations over the committed draws, and at least LEAST.
NOISE = 3.0
LEAST = 0.002
Row = dict[str, Any]


def main() -> None:
    """Measure the original and each given model, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders of converted models")
    parser.add_argument(
        "--descriptions", type=Path, default=TEXTS, help="a Translation-en file of Debian, unpacked"
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed rows")
    arguments = parser.parse_args()
    text = arguments.descriptions.read_text("utf-8")
    known = packages(text)
    models = {"original": folder()}
    for path in arguments.models:
        models[path.parent.name] = path
    rows = []
    for name, path in models.items():
        pretrained = load_pretrained(path)
        row: Row = {"model": name, "mrr": [], "recall_at_1": []}
        for seed in range(SEEDS):
            figures = searched(pretrained, sample(known, seed))
            row["mrr"].append(round(figures["mrr"], 4))
            row["recall_at_1"].append(round(figures["recall_at_1"], 4))
        rows.append(row)
        print(row, flush=True)
    if arguments.check:
        check(rows)
        return
    measured = {row["model"] for row in rows}
    digest = hashlib.sha256(text.encode()).hexdigest()
    if RESULTS.exists():
        committed = json.loads(RESULTS.read_text())
        # Rows on other descriptions cannot be compared with these.
        if committed["sha256"] == digest:
            rows += [row for row in committed["rows"] if row["model"] not in measured]
    document: dict[str, Any] = {
        "packages": PACKAGES,
        "seeds": SEEDS,
        "descriptions": len(known),
        "sha256": digest,
        "made_with": library_versions(),
        "rows": rows,
    }
    write_text(RESULTS, json.dumps(document, indent=1) + "\n")


def check(rows: list[Row]) -> None:
    """Compare the losses of models with the committed ones; exit with 1 if one is larger."""
    document = json.loads(RESULTS.read_text())
    committed = {row["model"]: row for row in document["rows"]}
    failed = False
    for row in rows[1:]:
        now = losses(rows[0], row)
        before = losses(committed["original"], committed[row["model"]])
        noise = max(NOISE * statistics.stdev(before), LEAST)
        is_worse = statistics.mean(now) > statistics.mean(before) + noise
        failed = failed or is_worse
        print(
            f"{row['model']}: loses {statistics.mean(now):.4f} of the mean reciprocal rank, "
            f"committed {statistics.mean(before):.4f} with a noise of {noise:.4f}"
            f"{': WORSE' if is_worse else ''}"
        )
    if failed:
        sys.exit(1)


def losses(original: Row, row: Row) -> list[float]:
    """Return the loss of a model in each draw of packages."""
    pairs = zip(original["mrr"], row["mrr"], strict=True)
    return [before - after for before, after in pairs]


def packages(text: str) -> list[tuple[str, str]]:
    """Return synopsis and long description of each package that has both; of equal synopses the first."""
    descriptions: dict[str, str] = {}
    for stanza in text.split("\n\n"):
        parts = re.search(r"^Description-en: (.+)\n((?: .*\n?)+)", stanza, re.MULTILINE)
        if parts is not None:
            # A dot by itself on a line is a blank line.
            description = parts[2].replace("\n .\n", "\n")
            description = re.sub(r"\s+", " ", description).strip()
            descriptions.setdefault(parts[1], description)
    return list(descriptions.items())


def sample(known: list[tuple[str, str]], seed: int) -> list[tuple[str, str]]:
    """Return a seed's packages."""
    return random.Random(seed).sample(known, PACKAGES)


@torch.no_grad()
def searched(pretrained: Pretrained, chosen: list[tuple[str, str]]) -> Row:
    """Return the mean reciprocal rank of the right package, and how often it is the first."""
    queries = embedded(pretrained, [synopsis for synopsis, _ in chosen])
    documents = embedded(pretrained, [description for _, description in chosen])
    scores = queries @ documents.T
    right = scores.diagonal()[:, None]
    # If scores are equal, the right package comes last.
    ranks = (scores >= right).sum(1).double()
    return {
        "mrr": float(ranks.reciprocal().mean()),
        "recall_at_1": float((ranks == 1).double().mean()),
    }


def embedded(pretrained: Pretrained, texts: list[str]) -> Tensor:
    """Return the mean-pooled embeddings of texts, each of length 1."""
    encoded = encode(pretrained, texts, LENGTH)
    model = pretrained.model.eval()
    rows = []
    for batch in make_batches(pretrained, encoded, BATCH):
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].to(hidden)
        means = (hidden * mask).sum(1) / mask.sum(1)
        rows.append(normalize(means, dim=1))
    # The batches are in the order of length, from short to long.
    lengths = [len(ids) for ids in encoded]
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    return torch.cat(rows)[torch.tensor(order).argsort()]


if __name__ == "__main__":
    main()
