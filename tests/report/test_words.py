"""The sentences of a report: what a value depends on, what was lost, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynorm.report import ModelReport, OutputReport
from dynorm.report.model_report import about_sites, dependence
from tests.report.cases import toy_report


@pytest.fixture(scope="module")
def report() -> ModelReport:
    return toy_report()


@pytest.mark.parametrize(
    ("layer", "counts", "words"),
    [
        ("dyisru", (0, 0), "each value depends on its own channel"),
        ("dyisru", (0, 4), "each value depends on its own channel and on at most 4 named ones"),
        ("dyisru", (1, 0), "each value depends on its own channel and on at most 1 named one"),
        (
            "linear",
            (0, 0),
            "each value depends on its own channel, by a line that is the same for all tokens",
        ),
    ],
)
def test_the_verdict_and_not_the_title_says_what_a_value_depends_on(
    report: ModelReport, layer: str, counts: tuple[int, int], words: str
) -> None:
    sites = []
    for site, count in zip(report.sites, counts, strict=True):
        sites.append(replace(site, layer=layer, witnesses=tuple(range(count))))
    assert dependence(sites) == words
    changed = replace(report, sites=sites)
    assert changed.verdict().lower().startswith(words.lower())
    assert str(changed).count("epends on") == 1


LANGUAGE = {"kind": "language", "loss_original": 2.0}
OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    ("Little quality was lost: the loss is 2.040", LANGUAGE | {"loss_now": 2.04}),
    ("Some quality was lost: the loss is 2.010", LANGUAGE | {"loss_now": 2.01, "kl": 0.1}),
    ("Some quality was lost: the loss is 2.200", LANGUAGE | {"loss_now": 2.2}),
    ("Much of the quality was lost: the loss is 3.500", LANGUAGE | {"loss_now": 3.5}),
    # A model that was trained on.
    ("The model differs from the original, but", LANGUAGE | {"loss_now": 1.0, "kl": 2.5}),
    ("Little quality was lost: the mean cosine", {"kind": "tensor", "cosine_mean": 0.991}),
    ("Some quality was lost: the mean cosine", {"kind": "encoder", "cosine_mean": 0.96}),
    ("Much of the quality was lost: the mean", {"kind": "tensor", "cosine_mean": 0.9}),
    # A large common part of all samples hides their differences.
    ("Some quality was lost", {"kind": "tensor", "cosine_mean": 1.0, "error": 0.4}),
    ("Much of the quality was", {"kind": "encoder", "cosine_mean": 1.0, "spearman": 0.4}),
    ("Some quality was lost", {"kind": "encoder", "cosine_mean": 1.0, "neighbours": 0.8}),
    ("80.0% of the samples keep", {"kind": "encoder", "cosine_mean": 0.9, "neighbours": 0.8}),
]


@pytest.mark.parametrize(("words", "figures"), OUTPUTS)
def test_the_verdict_says_what_was_lost_and_what_to_do_next(
    report: ModelReport, words: str, figures: dict[str, Any]
) -> None:
    if "loss_now" in figures:
        figures = figures | {"loss_difference": figures["loss_now"] - figures["loss_original"]}
    output = OutputReport(**figures, samples=10, cosine_min=0.5)
    is_good = words.startswith(("Little", "The model differs"))
    nexts: list[tuple[dict[str, Any], str]] = [
        ({}, "distil it (dynorm.distill_, or --steps in the command), or give the layers a few"),
        ({"distill": {}}, "distil it longer, or give the layers a few named channels"),
    ]
    for stages, todo in nexts:
        meta = {"stages": stages, "worst_sample": "a text"}
        said = replace(report, output=output, meta=meta).verdict()
        assert words in said
        assert 'The worst of 10 samples has a cosine of 0.500: "a text".' in said
        assert ("try it on your own task" if is_good else todo) in said


def test_the_loss_without_training_and_distilled_are_side_by_side(report: ModelReport) -> None:
    def staged(**outputs: dict[str, float]) -> ModelReport:
        stages = {name: {"output": output} for name, output in outputs.items()}
        output = replace(report.output, kind="encoder")
        return replace(report, output=output, meta={"stages": stages})

    calibrated = {"cosine_mean": 0.81, "spearman": 0.7}
    both = staged(calibrate=calibrated, distill={"cosine_mean": 0.98})
    table = both.stages()
    assert table is not None
    assert [row[:3] for row in table.cells()] == [
        ["without training", "0.810", "0.700"],
        ["distilled", "0.980", "–"],
    ]
    assert str(table) in str(both)
    back = staged(calibrate=calibrated, distill={"cosine_mean": 0.7})
    back.meta["stages"]["distill"]["kept"] = False
    assert "distilled, not kept" in str(back)
    assert replace(report, meta={}).stages() is None


def errors(values: list[float]) -> dict[str, float]:
    return {f"norm{n}": value for n, value in enumerate(values)}


def test_sites_that_stand_out_are_to_be_kept() -> None:
    sentence = about_sites(errors([0.1, 0.12, 0.1, 0.44, 0.09, 0.3]), "none")
    assert "norm3 (0.440), norm5 (0.300)" in sentence
    # The command without its own target would go back to the default.
    assert "to={'PATH': 'keep', '*': 'none'}, or --to PATH=keep --to none." in sentence
    # Small errors do not matter, however different they are.
    for alike in ([0.1, 0.12, 0.15], [0.01, 0.01, 0.09], [0.1], []):
        assert about_sites(errors(alike), "none") == ""
