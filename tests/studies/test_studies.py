"""The study: its settings, a short run of each kind, the plan, and the summary of the results."""

import json
from dataclasses import replace

import pytest

from dynorm.errors import ArgumentError
from dynorm.layers import DyISRU, DyT
from studies import plan, report, sweep
from studies.data import load
from studies.settings import SIZES, Settings
from studies.train import build, has_diverged, run


@pytest.mark.parametrize(
    "wrong",
    [
        {"arm": "batchnorm"},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"steps": 1},
        {"size": "xl"},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Settings(**{"arm": "dyisru", "lr": 1e-3} | wrong)


def test_arms_get_their_layers_and_constants():
    data = load(SIZES["tiny"].context)
    published = build(Settings("dyt_published", 1e-3, size="tiny"), data)
    layers = [m for m in published.modules() if isinstance(m, DyT)]
    assert [(layer.scale, float(layer.alpha.detach())) for layer in layers] == [(1.0, 0.5)] * 5
    assert float(published.transformer.drop.factor.detach()) == 4.0
    ours = build(Settings("dyisru_witnesses", 1e-3, size="tiny"), data)
    layers = [m for m in ours.modules() if isinstance(m, DyISRU)]
    assert [layer.scale for layer in layers] == [4.0] * 5
    assert [layer.witness_channels for layer in layers] == [(0, 1, 2, 3)] * 5
    assert len({float(layer.log_beta.detach()) for layer in layers}) == 5


@pytest.mark.parametrize(
    ("arm", "model"),
    [("dyisru", "gpt2"), ("dyisru", "llama"), ("layernorm", "gpt2")],
)
def test_a_short_run_learns(arm, model):
    settings = Settings(arm, 1e-2, steps=30, model=model, size="tiny")
    record = run(settings)
    assert record["settings"] == settings.to_dict()
    # To guess bytes at random costs 5.55 nats.
    assert 1 < record["loss"] < 4.5
    assert len(record["parts"]) == 32
    assert record["curve"][-1][0] == 30
    assert record["curve"][-1][1] < record["curve"][0][1]


def test_a_lost_loss_is_noticed():
    assert has_diverged([{"loss": 3.0}, {"eval_held_out": float("nan")}])
    assert has_diverged([{"loss": 11.0}])
    assert not has_diverged([{"loss": 3.0}, {"eval_held_out": 2.9}])


def test_the_plan_asks_for_the_missing_runs_and_then_for_seeds_at_the_best_rate():
    wanted = list(plan.missing({}))
    assert {settings.seed for settings in wanted} == {0}
    results = {}
    for settings in plan.SMALL.sweep("dyt"):
        loss = 1.0 + abs(settings.lr - 1e-3) * 1e3
        results[settings.name] = {"loss": loss, "parts": [loss] * 4}
    seeds = [s for s in plan.missing(results) if s.arm == "dyt" and s.seed]
    assert [(s.lr, s.seed) for s in seeds if s.steps == 600] == [(1e-3, 1), (1e-3, 2)]
    # A run that diverged is done, and is never the best.
    diverged = plan.SMALL.sweep("dyt")[1]
    results[diverged.name] = {"loss": None, "parts": []}
    assert plan.best(plan.SMALL.sweep("dyt"), results).lr in (5e-4, 2e-3)


def test_the_committed_summary_is_that_of_the_committed_results(tmp_path):
    results = sweep.read_results()
    summary = report.summarize(results)
    assert json.loads(report.SUMMARY.read_text("utf-8")) == summary
    copy = tmp_path / "runs.jsonl.gz"
    sweep.write_results(results, copy)
    assert copy.read_bytes() == sweep.RESULTS.read_bytes()


def test_differences_are_taken_seed_by_seed():
    sweeps = {arm: plan.LLAMA.sweep(arm) for arm in ("rmsnorm", "dyisru")}
    results = {}
    for arm, loss in (("rmsnorm", 1.0), ("dyisru", 1.25)):
        for settings in sweeps[arm]:
            for seed, more in ((0, 0.0), (1, 0.5)):
                name = replace(settings, seed=seed).name
                results[name] = {"loss": loss + more, "parts": [loss + more] * 4}
    part = replace(plan.LLAMA, seeds=(1,))
    losses = {
        arm: {"losses": report._losses_by_seed(part, plan.best(runs, results), results)}
        for arm, runs in sweeps.items()
    }
    row = report._compared("", part, "dyisru", "rmsnorm", {part.title: losses})
    assert row == {"comparison": "", "nats": 0.25, "half_range": 0.0, "seeds": 2}
    losses["dyt"] = {"rates": {"0.001": None}}
    row = report._compared("DyT", part, "dyt", "rmsnorm", {part.title: losses})
    assert report.table([row]).endswith("| DyT | diverged at every rate |")
