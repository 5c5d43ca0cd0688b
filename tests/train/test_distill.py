"""``distill_`` on any module: losses by the type of the output or given, batches of any form, and refusals."""

from __future__ import annotations

import copy
import itertools
import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    TrainerCallback,
    TrainerState,
    get_cosine_schedule_with_warmup,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import dynorm
from dynorm.replace.converted import dynorm_layers
from dynorm.train.callbacks import AnnealCallback
from dynorm.train.distill import distill_, distillation_rate, output_loss
from dynorm.train.trainer import Announcer, in_words, rate_factor
from tests.ecosystem.models import checkpoint_activations


def images() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 8, 8, generator=generator),) for _ in range(4)]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 5)
    )
    dynorm.convert_(net, dynorm.find_norms(net, *images()[0]))
    return net


def apart(net: nn.Module, teacher: nn.Module, batches: list[tuple[Tensor]] | None = None) -> float:
    with torch.no_grad():
        return sum(
            float((net(*batch) - teacher(*batch)).square().sum()) for batch in batches or images()
        )


def test_any_module_learns_from_its_original_by_default() -> None:
    net = classifier()
    teacher = dynorm.restore_(copy.deepcopy(net))
    before = apart(net, teacher)
    report = dynorm.distill_(net, images(), steps=40, lr=1e-2, quiet=True)
    assert (report.steps, report.samples) == (40, 320)
    assert apart(net, teacher) < 0.2 * before
    # The same as with the teacher named, and its weights are as they were.
    again = classifier()
    kept = copy.deepcopy(teacher.state_dict())
    dynorm.distill_(again, images(), teacher=teacher, steps=40, lr=1e-2, quiet=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert all(torch.equal(value, kept[name]) for name, value in teacher.state_dict().items())


def test_batches_are_gone_through_in_order_and_again() -> None:
    class Passes:
        count = 0

        def __iter__(self) -> Any:
            self.count += 1
            return iter(images())

    passes, seen = Passes(), []

    def loss(ours: Tensor, theirs: Tensor, batch: Any) -> Tensor:
        seen.append(next(k for k, image in enumerate(images()) if torch.equal(image[0], batch[0])))
        return (ours - theirs).abs().mean()

    distill_(classifier(), passes, loss=loss, steps=6, lr=1e-3, quiet=True)
    # Four are looked at before the training, and after it.
    assert seen == [0, 1, 2, 3, *[0, 1, 2, 3, 0, 1], 0, 1, 2, 3]
    assert passes.count == 3


def test_the_rate_is_one_whose_first_step_helps() -> None:
    """Weights a thousand times smaller, and inputs as much larger, bear smaller steps only."""
    net = classifier()
    with torch.no_grad():
        net[0].weight.div_(1e3)
    batches = [(1e3 * image,) for (image,) in images()]
    dynorm.calibrate_(net, batches)
    usual, teacher = distillation_rate(net), dynorm.restore_(copy.deepcopy(net))
    before = apart(net, teacher, batches)
    report = dynorm.distill_(net, batches, teacher=teacher, steps=40, quiet=True)
    assert report.lr < usual / 8
    assert math.log2(usual / report.lr).is_integer()
    assert report.kept
    assert report.loss_after < report.loss_before
    assert apart(net, teacher, batches) < 0.9 * before
    with pytest.warns(dynorm.errors.CalibrationWarning, match="put back"):
        dynorm.distill_(net, batches, teacher=teacher, steps=40, lr=usual, quiet=True)


@pytest.mark.parametrize("blown_up", [0, 2, 4])
def test_the_rate_is_that_of_the_best_first_step_of_the_first_batch_on_which_one_helps(
    blown_up: int,
) -> None:
    net, batches = classifier(), images()[:4]
    usual, batch_of = distillation_rate(net), {id(batch[0]): k for k, batch in enumerate(batches)}
    # A step is a quarter of the rate: an eighth of the usual rate falls short of it, a quarter goes
    # too far, and helps.
    goal = net[0].weight.detach() + 1.2 * usual / 32

    def loss(ours: Tensor, theirs: Tensor, batch: Any) -> Tensor:
        away = 1e12 * (net[0].weight - goal).square().mean()
        # Its value grows along its gradient's signs.
        return 2 * away.detach() - away if batch_of[id(batch[0])] < blown_up else away

    # The whole step is four times too far.
    with pytest.warns(dynorm.errors.CalibrationWarning, match="put back"):
        report = dynorm.distill_(net, batches, loss=loss, steps=1, quiet=True)
    assert report.lr == usual / (256 if blown_up == 4 else 8)


def test_the_search_for_the_rate_moves_tied_weights_and_leaves_flags() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.out.weight = self.into.weight
            self.flags = nn.Parameter(torch.ones(8, dtype=torch.bool), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.into.weight.detach().clone())
            return self.out(self.norm(self.into(x))) * self.flags

    torch.manual_seed(0)
    seen, data, net = list[Tensor](), torch.randn(32, 8), Tied()
    dynorm.convert_(net, dynorm.find_norms(net, data))
    seen.clear()
    distill_(net, [data], steps=1, quiet=True)
    # Teacher and model: for the loss before, the start of the search, the gradients and the first
    # trial.
    assert not torch.equal(seen[7], seen[5])


@pytest.mark.parametrize(
    "wrong", [None, torch.zeros(8), torch.zeros(1)], ids=["nothing", "each", "axis"]
)
def test_a_loss_that_is_no_scalar_is_refused(wrong: Any) -> None:
    net = classifier()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(dynorm.errors.ArgumentError, match=r"loss.*scalar.*got"):
        distill_(net, images(), loss=lambda *_: wrong, steps=1, lr=1e-3, quiet=True)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(("options", "match"), [
    ({"seed": "a"}, "seed.*got 'a'"),
    ({"seed": None}, "got None"),
    ({"seed": -1}, "got -1"),
    ({"seed": 2**32}, r"seed.*2\*\*32"),
    ({"steps": True}, "steps.*got True"),
    ({"callbacks": 5}, "callbacks.*TrainerCallback, got 5"),
    ({"callbacks": "a"}, "got 'a'"),
    ({"callbacks": [5]}, r"got \[5\]"),
    ({"callbacks": AnnealCallback()}, "callbacks.*list"),
    ({"loss": "a"}, "loss.*got 'a'"),
    ({"loss": 5}, "got 5"),
    ({"checkpoints": 5}, "checkpoints.*got 5"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_changed(
    options: dict[str, Any], match: str
) -> None:
    net = classifier().train()
    with pytest.raises(dynorm.errors.ArgumentError, match=match):
        distill_(net, images(), **{"steps": 1, "quiet": True, **options})
    assert net.training
    assert all(p.requires_grad for p in net.parameters())


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(dynorm.errors.ModelError, match=r"weights.*frozen"):
        distill_(classifier().requires_grad_(False), images(), steps=1, quiet=True)


def test_a_teacher_must_be_the_model_before() -> None:
    net = classifier()
    wrapped = dynorm.restore_(copy.deepcopy(net))
    wrapped[0] = net[0]
    for teacher, match in (
        (net, r"teacher must be .* its '\d' is converted already"),
        (nn.Linear(2, 2), "has no"),
        (wrapped, "not share weights"),
    ):
        with pytest.raises(dynorm.errors.ModelError, match=match):
            distill_(net, images(), teacher=teacher, steps=1, quiet=True)
    wider = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.Linear(4, 24), nn.LayerNorm(24), nn.Linear(24, 5)
    )
    with pytest.raises(dynorm.errors.DataError, match=r"shape.*reached none"):
        distill_(net, images(), teacher=wider, steps=1, quiet=True)
    name: Any = "bert"
    with pytest.raises(dynorm.errors.ArgumentError, match=r"teacher.*Module.*str"):
        distill_(net, images(), teacher=name, steps=1, quiet=True)
    teacher = dynorm.restore_(copy.deepcopy(net))
    dynorm.calibrate_(net, images())
    folded = copy.deepcopy(net).eval()
    assert dynorm.fold_(folded, *images()[0]).count("affine")
    with pytest.raises(dynorm.errors.ModelError, match=r"norm's weight.*fold"):
        distill_(folded, images(), teacher=teacher, steps=1, quiet=True)
    # Nothing was frozen.
    assert all(p.requires_grad for p in net.parameters())


def test_a_loaded_model_goes_on_with_its_teacher(tmp_path: Path) -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    teacher = dynorm.restore_(copy.deepcopy(net))
    dynorm.save(net, tmp_path / "saved")
    loaded = dynorm.load(tmp_path / "saved", copy.deepcopy(teacher))
    with pytest.raises(dynorm.errors.ModelError, match=r"replaced.*norm"):
        distill_(loaded, images(), steps=1, quiet=True)
    for each in (net, loaded):
        distill_(each, images(), teacher=copy.deepcopy(teacher), steps=20, lr=1e-2, quiet=True)
    # As the model would that was never saved.
    assert all(
        torch.equal(a, b)
        for a, b in zip(net.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert any(
        not torch.equal(a, b) for a, b in zip(net.parameters(), teacher.parameters(), strict=False)
    )


def test_an_error_in_the_search_for_the_rate_leaves_the_weights() -> None:
    net, calls = classifier(), itertools.count()
    before = copy.deepcopy(net.state_dict())

    def loss(ours: Tensor, theirs: Tensor, batch: Any) -> Tensor:
        # Four measure the batches, one more is the start of the search and one has the gradients.
        if next(calls) == 6:
            assert not all(
                torch.equal(a, b)
                for a, b in zip(before.values(), net.state_dict().values(), strict=True)
            )
            raise ValueError("mine")
        return (ours - theirs).abs().mean()

    with pytest.raises(ValueError, match="mine"):
        distill_(net, images(), loss=loss, steps=6, quiet=True)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True)
    )


def test_a_loss_of_ones_own_is_what_is_lowered() -> None:
    net = classifier()
    distill_(
        net,
        images(),
        loss=lambda ours, theirs, batch: (ours - 3).square().mean(),
        steps=60,
        lr=1e-2,
        quiet=True,
    )
    with torch.no_grad():
        assert abs(float(net(*images()[0]).mean()) - 3) < 1


def test_a_language_model_comes_closer_in_divergence() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    net = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        net.transformer.wte.weight.mul_(20)
    batches = [{"input_ids": torch.randint(0, 32, (4, 16))} for _ in range(4)]
    dynorm.convert_(net, dynorm.find_norms(net, **batches[0]))
    dynorm.calibrate_(net, batches)
    before = dynorm.measure(net, batches).output
    original = dynorm.restore_(copy.deepcopy(net))
    dynorm.distill_(net, batches, steps=40, lr=3e-3, quiet=True)
    now = dynorm.measure(net, batches, original=original).output
    assert now.kind == "language"
    assert now.kl < 0.5 * before.kl


def test_predictions_are_counted_token_by_token() -> None:
    """Against a count by hand, padding left out."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    net = GPT2LMHeadModel(config).eval()
    batch = {
        "input_ids": torch.randint(0, 8, (3, 9)),
        "attention_mask": torch.ones(3, 9, dtype=torch.long),
    }
    batch["attention_mask"][1, 5:] = 0
    with torch.no_grad():
        first = net(**batch).logits.argmax(-1)
    original = copy.deepcopy(net)
    dynorm.convert_(net, dynorm.find_norms(net, **batch))
    dynorm.calibrate_(net, [batch])
    with torch.no_grad():
        second = net(**batch).logits.argmax(-1)
    known, right = batch["attention_mask"][:, 1:].bool(), batch["input_ids"][:, 1:]
    out = dynorm.measure(net, [batch], original=original).output
    assert out.tokens == int(known.sum()) == 20
    for found, hits in (
        (out.accuracy_original, first[:, :-1] == right),
        (out.accuracy_now, second[:, :-1] == right),
        (out.agreement, first[:, :-1] == second[:, :-1]),
    ):
        assert found == pytest.approx(float(hits[known].float().mean()))


def test_the_loss_takes_a_sites_error_and_a_tenth_of_its_logarithm() -> None:
    net = classifier()
    teacher, expected = dynorm.restore_(copy.deepcopy(net)), []
    for (image,) in images():
        with torch.no_grad():
            y, f = teacher[:4](image).flatten(0, 1), net[:4](image).flatten(0, 1)
            site = (f - y).square().sum() / (y - y.mean(0)).square().sum()
            expected.append(
                float(site + site.log() / 10 + output_loss(net(image), teacher(image), (image,)))
            )
    report = distill_(net, images(), steps=1, lr=1e-6, quiet=True)
    assert report.loss_before == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_norm_that_gives_zeros_leaves_the_gradients_finite() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.zero, self.norm = nn.LayerNorm(8), nn.LayerNorm(8)
            nn.init.zeros_(self.zero.weight)
            self.zero.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.norm(self.last(hidden + self.zero(hidden)))

    torch.manual_seed(0)
    net, batches = Net(), [torch.randn(64, 8) for _ in range(4)]
    dynorm.convert_(net, dynorm.find_norms(net, batches[0]))
    dynorm.calibrate_(net, batches)
    report = distill_(net, batches, steps=30, lr=1e-3, quiet=True)
    assert report.kept
    assert report.loss_after < report.loss_before


def test_the_loss_of_each_type_of_output() -> None:
    torch.manual_seed(0)
    ours, theirs, mask = (
        torch.randn(2, 5, 4),
        torch.randn(2, 5, 4),
        torch.ones(2, 5, dtype=torch.long),
    )
    mask[1, 2:] = 0
    batch = {"input_ids": mask, "attention_mask": mask}
    p, q = (each[mask.bool()].softmax(-1) for each in (theirs, ours))
    divergence = (p * (p / q).log()).sum(-1).mean()
    assert torch.isclose(output_loss({"logits": ours}, {"logits": theirs}, batch), divergence)
    a, b = ((each * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for each in (ours, theirs))
    cosines = 1 - cosine_similarity(a, b).mean()
    assert torch.isclose(
        output_loss({"last_hidden_state": ours}, {"last_hidden_state": theirs}, batch),
        cosines,
        atol=1e-6,
    )
    y, f = theirs[:, 0], ours[:, 0]
    expected = (f - y).square().sum() / (y - y.mean(0)).square().sum()
    assert torch.isclose(output_loss((f, None), (y, None), (f,)), expected)
    # A regression has one logit, of which every distribution is the same.
    one = {"logits": torch.ones(3, 1)}
    assert output_loss(one, {"logits": torch.tensor([[1.0], [2.0], [3.0]])}, (f,)) > 0
    with pytest.raises(dynorm.errors.DataError, match="floating point tensor"):
        output_loss({"text": "x"}, {"text": "x"}, batch)


def test_many_logits_are_compared_in_parts_of_which_none_is_kept() -> None:
    torch.manual_seed(0)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    ours, theirs = (torch.randn(2, 40, 1 << 14) for _ in range(2))
    # Values at padding have no effect on the gradient.
    ours[1, 35], theirs[1, 36] = math.nan, math.inf
    ours.requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = output_loss(
            {"logits": ours}, {"logits": theirs}, {"input_ids": mask, "attention_mask": mask}
        )
    for logits in (ours, theirs):
        kept.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < 1000
    loss.backward()
    p, q = (each.detach()[mask.bool()].softmax(-1) for each in (theirs, ours))
    torch.testing.assert_close(loss.detach(), (p * (p / q).log()).sum(-1).mean())
    expected = torch.zeros_like(ours)
    expected[mask.bool()] = (q - p) / len(p)
    torch.testing.assert_close(ours.grad, expected)


def test_what_cannot_be_gone_through_again() -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match="begin again"):
        distill_(classifier(), iter(images()), minutes=1.0, quiet=True)
    with pytest.raises(dynorm.errors.DataError, match="got 4 for 5 steps"):
        distill_(classifier(), iter(images()), steps=5, quiet=True)
    with pytest.raises(dynorm.errors.DataError, match="one batch"):
        distill_(classifier(), [], minutes=0.01, quiet=True)


def test_in_bfloat16_the_weights_and_sites_stay_in_float32() -> None:
    seen = []

    def loss(ours: Tensor, theirs: Tensor, batch: Any) -> Tensor:
        seen.append({ours.dtype, theirs.dtype})
        return output_loss(ours, theirs, batch)

    net = classifier()
    teacher = dynorm.restore_(copy.deepcopy(net))
    before = apart(net, teacher)
    distill_(net, images(), loss=loss, steps=40, lr=1e-2, bf16=True, quiet=True)
    assert seen == [{torch.bfloat16}] * 48
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert apart(net, teacher) < 0.3 * before


def test_an_environment_of_other_processes_than_the_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(
        dynorm.errors.ModelError,
        match=r"1 processes.*names 2.*torchrun",
    ):
        distill_(classifier(), images(), steps=2, quiet=True)


def test_weights_are_as_they_were_where_the_training_fails() -> None:
    net = classifier()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(dynorm.errors.DataError, match="got 5 for 6 steps"):
        distill_(net, iter([*images(), *images()[:1]]), steps=6, lr=1e-2, quiet=True)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("other", ["wider", "deeper"])
def test_a_checkpoint_of_another_model_is_refused(other: str, tmp_path: Path) -> None:
    distill_(classifier(), images(), steps=3, lr=1e-4, quiet=True, checkpoints=tmp_path)
    layers = {
        "wider": [nn.Linear(4, 24), nn.LayerNorm(24), nn.Linear(24, 5)],
        "deeper": [nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 5), nn.Linear(5, 5)],
    }
    net = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), *layers[other])
    dynorm.convert_(net, dynorm.find_norms(net, *images()[0]))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        dynorm.errors.StorageError,
        match=r"model.*recipe.*checkpoint-3",
    ):
        distill_(net, images(), steps=3, lr=1e-4, quiet=True, checkpoints=tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
@pytest.mark.parametrize("differs", ["rate", "layers", "teacher"])
def test_a_checkpoint_of_another_recipe_is_refused(differs: str, tmp_path: Path) -> None:
    net, options = classifier(), {"steps": 3, "lr": 1e-4, "checkpoints": tmp_path, "quiet": True}
    before = copy.deepcopy(net.state_dict())
    distill_(copy.deepcopy(net), images(), **options)
    if differs == "rate":
        options["lr"] = 1e-3
    if differs == "layers":
        # All of its tensors are in the checkpoint, but the constants mean something else.
        (layer,) = dynorm_layers(net).values()
        layer.scale *= 2
    if differs == "teacher":
        options["teacher"] = doubled(net)
    with pytest.raises(
        dynorm.errors.StorageError,
        match=f"checkpoint-3.*differs in {differs}",
    ):
        distill_(net, images(), **options)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def doubled(net: nn.Module) -> nn.Module:
    teacher = dynorm.restore_(copy.deepcopy(net))
    with torch.no_grad():
        teacher[0].weight.mul_(2)
    return teacher


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_a_finished_run_is_not_trained_on_and_a_cut_checkpoint_is_passed_over(
    tmp_path: Path,
) -> None:
    net, options = classifier(), {"steps": 3, "lr": 1e-4, "checkpoints": tmp_path, "quiet": True}
    done, again = copy.deepcopy(net), copy.deepcopy(net)
    distill_(done, images(), **options)
    report = distill_(again, images(), **options)
    assert (report.steps, report.samples) == (3, 0)
    assert all(
        torch.equal(value, done.state_dict()[name]) for name, value in again.state_dict().items()
    )
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{")
    assert distill_(copy.deepcopy(net), images(), **options).samples == 0
    # The number counts, not the time: the folder that is being deleted is touched last.
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-2")
    next((tmp_path / "checkpoint-2").glob("*.distcp")).unlink()
    assert distill_(copy.deepcopy(net), images(), **options).samples == 0
    shutil.rmtree(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    assert distill_(copy.deepcopy(net), images(), **options).samples == 24


def opt() -> tuple[nn.Module, str]:
    """Its layers themselves drop values while they train."""
    config = OPTConfig(
        vocab_size=32, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, dropout=0.5,
        word_embed_proj_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    return OPTForCausalLM(config).eval(), "model.decoder.layers.0.fc1"


def gpt2() -> tuple[nn.Module, str]:
    """Its layers get the cache by position, where no one takes it away."""
    config = GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval(), "transformer.h.0.mlp.c_fc"


@pytest.mark.parametrize("act", [dynorm.refine_, distill_])
@pytest.mark.parametrize("make", [opt, gpt2])
def test_checkpointed_layers_are_recomputed_and_nothing_else_differs(act: Any, make: Any) -> None:
    torch.manual_seed(0)
    net, counted = make()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    batches = [
        {"input_ids": torch.randint(0, 32, (2, 8)), "attention_mask": mask} for _ in range(3)
    ]
    dynorm.convert_(net, dynorm.find_norms(net, **batches[0]))
    dynorm.calibrate_(net, batches)
    twin, runs = copy.deepcopy(net), []
    checkpoint_activations(twin)
    for model in (net, twin):
        count = [0]
        model.get_submodule(counted).register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        options = {"quiet": True} if act is distill_ else {}
        act(model, batches, steps=3, lr=1e-3, **options)
        runs.append(count[0])
    assert runs[1] == runs[0] + 3
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert not any(module.training for module in twin.modules())


def test_the_callers_autocast_is_that_of_bf16() -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    twin = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        dynorm.distill_(net, images(), steps=20, lr=1e-2, quiet=True)
    # Weights that move are cast anew in each step of both.
    dynorm.distill_(twin, images(), steps=20, lr=1e-2, quiet=True, bf16=True)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


def test_what_training_made_worse_is_put_back() -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    weights = copy.deepcopy(net.state_dict())
    with pytest.warns(dynorm.errors.CalibrationWarning, match="weights.*put back"):
        report = dynorm.distill_(net, images(), steps=12, lr=30.0, quiet=True)
    assert not report.kept
    assert report.loss_before is not None
    assert not report.loss_after <= report.loss_before
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    better = dynorm.distill_(net, images(), steps=40, lr=1e-2, quiet=True)
    assert better.kept
    assert better.loss_after < better.loss_before == pytest.approx(report.loss_before)


def test_few_minutes_warn_time_little_and_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    # A clock that goes on by a second each time that it is asked.
    monkeypatch.setattr(
        "dynorm.train.distill.time", SimpleNamespace(perf_counter=itertools.count().__next__)
    )
    rates: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    with pytest.warns(dynorm.errors.CalibrationWarning, match=r"0\.25 minutes allow \d+ steps"):
        report = dynorm.distill_(
            net, images(), minutes=0.25, lr=1e-3, quiet=True, callbacks=[Watch()]
        )
    assert 0 < report.steps < 20
    # It has not begun at the highest rate.
    assert rates[0] < 0.3 * 1e-3


@pytest.mark.parametrize(("sizes", "most"), [([8] * 40, 8), ([2, *[8] * 39], 40)])
def test_of_batches_of_one_size_few_are_read_to_be_timed(sizes: list[int], most: int) -> None:
    read = []

    class Reading:
        def __iter__(self) -> Any:
            for size in sizes:
                read.append(size)
                yield torch.randn(size, 3, 8, 8)

    with pytest.warns(dynorm.errors.CalibrationWarning, match="allow 1 steps"):
        dynorm.distill_(classifier(), Reading(), minutes=1e-5, quiet=True)
    # The first pass is the one that times.
    assert read[:most] == sizes[:most]
    assert len(read) <= most + 8


@pytest.mark.parametrize("steps", [1, 7, 40, 400])
def test_the_rate_warms_up_and_falls_as_a_cosine_and_follows_the_time_where_it_is_ahead(
    steps: int,
) -> None:
    warm_up = max(steps // 20, min(steps, 10))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    (cosine,) = get_cosine_schedule_with_warmup(optimizer, warm_up, steps).lr_lambdas
    assert [rate_factor(k, steps) for k in range(1, steps)] == pytest.approx(
        [cosine(k) for k in range(1, steps)]
    )
    assert rate_factor(0, steps) == 1 / warm_up
    shares = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    late = [0.5 * (1 + math.cos(math.pi * min(gone, 1))) for gone in shares]
    assert [rate_factor(20, 400, gone) for gone in shares] == pytest.approx(late)
    # Where the steps are ahead, the time does not raise the rate.
    assert rate_factor(300, 400, 0.1) == rate_factor(300, 400)


def test_a_run_that_is_slower_than_planned_ends_at_a_low_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, rates = classifier(), []

    class Slow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].get_last_lr()[0])
            now[0] += 1.0

    now = [0.0]
    monkeypatch.setattr("dynorm.train.distill.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("dynorm.train.distill._steps_in", lambda *_: 1000)
    report = distill_(net, images(), minutes=2, lr=1e-3, quiet=True, callbacks=[Slow()])
    assert report.steps < 150
    assert max(rates) > 0.9e-3
    assert rates[-1] < 1e-5


def test_a_bar_shows_step_loss_and_time_left_and_ends_full(
    capfd: pytest.CaptureFixture[str],
) -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    dynorm.distill_(net, images(), steps=25, lr=1e-3)
    shown = capfd.readouterr().err
    assert "distilling" in shown
    assert "25/25" in shown
    assert "loss " in shown


def test_without_a_bar_lines_say_how_long_a_distillation_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A clock that is asked once per step, and goes on by 3 s: 397 steps of 400 are left at first.
    clock = SimpleNamespace(perf_counter=itertools.count(0, 3).__next__)
    monkeypatch.setattr("dynorm.train.trainer.time", clock)
    said: list[str] = []
    announcer = Announcer(said.append)
    state = TrainerState(max_steps=400)
    announcer.on_train_begin(None, state)
    for step in range(1, 401):
        state.global_step = step
        announcer.on_step_end(None, state)
    assert said == [
        "step 20 of 400: about 19 minutes of distillation left",
        "step 100 of 400: about 15 minutes of distillation left",
        "step 200 of 400: about 10 minutes of distillation left",
        "step 300 of 400: about 5 minutes of distillation left",
    ]
    # A run that resumes near its end is timed from there.
    said.clear()
    state.global_step = 392
    announcer.on_train_begin(None, state)
    for step in range(393, 401):
        state.global_step = step
        announcer.on_step_end(None, state)
    assert said[:2] == [
        "distillation resumes at step 392 of 400",
        "step 394 of 400: about 18 s of distillation left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (99, "99 s"), (100, "2 minutes"), (5400, "90 minutes"), (12600, "3.5 hours")],
)
def test_a_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


class PressCtrlC(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_keeps_the_training_if_asked_to_and_a_resumed_run_says_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = classifier()
    dynorm.calibrate_(net, images())
    teacher = dynorm.restore_(copy.deepcopy(net))
    before = copy.deepcopy(net)
    handler = signal.getsignal(signal.SIGINT)
    options: dict[str, Any] = {"steps": 40, "lr": 1e-3, "quiet": True, "teacher": teacher}
    report = distill_(
        net,
        images(),
        **options,
        checkpoints=tmp_path,
        keep_on_interrupt=True,
        callbacks=[PressCtrlC(17)],
    )
    assert (report.steps, report.interrupted, report.kept) == (17, True, True)
    assert report.loss_after < report.loss_before
    assert apart(net, teacher) < apart(before, teacher)
    assert signal.getsignal(signal.SIGINT) is handler
    # Another run resumes there.
    said: list[str] = []
    again = distill_(
        copy.deepcopy(before),
        images(),
        **options,
        checkpoints=tmp_path,
        callbacks=[Announcer(said.append, has_bar=True)],
    )
    assert (again.resumed, again.steps, again.interrupted) == (17, 40, False)
    assert said == ["distillation resumes at step 17 of 40"]
    assert [step for step, _ in again.losses] == list(range(1, 41))
    # If it is not asked to, the weights from before are put back.
    with pytest.raises(KeyboardInterrupt):
        distill_(before, images(), **options, callbacks=[PressCtrlC(2)])
    assert apart(before, teacher) > apart(net, teacher)


def test_the_loss_is_reported_to_the_logger_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[float] = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                logged.append(kwargs["logs"]["loss"])

    # Neither tensorboard nor wandb is needed for this test.
    names = "transformers.integrations.integration_utils"
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Logger)
    found = ["tensorboard"]
    monkeypatch.setattr("dynorm.train.trainer.get_available_reporting_integrations", lambda: found)
    monkeypatch.setattr(f"{names}.get_available_reporting_integrations", lambda: found)
    net = classifier()
    dynorm.calibrate_(net, images())
    report = distill_(net, images(), steps=6, lr=1e-3, quiet=True, report_to="tensorboard")
    assert logged == [loss for _, loss in report.losses]
    assert len(logged) == 6
    with pytest.raises(dynorm.errors.ArgumentError, match=r"one of.*tensorboard"):
        distill_(net, images(), steps=6, quiet=True, report_to="tensorbord")
    with pytest.raises(dynorm.errors.ArgumentError, match=r"'wandb'.*install"):
        distill_(net, images(), steps=6, quiet=True, report_to=["tensorboard", "wandb"])
