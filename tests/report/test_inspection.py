"""Section 4 on a model: outliers found, functions fitted on some and measured on others, the model unchanged."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import dynorm
from dynorm import functional, theory
from dynorm.report.inspection import Outliers
from dynorm.report.stats import FUNCTIONS
from dynorm.site import NormSite
from tests.pages import Page

pytest.importorskip("matplotlib")

LN = NormSite("norm", kind="layernorm", normalized_shape=(24,))
RMS = NormSite("norm", kind="rmsnorm", normalized_shape=(24,))


def tokens(count: int = 200, channels: int = 24, seed: int = 0) -> Tensor:
    """Tokens of many sizes, half of which have a large channel on one side or the other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, channels, generator=generator, dtype=torch.float64)
    x *= torch.rand(count, 1, generator=generator, dtype=torch.float64) + 0.5
    x[::2, 5] += 12
    x[::4, 5] *= -2
    return x


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 24), nn.RMSNorm(24, eps=1e-6)
    )


def toy_batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(50, 8, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("site", [LN, RMS], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_fit_is_that_of_least_squares_on_the_outliers(site: NormSite, name: str) -> None:
    fitted, measured = tokens(seed=1), tokens(seed=2)
    outliers = Outliers(site, seed=0)
    outliers.add(fitted[:70], fitted=70)
    outliers.add(fitted[70:], fitted=len(fitted) - 70)
    outliers.add(measured)
    scale, center = 4.5, 0.25

    def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.layer_norm(x, eps=0.0) if site is LN else functional.rms_norm(x, eps=0.0)
        place = y.abs().argmax(-1, keepdim=True)
        return x.gather(-1, place)[:, 0], y.gather(-1, place)[:, 0]

    x, y = pairs(fitted)

    def loss(log_beta: float) -> float:
        beta = torch.tensor(math.exp(log_beta), dtype=torch.float64)
        return float((FUNCTIONS[name](x, beta, center, scale) - y).square().sum())

    best = minimize_scalar(loss, bracket=(2.0, 5.0), tol=1e-12)
    found = outliers.fit(scale, center)
    # The search is a grid: its last step is 2e-5 wide in log10 beta.
    assert math.log(found.fit.betas[name]) == pytest.approx(best.x, abs=1e-4)
    x, y = pairs(measured)
    residual = (
        FUNCTIONS[name](x, torch.tensor(found.fit.betas[name], dtype=torch.float64), center, scale)
        - y
    )
    assert found.residuals[name] == pytest.approx(float(residual.abs().mean()), rel=1e-9)
    assert found.fit.errors[name] == pytest.approx(float(residual.norm() / y.norm()), rel=1e-9)


@pytest.mark.parametrize("site", [LN, RMS], ids=["layernorm", "rmsnorm"])
def test_each_outlier_has_a_constant_that_makes_dyisru_the_norm(site: NormSite) -> None:
    x = tokens()
    outliers = Outliers(site, seed=0)
    for part in x.split(64):
        outliers.add(part)
    found = outliers.fit(math.sqrt(23), 0.0)
    place = (x - x.mean(-1, keepdim=True) if site is LN else x).abs().argmax(-1, keepdim=True)
    betas = theory.leave_one_out_beta(x) if site is LN else theory.leave_one_out_square_sum(x)
    logs = betas.gather(-1, place).log()
    assert found.beta == pytest.approx(float(logs.mean().exp()), rel=1e-9)
    assert found.beta_spread == pytest.approx(float(logs.std(correction=0)), rel=1e-9)
    assert 0 < found.exact < 1e-12


def test_the_papers_simulation_through_a_model() -> None:
    simulation = pytest.importorskip("dynorm.paper.simulation").simulate()
    rows = torch.from_numpy(simulation.tokens[1:])
    model = nn.Sequential(
        nn.Identity(), nn.LayerNorm(100, eps=0.0, elementwise_affine=False)
    ).double()
    site = NormSite("1", kind="layernorm", normalized_shape=(100,))
    report = dynorm.inspect_norms(model, [rows], sites=[site], fit_on=[rows])
    # Here the centre is the mean of all values, where the paper has none.
    (row,) = report.sites
    assert row.holds
    assert row.beta == pytest.approx(theory.leave_one_out_beta(rows)[0, -1].item(), rel=0.05)
    assert row.alpha == pytest.approx(0.0486, rel=0.05)
    assert row.outliers.residuals["dyisru"] < 0.02 < 0.3 < row.outliers.residuals["dyt"] < 0.35
    assert row.outliers.residuals["linear"] > 1


def test_where_all_tokens_are_alike_a_straight_line_is_the_norm() -> None:
    x = functional.layer_norm(tokens(), eps=0.0) * 3 + 1
    report = dynorm.inspect_norms(
        nn.Sequential(nn.LayerNorm(24, eps=0.0)).double(),
        [x],
        sites=[NormSite("0", kind="layernorm", normalized_shape=(24,))],
    )
    (row,) = report.sites
    assert row.outliers.residuals["linear"] < 1e-3 < row.outliers.residuals["dyisru"]
    assert row.sigma_spread <= 1e-6
    assert report.summary()["outliers_best"] == {"linear": 1, "dyt": 0, "dyisru": 0}


def test_norms_are_found_and_the_model_stays_as_it_was() -> None:
    model = toy().train()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    report = dynorm.inspect_norms(model, iter(toy_batches()))
    assert [(row.path, row.kind, row.channels, row.tokens) for row in report.sites] == [
        ("1", "layernorm", 24, 150),
        ("4", "rmsnorm", 24, 150),
    ]
    assert report.batches == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_what_is_measured_is_not_what_was_fitted_on() -> None:
    model, batches = toy(), toy_batches(4)
    apart = dynorm.inspect_norms(model, batches[:2], fit_on=batches[2:])
    again = dynorm.inspect_norms(model, batches[:2], fit_on=batches[2:])
    halves = dynorm.inspect_norms(model, batches[:2])
    assert apart.to_dict() == again.to_dict()
    assert [row.tokens for row in apart.sites] == [row.tokens for row in halves.sites] == [100, 100]
    assert apart.sites[0].beta != halves.sites[0].beta


def test_padding_is_left_out() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(24)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Any:
            return self.norm(x) * attention_mask[..., None]

    x = tokens(60).float().reshape(5, 12, 24)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3], [5], [9]])).long()
    poisoned = torch.where(mask[..., None].bool(), x, 1e3 * torch.randn(24))
    a, b = (
        dynorm.inspect_norms(Masked(), [{"x": value, "attention_mask": mask}]).sites[0].to_dict()
        for value in (x, poisoned)
    )
    assert a["tokens"] == int(mask.sum())
    assert a == b


