"""The outputs of two models: embeddings, next tokens and tensors, against plain computations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from benchmarks import fold_models
from dynorm.outputs import output_tensor, sample_vectors
from dynorm.report.conversion import compare
from dynorm.report.output import average_ranks, pairs_alike, spearman
from tests.report.cases import bert, text_batches, toy, toy_batches


def moved(model: nn.Module) -> nn.Module:
    """A copy with slightly other weights."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in changed.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.03 * noise
    return changed.eval()


def test_an_encoder_is_compared_by_its_embeddings() -> None:
    original = bert().eval()
    model = moved(original)
    batches = text_batches(3)
    before, after = [], []
    with torch.no_grad():
        for batch in batches:
            for each, vectors in ((original, before), (model, after)):
                hidden = each(**batch).last_hidden_state
                vectors.append(sample_vectors(hidden, batch, pooled=True))
    a, b = torch.cat(before), torch.cat(after)
    cosines = (a * b).sum(1)
    out = compare(model, original, batches)
    assert (out.kind, out.samples, out.worst) == ("encoder", 15, int(cosines.argmin()))
    assert out.cosine_mean == pytest.approx(float(cosines.mean()))
    assert out.cosine_min == pytest.approx(float(cosines.min()))
    rows, columns = np.triu_indices(15, 1)
    expected = stats.spearmanr((a @ a.T)[rows, columns], (b @ b.T)[rows, columns]).statistic
    assert out.spearman == pytest.approx(expected)


def test_a_loss_in_front_of_the_logits_is_not_compared() -> None:
    logits = torch.randn(4, 3)
    assert output_tensor((torch.tensor(1.0), logits))[1] is logits
    assert output_tensor((torch.tensor(1.0), "text"))[1].shape == (1, 1)


@pytest.mark.parametrize("left", [False, True])
def test_a_language_model_is_compared_by_its_next_tokens(left: bool) -> None:
    original = fold_models.build("gpt2").double()
    model = moved(original)
    batches = text_batches(3)
    if left:
        batches = [{name: value.flip(1) for name, value in batch.items()} for batch in batches]
    losses: list[list[Tensor]] = [[], []]
    divergences, same = [], []
    with torch.no_grad():
        for batch in batches:
            is_token = batch["attention_mask"].bool()
            known = is_token[:, :-1] & is_token[:, 1:]
            p, q = (each(**batch).logits[:, :-1][known] for each in (original, model))
            target = batch["input_ids"][:, 1:][known]
            for logits, kept in zip((p, q), losses, strict=True):
                kept.append(cross_entropy(logits, target, reduction="none"))
            log_p = p.log_softmax(-1)
            divergences.append((log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
    out = compare(model, original, batches)
    before, after = (float(torch.cat(each).mean()) for each in losses)
    divergence = torch.cat(divergences)
    assert (out.kind, out.tokens, out.spearman) == ("language", len(divergence), None)
    assert out.loss_original == pytest.approx(before, rel=1e-5)
    assert out.loss_difference == pytest.approx(after - before, abs=1e-5)
    assert out.kl == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert out.kl_worst == pytest.approx(float(divergence.max()), rel=1e-4)
    assert out.agreement == pytest.approx(float(torch.cat(same).double().mean()))


def test_a_model_that_does_not_generate_is_no_language_model() -> None:
    original = bert("BertForMaskedLM").eval()
    out = compare(moved(original), original, text_batches(2))
    assert (out.kind, out.samples, out.loss_now) == ("tensor", 10, None)


def test_other_outputs_are_compared_as_vectors() -> None:
    original, batches = toy(), toy_batches()
    model = moved(original)
    x = torch.cat(batches)
    with torch.no_grad():
        before, after = original(x).double(), model(x).double()
    out = compare(model, original, batches)
    cosines = nn.functional.cosine_similarity(before, after, dim=1)
    error = (after - before).norm() / (before - before.mean(0)).norm()
    assert (out.kind, out.samples, out.spearman) == ("tensor", 120, None)
    assert out.cosine_mean == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert out.error == pytest.approx(float(error), rel=1e-5)
    assert compare(model, original, [x[:1]]).error is None


def test_outputs_that_are_zero_in_both_models_are_the_same() -> None:
    original = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with torch.no_grad():
        original[0].bias.fill_(-100.0)
    out = compare(moved(original), original, [torch.randn(16, 4)])
    assert out.cosine_min == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_spearman_with_ties_is_scipys(seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(0, 9, (2, 60))
    found = spearman(torch.tensor(a).float(), torch.tensor(b).float())
    assert found == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert average_ranks(torch.tensor(a)).tolist() == stats.rankdata(a).tolist()


def test_pairs_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spearman(torch.ones(5), torch.arange(5.0)) is None
    assert pairs_alike(torch.eye(2), torch.eye(2)) == (None, None)
    # More samples than are compared.
    monkeypatch.setattr("dynorm.report.output._MOST_PAIRED", 400)
    a = normalize(torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    assert pairs_alike(a, a) == (pytest.approx(1.0), 1)
    correlation, neighbours = pairs_alike(a, a.flip(0))
    assert correlation == pytest.approx(0.0, abs=0.1)
    assert neighbours is not None
    assert neighbours < 0.05
    # The second has the first next to it, then the third: no sample is its own neighbour.
    angles = torch.tensor([[0.0, 1.0, 3.0, 3.5], [0.0, 2.0, 3.0, 3.5]])
    before, now = torch.stack([angles.cos(), angles.sin()], dim=-1)
    assert pairs_alike(before, now)[1] == 0.75
