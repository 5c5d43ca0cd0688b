"""The report: numbers from the runs, missing runs on the page, and pictures of the existing runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynorm.errors import DataError
from studies import report
from studies.pictures import draw
from studies.plan import DIRECT_RATES, LLAMA, MUON, PLAN, SMALL, missing
from studies.report import DETAILS, PAGE, STUDY, first_parts, other_parts, parts, with_parts
from studies.runs import dumps, read_all, read_log
from studies.settings import Settings
from studies.summary import baseline_of, summarize
from studies.tables import level, rate, table
from tests.studies.synthetic import EVERYTHING, imagined_log, results

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def sweep_of(arm: str, *losses: float | None) -> dict[str, dict[str, Any]]:
    return results(*[(Settings(arm, lr), loss) for lr, loss in zip(RATES, losses, strict=False)])


def group_of(study: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = study["groups"][Settings(arm, 1e-3).group]
    return found


def test_best_spread_and_difference() -> None:
    runs = sweep_of("layernorm", 2.1, 2.0, 1.9, 1.95, None) | sweep_of(
        "dyisru", 1.62, 1.58, 1.7, 2.0, None
    )
    runs |= results(
        *[(Settings("layernorm", 4e-3, seed=seed), loss) for seed, loss in ((1, 1.94), (2, 1.92))]
    )
    runs |= results(
        *[(Settings("dyisru", 2e-3, seed=seed), loss) for seed, loss in ((1, 1.60), (2, 1.66))]
    )
    found = summarize(runs)
    ours = group_of(found, "dyisru")
    assert ours["best_lr"] == 2e-3
    assert ours["losses"] == {0: 1.58, 1: 1.60, 2: 1.66}
    assert ours["mean"] == pytest.approx((1.58 + 1.60 + 1.66) / 3)
    assert ours["half_range"] == pytest.approx(0.04)
    assert (ours["runs"], ours["diverged"]) == (7, 1)
    assert ours["rates"] == {
        "0.001": 1.62,
        "0.002": 1.58,
        "0.004": 1.7,
        "0.008": 2.0,
        "0.016": None,
    }
    # Seed by seed: -0.32, -0.34, -0.26.
    assert ours["against"]["mean"] == pytest.approx(-0.92 / 3)
    assert ours["against"]["half_range"] == pytest.approx(0.04)
    assert ours["against"]["seeds"] == 3
    # Student's t for two degrees of freedom, 4.303, times the standard error.
    assert ours["against"]["interval"] == pytest.approx(
        4.3027 * (0.003466667 / 2 / 3) ** 0.5, rel=1e-4
    )
    assert ours["against"]["without_seed_0"] == pytest.approx(-0.30)
    assert "against" not in group_of(found, "layernorm")


def test_what_is_reported_and_its_error_are_of_the_items_that_no_choice_has_seen() -> None:
    ours, norm = Settings("dyisru", 1e-3), Settings("layernorm", 1e-3)
    runs = results((ours, 1.5), (norm, 1.6))
    runs[ours.name]["parts"] = [*[9.0] * 6, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    runs[norm.name]["parts"] = [*[0.0] * 6, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = group_of(summarize(runs), "dyisru")
    assert found["mean"] == pytest.approx(1.5)
    assert found["rates"] == {"0.001": 1.5}
    # Part by part: 0, 0.1, ..., 0.5, whose variance is 0.035.
    assert found["against"]["mean"] == pytest.approx(0.25)
    assert found["against"]["standard_error"] == pytest.approx((0.035 / 6) ** 0.5)


def test_a_seed_that_diverged_is_not_counted_as_one_that_did_not() -> None:
    seeds = [(Settings("dyisru", 2e-3, seed=seed), loss) for seed, loss in ((1, None), (2, 1.62))]
    runs = sweep_of("dyisru", 1.62, 1.58, 1.7) | results(*seeds)
    (row,) = [
        line for line in table(SMALL, summarize(runs)).splitlines() if line.startswith("| DyISRU |")
    ]
    assert "| 1.600 ± 0.020 (2 seeds, 1 diverged) |" in row


def test_the_answers_say_what_diverged_and_what_was_not_run() -> None:
    runs = sweep_of("layernorm", 2.1, 2.0, 1.9) | results(
        *[(Settings("dyisru", lr), None) for lr in DIRECT_RATES]
    )
    found = parts(summarize(runs))
    said = found["answers"]
    assert (
        "| DyISRU from the first step against LayerNorm, 600 steps | diverged at every rate |"
        in said
    )
    assert "| DyISRU against scaled DyT, 600 steps | diverged at every rate |" in found["functions"]
    # Runs that are missing are not listed.
    assert "scaled DyT" not in said
    assert "not run yet" not in said + found["functions"]


def test_the_last_checkpoint_is_compared_with_the_best_on_the_way() -> None:
    runs = sweep_of("layernorm", 2.1, 2.0, None) | sweep_of("dyisru", 1.62)
    logs = {
        Settings("layernorm", 1e-3).name: [2.5, None, 2.05, 2.1],
        Settings("layernorm", 2e-3).name: [2.4, 2.0],
        # It diverged, and says nothing of checkpoints.
        Settings("layernorm", 4e-3).name: [2.4, 9.0],
        Settings("dyisru", 1e-3).name: [1.8, 1.62],
    }
    study = summarize(runs, log=lambda name: [{"step": 1, "held_out": loss} for loss in logs[name]])
    said = parts(study)["checkpoints"].splitlines()
    assert "at most 0.050 nats" in said[0]
    assert said[5:] == [
        "| text | 600 | point-wise | 1 | 1 |  |",
        "| text | 600 | norm | 2 | 1 | 0.050 |",
    ]
    assert parts(summarize({}))["checkpoints"] == "Not run yet."


def test_a_checkpoint_that_has_a_norm_yet_is_none_of_an_annealed_run() -> None:
    runs = results((Settings("dyisru_annealed", 4e-3), 1.7))
    held_out = [(0.0, 1.5), (0.5, 1.6), (1.0, 1.68), (1.0, 1.7)]
    log = [
        {"step": 100 * place, "t": t, "held_out": loss} for place, (t, loss) in enumerate(held_out)
    ]
    study = summarize(runs, log=lambda name: log)
    assert "| text | 600 | annealed | 1 | 0 | 0.020 |" in parts(study)["checkpoints"]
    assert (
        "| norm, then DyISRU (annealed), 600 steps | 1.680 | 200 | 1.700 |"
        in parts(study)["on-the-way"]
    )


def test_answers_name_the_edges_of_both_arms() -> None:
    runs = sweep_of("layernorm", 2.2, 2.1, 2.0, 1.9) | sweep_of("dyisru", 1.6, 1.7)
    runs |= results((Settings("dyisru", 5e-4), 1.65), (Settings("dyt", 5e-4), 1.6))
    said = parts(summarize(runs))["answers"]
    start, norm = (
        "from the first step against LayerNorm, 600 steps | \N{MINUS SIGN}0.300 (1 seed);",
        "LayerNorm: the highest",
    )
    assert f"| DyISRU {start} {norm} rate run |" in said
    assert f"| scaled DyT {start} scaled DyT: 1 of 3 rates so far; {norm} rate run |" in said


def test_a_group_without_seed_0_has_no_best_yet() -> None:
    study = summarize(results((Settings("dyisru", 1e-3, seed=1), 1.5)))
    (row,) = [line for line in table(SMALL, study).splitlines() if line.startswith("| DyISRU |")]
    assert row == "| DyISRU | none (0 of 3 rates so far) | not run yet |  |  | 0 of 1 |"
    study = summarize(sweep_of("dyisru", None))
    assert "| none (1 of 3 rates so far) | diverged so far |" in table(SMALL, study)


def test_a_best_rate_at_the_edge_is_called_so() -> None:
    def row(*losses: float) -> str:
        return next(
            line
            for line in table(SMALL, summarize(sweep_of("layernorm", *losses))).splitlines()[2:]
        )

    # Its sweep in the plan begins at 2e-3.
    assert "| 8e-3 (the highest rate run) |" in row(2.1, 2.0, 1.9, 1.8)
    assert "| 1e-3 (the lowest rate run) |" in row(1.7, 1.8, 1.9, 2.0)
    assert "| 4e-3 |" in row(2.1, 2.0, 1.8, 1.9)


def test_rates_that_keep_up_with_the_norm_may_leave_some_out() -> None:
    norm = sweep_of("layernorm", 2.1, 2.0, 1.9)
    study = summarize(norm | sweep_of("dyisru", 1.95, 1.96, 1.8, None, 1.9))
    assert group_of(study, "dyisru")["level"] == [1e-3, 4e-3, 1.6e-2]
    assert level(group_of(study, "dyisru")) == "1e-3, 4e-3, 1.6e-2"
    assert level(group_of(summarize(norm | sweep_of("dyisru", 1.96)), "dyisru")) == "none"
    assert level(group_of(summarize(sweep_of("dyisru", 1.96)), "dyisru")) == ""


def test_point_wise_arms_are_compared_each_at_its_best_rate() -> None:
    runs = (
        sweep_of("dyisru", 1.62, 1.58, 1.7)
        | sweep_of("dyt", 1.60, 1.65, 1.7)
        | sweep_of("linear", None)
    )
    runs |= results((Settings("dyisru", 2e-3, seed=1), 1.55), (Settings("dyt", 1e-3, seed=1), 1.61))
    study = summarize(runs)
    assert list(study["pairs"]["small"]) == ["dyisru against dyt"]
    found = study["pairs"]["small"]["dyisru against dyt"]
    # Seed by seed: -0.02, -0.06.
    assert (found["mean"], found["half_range"], found["seeds"]) == (
        pytest.approx(-0.04),
        pytest.approx(0.02),
        2,
    )
    said = parts(study)["functions"].splitlines()
    so_far = "; DyISRU: 2 of 3 rates so far; scaled DyT: 2 of 3 rates so far"
    assert (
        f"| DyISRU against scaled DyT, 600 steps | \N{MINUS SIGN}0.040 ± 0.020 (2 seeds){so_far} |"
        in said
    )
    assert "| DyISRU against linear (control), 600 steps | diverged so far |" in said
    assert not any("linear (control), 3,000 steps" in line for line in said)


def test_of_rates_that_are_alike_the_best_has_the_most_seeds_and_then_the_lowest_mean() -> None:
    runs = sweep_of("dyisru", 1.52, 1.5, 1.54, 1.6)
    runs |= results(*[(Settings("dyisru", 1e-3, seed=seed), 1.5) for seed in (1, 2)])
    found = group_of(summarize(runs), "dyisru")
    assert (found["best_lr"], found["losses"]) == (1e-3, {0: 1.52, 1: 1.5, 2: 1.5})
    # As many seeds elsewhere, and a lower mean; more of them where the rate is not good do not
    # count.
    runs |= results(*[(Settings("dyisru", 4e-3, seed=seed), 1.4) for seed in (1, 2)])
    runs |= results(*[(Settings("dyisru", 8e-3, seed=seed), 1.3) for seed in (1, 2, 3)])
    assert group_of(summarize(runs), "dyisru")["best_lr"] == 4e-3
    again = [
        run.settings for run in missing(runs, (replace(SMALL, arms=("dyisru",), extend=False),))
    ]
    assert all(settings.seed == 0 for settings in again)


def test_the_opening_says_who_is_ahead_and_names_only_what_was_run() -> None:
    runs = sweep_of("layernorm", 2.0) | sweep_of("dyisru", 1.8) | sweep_of("dyt_published", 2.5)
    long = {"steps": 3000}
    runs |= results(
        (Settings("layernorm", 4e-3, **long), 1.2), (Settings("dyisru", 5e-4, **long), 1.25)
    )
    others = (("layernorm", 1, 2.0), ("dyisru", 1, 1.7), ("layernorm", 2, 2.0), ("dyisru", 2, 1.75))
    runs |= results(*[(Settings(arm, 1e-3, seed=seed), loss) for arm, seed, loss in others])
    # On either side of LayerNorm's: 0.05 above with one seed, and 0.09 below with another.
    runs |= results(
        (Settings("layernorm", 4e-3, seed=1, **long), 1.2),
        (Settings("dyisru", 5e-4, seed=1, **long), 1.11),
    )
    lines = parts(summarize(runs))["opening"].splitlines()
    assert lines == [
        "A network that is point-wise from the first step, with DyISRU, is 0.250 ± 0.050 nats ahead of "
        "LayerNorm after 600 "
        "steps (3 seeds), level with LayerNorm after 3,000 steps (2 seeds, \N{MINUS SIGN}0.020 ± "
        "0.070 nats).",
        "",
        "The constants must be measured on activations. With the published constant DyT is 0.500 nats "
        "above LayerNorm "
        "after 600 steps (1 seed).",
    ]
    assert parts(summarize({}))["opening"] == "Not run yet."


def test_each_arm_has_its_lowest_loss_on_the_way() -> None:
    runs = sweep_of("dyisru", 1.7, 1.6) | results((Settings("dyisru", 2e-3, seed=1), 1.6))
    logs = {0: [2.0, 1.5, 1.6], 1: [2.0, 1.7, 1.6]}

    def log(name: str) -> list[dict[str, Any]]:
        losses = logs[int(name[-1])] if "lr0.002" in name else [0.0]
        return [{"step": 100 * place, "held_out": loss} for place, loss in enumerate(losses)] + [
            {"step": 300}
        ]

    rows = parts(summarize(runs, log=log))["on-the-way"].splitlines()
    assert rows[2:] == ["| DyISRU, 600 steps | 1.550 | 150 | 1.600 |"]
    assert parts(summarize(runs))["on-the-way"] == "Not run yet."


def test_the_variants_that_were_run_stand_below_their_titles() -> None:
    assert parts(summarize({}))["variants"] == "Not run yet."
    settings = Settings("dyisru", 1e-3, optimizer="muon")
    said = parts(
        summarize(results((settings, 1.5), (Settings("layernorm", 4e-3, optimizer="muon"), 1.6)))
    )["variants"]
    assert said.splitlines()[0] == f"{MUON.title}:"
    assert "| DyISRU, muon |" not in said
    assert (
        "| DyISRU | 1e-3 (1 of 4 rates so far) | 1.500 (1 seed) | \N{MINUS SIGN}0.100 (1 seed) |"
        in said
    )
    assert sum(line.endswith(":") for line in said.splitlines()) == 1


def test_a_lucky_seed_at_another_rate_does_not_move_the_best() -> None:
    runs = sweep_of("dyisru", 1.6, 1.5, 1.7) | results((Settings("dyisru", 1e-3, seed=1), 1.0))
    assert group_of(summarize(runs), "dyisru")["best_lr"] == 2e-3


@pytest.mark.parametrize(
    ("losses", "good", "width", "ends"),
    [
        ((2.0, 1.54, 1.5, 1.55, 1.9), (2e-3, 8e-3), 4, []),
        ((2.0, 1.9, 1.5, 1.9, 2.0), (4e-3, 4e-3), 1, []),
        ((1.5, 1.52, 1.9, 1.51, 2.0), (1e-3, 2e-3), 2, ["low"]),
        ((1.51, 1.5, None, 1.5, 1.5), (1e-3, 2e-3), 2, ["low"]),
        ((None, None, 1.6, 1.52, 1.5), (8e-3, 1.6e-2), 2, ["high"]),
        ((1.5, 1.5, 1.5, 1.5, 1.5), (1e-3, 1.6e-2), 16, ["low", "high"]),
    ],
)
def test_the_good_range_has_no_gap(
    losses: tuple[float | None, ...], good: tuple[float, float], width: float, ends: list[str]
) -> None:
    found = group_of(summarize(sweep_of("dyisru", *losses)), "dyisru")
    assert found["good"] == list(good)
    assert found["width"] == pytest.approx(width)
    assert found["open"] == ends


@pytest.mark.parametrize(("third", "good"), [(1.53, [1e-3, 2e-3]), (None, [1e-3, 1e-3])])
def test_a_good_rate_is_one_in_the_mean_of_its_seeds(
    third: float | None, good: list[float]
) -> None:
    more = ((1e-3, 1, 1.50), (1e-3, 2, 1.49), (2e-3, 1, 1.53), (2e-3, 2, third), (4e-3, 3, 1.6))
    runs = sweep_of("dyisru", 1.50, 1.56, 1.56)
    runs |= results(*[(Settings("dyisru", lr, seed=seed), loss) for lr, seed, loss in more])
    found = group_of(summarize(runs), "dyisru")
    # 1.50, 1.50 and 1.49 at the best.
    assert (found["best_lr"], found["good"], found["open"]) == (1e-3, good, ["low"])


def test_an_arm_that_always_diverges_has_no_best() -> None:
    study = summarize(sweep_of("linear", None, None))
    found = group_of(study, "linear")
    assert (found["best_lr"], found["mean"], found["good"], found["diverged"]) == (
        None,
        None,
        None,
        2,
    )
    (row,) = [
        line for line in table(SMALL, study).splitlines() if line.startswith("| linear (control)")
    ]
    assert "diverged" in row
    assert "2 of 2" in row


def test_each_run_is_compared_with_its_own_models_norm() -> None:
    variant = Settings("dyisru", 1e-3, constants_rate=10.0, center=True, warmup_constants=True)
    assert baseline_of(variant).group == Settings("layernorm", 1e-3).group
    assert (
        baseline_of(Settings("dyisru_annealed", 1e-3, path_start=0.5)).group
        == Settings("layernorm", 1e-3).group
    )
    assert (
        baseline_of(Settings("dyt", 1e-3, model="llama")).group
        == Settings("rmsnorm", 1e-3, model="llama").group
    )
    long = Settings("dyt", 1e-3, steps=3000, size="medium")
    assert baseline_of(long).group == Settings("layernorm", 1e-3, steps=3000, size="medium").group


def test_the_tables_say_what_is_missing() -> None:
    study = summarize(sweep_of("layernorm", 2.1, 2.0, 1.9))
    rows = table(SMALL, study).splitlines()
    assert "| LayerNorm | 4e-3 (2 of 3 rates so far) | 1.900 (1 seed) |" in rows[2]
    # An arm that was not run is not listed.
    assert len(rows) == 3
    assert len({row.count("|") for row in rows}) == 1
    assert table(LLAMA, study) == "Not run yet."
    assert "600 steps: " in parts(study)["left"]
    assert "All runs" in parts(summarize({}, ()))["left"]


@pytest.mark.parametrize(
    ("value", "written"), [(1e-3, "1e-3"), (1.6e-2, "1.6e-2"), (1.25e-4, "1.25e-4"), (5e-4, "5e-4")]
)
def test_rates_are_short(value: float, written: str) -> None:
    assert rate(value) == written


def test_the_page_keeps_its_prose_and_its_marks() -> None:
    imagined = summarize(EVERYTHING)
    committed = json.loads(dumps(summarize(read_all())))
    marks = 0
    for file, made in ((PAGE, first_parts), (DETAILS, other_parts)):
        page = file.read_text("utf-8")
        renewed = with_parts(page, made(imagined))
        assert renewed != page
        assert renewed.count("<!-- study ") == page.count("<!-- study ") == len(made(imagined))
        assert with_parts(with_parts(renewed, made(committed)), made(imagined)) == renewed
        marks += len(made(imagined))
    assert marks == len(parts(imagined))
    assert "## What was run" in DETAILS.read_text("utf-8")


def test_the_first_page_has_one_table_of_at_most_ten_rows_and_one_picture() -> None:
    page = PAGE.read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 10
    assert page.count("![") == 1


def test_a_mark_that_is_missing_is_named() -> None:
    with pytest.raises(DataError, match="study opening"):
        with_parts("no marks", other_parts(summarize({})))


def test_the_committed_page_is_that_of_the_committed_summary_and_that_of_the_runs() -> None:
    assert dumps(summarize(read_all(), log=read_log), indent=1) + "\n" == STUDY.read_text("utf-8")
    study = json.loads(STUDY.read_text("utf-8"))
    for file, made in ((PAGE, first_parts), (DETAILS, other_parts)):
        page = file.read_text("utf-8")
        assert with_parts(page, made(study)) == page


def test_pictures_are_drawn_of_what_there_is() -> None:
    assert draw(summarize({}), imagined_log) == {}
    drawn = draw(summarize(EVERYTHING), imagined_log)
    assert sorted(drawn) == ["study-constants", "study-curves", "study-rates"]
    assert all(
        picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in drawn.values()
    )
    assert drawn == draw(summarize(EVERYTHING), imagined_log)
    norm = draw(summarize(sweep_of("layernorm", 2.1, 2.0, 1.9)), lambda name: [])
    assert sorted(norm) == ["study-curves", "study-rates"]


def test_the_command_writes_everything(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name, result in EVERYTHING.items():
        (tmp_path / "runs" / f"{name}.json").write_text(dumps(result))
        (tmp_path / "runs" / f"{name}.jsonl").write_text(
            "".join(dumps(line) + "\n" for line in imagined_log(name))
        )
    page, details = tmp_path / "study.md", tmp_path / "study-runs.md"
    page.write_text(PAGE.read_text("utf-8"))
    details.write_text(DETAILS.read_text("utf-8"))
    report.command(tmp_path / "runs", tmp_path / "study.json", page, details, tmp_path)
    study = json.loads((tmp_path / "study.json").read_text())
    assert len(study["groups"]) == sum(1 for part in PLAN[:2] for _ in part.sweeps())
    assert with_parts(page.read_text(), first_parts(study)) == page.read_text()
    assert with_parts(details.read_text(), other_parts(study)) == details.read_text()
    assert (tmp_path / "study-rates.png").exists()