def test_a_channels_first_norm_and_a_keyword_call() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=x.movedim(1, -1)).movedim(-1, 1)

    report = dynorm.inspect_norms(First(), [torch.randn(2, 6, 4, 4)])
    assert [(row.channels, row.tokens) for row in report.sites] == [(6, 32)]


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_small_inputs_give_finite_figures(channels: int, count: int, seed: int) -> None:
    x = torch.randn(count, channels, generator=torch.Generator().manual_seed(seed))
    report = dynorm.inspect_norms(
        nn.Sequential(nn.LayerNorm(channels)),
        [x],
        sites=[NormSite("0", kind="layernorm", normalized_shape=(channels,), eps=1e-5)],
    )
    row = report.sites[0].outliers
    assert all(
        map(
            math.isfinite,
            [*row.residuals.values(), *row.fit.betas.values(), row.beta, row.beta_spread],
        )
    )
    assert str(report)


class TestErrors:
    def test_no_norm(self) -> None:
        with pytest.raises(dynorm.errors.ModelError, match=r"LayerNorm.*RMSNorm"):
            dynorm.inspect_norms(nn.Linear(8, 8), [torch.randn(2, 8)])

    def test_a_converted_model(self) -> None:
        model, batches = toy(), toy_batches()
        dynorm.convert_(model, dynorm.find_norms(model, batches[0]))
        with pytest.raises(dynorm.errors.ModelError, match="inspect the original"):
            dynorm.inspect_norms(model, batches)

    def test_sites_of_another_model(self) -> None:
        with pytest.raises(dynorm.errors.ModelError, match="no 'norm'"):
            dynorm.inspect_norms(toy(), toy_batches(), sites=[LN])

    def test_no_batch_and_bad_ones(self) -> None:
        for batches in ([], ["text"], torch.randn(2, 8), [torch.randn(2, 9)]):
            with pytest.raises(dynorm.DynormError):
                dynorm.inspect_norms(toy(), batches)

    def test_what_is_not_finite(self) -> None:
        model, batches = toy(), toy_batches()
        sites = dynorm.find_norms(model, batches[0])
        batches[1][3, 2] = math.nan
        with pytest.raises(dynorm.errors.DataError, match=r"finite.*'1'"):
            dynorm.inspect_norms(model, batches, sites=sites)
        assert not any(module._forward_hooks for module in model.modules())

    def test_no_norm_reached(self) -> None:
        class Never(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 24)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x)

        with pytest.raises(dynorm.errors.DataError, match=r"reach.*least"):
            dynorm.inspect_norms(Never(), [torch.randn(4, 24)], sites=[LN])


class TestReport:
    @pytest.fixture(scope="class")
    @staticmethod
    def report() -> dynorm.report.InspectionReport:
        return dynorm.inspect_norms(toy(), toy_batches(), meta={"model": "<b>toy</b>"})

    def test_the_summary_counts_what_the_rows_say(
        self, report: dynorm.report.InspectionReport
    ) -> None:
        found = report.summary()
        assert (
            found["sites"]
            == sum(found["outliers_best"].values())
            == sum(found["core_best"].values())
            == 2
        )
        assert found["holds"] == sum(
            row.outliers.residuals["dyisru"] < row.outliers.residuals["dyt"] for row in report.sites
        )
        assert found["ratio_min"] <= found["ratio_median"] <= found["ratio_max"]

    def test_json(self, report: dynorm.report.InspectionReport) -> None:
        values = json.loads(json.dumps(report.to_dict()))
        assert (
            values["sites"][0]["outliers"]["residuals"]["dyt"]
            == report.sites[0].outliers.residuals["dyt"]
        )
        assert values["sites"][0]["beta"] == report.sites[0].beta
        assert "points" not in values["sites"][0]["outliers"]

    def test_the_table_fits_a_terminal(self, report: dynorm.report.InspectionReport) -> None:
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.startswith(("1 ", "4 ")) for line in lines) == 2

    def test_the_table_compares_the_curves_on_outliers_and_on_all_channels(
        self, report: dynorm.report.InspectionReport
    ) -> None:
        table = str(report)
        assert re.search(r"\boutliers +all channels\n", table)
        assert re.search(r"outlier( +)linear +DyT +DyISRU +ratio +linear +DyT +DyISRU\n", table)

    def test_the_page(self, report: dynorm.report.InspectionReport, tmp_path: Path) -> None:
        report.to_html(tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text("utf-8")
        page = Page(text)
        assert page.tags["figure"] == page.tags["svg"] == 2
        assert page.tags["tr"] == 4
        assert "http" not in text
        assert "var(--outlier)" in text
        assert "#0101" not in text
        assert any("<b>toy</b>" in piece for piece in page.texts)
