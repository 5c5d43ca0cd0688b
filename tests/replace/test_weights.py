"""The weights of the conversion: with others, the old norms are not the original model."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ModelError
from dynorm.replace.weights import changed_weights

WIDTH = 24


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 5),
    ).eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (8, 6), generator=generator) for _ in range(4)]


def converted(to: str = "dyisru") -> nn.Sequential:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), to)
    dynorm.calibrate_(model, batches())
    return model


def train_(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def test_after_training_measure_asks_for_the_original() -> None:
    model = converted()
    train_(model)
    with pytest.raises(ModelError, match=r"5 parameters.*\'0\.weight\'.*original="):
        dynorm.measure(model, batches())
    report = dynorm.measure(model, batches(), original=build())
    assert len(report.sites) == 2


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "5.bias"])
def test_one_value_of_one_weight_is_enough(name: str) -> None:
    model = converted()
    with torch.no_grad():
        model.get_parameter(name).flatten()[-1] += 1e-6
    assert changed_weights(model) == [name]


def test_a_row_of_a_large_embedding_is_enough() -> None:
    model = nn.Sequential(nn.Embedding(30_000, 16), nn.LayerNorm(16))
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]))
    assert changed_weights(model) == []
    with torch.no_grad():
        model[0].weight[29_877] += 1e-3
    assert changed_weights(model) == ["0.weight"]


def moved_through_bfloat16(model: nn.Module) -> nn.Module:
    return model.bfloat16().float()


def saved_state(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    return other


EDITS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "state": saved_state,
    "float64": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "float16": lambda model: model.half(),
    "through_bfloat16": moved_through_bfloat16,
    "bfloat16_and_float16": lambda model: model.bfloat16().half(),
    "frozen": lambda model: model.requires_grad_(False),
    "training": lambda model: model.train(),
}


@pytest.mark.parametrize("edit", list(EDITS))
def test_copies_and_casts_are_the_same_weights(edit: str) -> None:
    model = EDITS[edit](converted())
    assert changed_weights(model) == []
    assert len(dynorm.measure(model, batches()).sites) == 2
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(1.1)
    assert changed_weights(model) == ["2.weight"]


def test_constants_may_move() -> None:
    model = converted()
    dynorm.refine_(model, batches(), steps=4)
    dynorm.calibrate_(model, batches())
    assert changed_weights(model) == []


def test_the_end_of_annealing_is_the_same_weights() -> None:
    model = converted("annealed")
    dynorm.set_anneal_(model, 1.0)
    dynorm.finalize_(model)
    assert len(dynorm.measure(model, batches()).sites) == 2
    train_(model)
    with pytest.raises(ModelError, match="pass original="):
        dynorm.measure(model, batches())


@pytest.mark.parametrize("trained", [False, True])
def test_a_fold_is_the_same_model_but_does_not_hide_a_training(trained: bool) -> None:
    model = converted()
    if trained:
        train_(model)
    dynorm.fold_(model, batches()[0], only="4")
    assert bool(changed_weights(model)) is trained
    if not trained:
        report = dynorm.measure(model, batches())
        assert ([site.path for site in report.sites], report.left) == (["1"], ["4"])


def test_an_adapter_may_have_been_trained() -> None:
    model = converted()
    adapted = nn.Sequential(model[2], nn.Linear(WIDTH, WIDTH))
    model[2] = adapted
    assert changed_weights(model) == ["2.1.weight", "2.1.bias"]
    adapted.requires_grad_(False)
    assert changed_weights(model) == []


def test_a_head_outside_the_converted_part_is_not_compared() -> None:
    encoder = build()
    whole = nn.Sequential(encoder, nn.Linear(5, 3))
    dynorm.convert_(encoder, dynorm.find_norms(encoder, batches()[0]))
    assert changed_weights(whole) == []


def test_restored_norms_leave_no_trace() -> None:
    plain = build()
    before = [set(vars(module)) for module in plain.modules()]
    model = dynorm.restore_(converted())
    assert [set(vars(module)) for module in model.modules()] == before
    # Trained with norms, and converted: these are now the weights of the conversion.
    train_(model)
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]))
    assert changed_weights(model) == []


def test_norms_converted_after_training_do_not_hide_it() -> None:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]), only="1")
    train_(model)
    dynorm.convert_(model, dynorm.find_norms(model, batches()[0]))
    assert "0.weight" in changed_weights(model)


def test_a_loaded_model_is_compared_by_its_output(tmp_path: Path) -> None:
    model = converted()
    expected = dynorm.measure(model, batches()).output
    dynorm.save(model, tmp_path / "model")
    loaded = dynorm.load(tmp_path / "model", build())
    with pytest.raises(ModelError, match=r"replaced.*norm"):
        dynorm.measure(loaded, batches())
    report = dynorm.measure(loaded, batches(), original=build())
    assert report.output == expected
    assert (report.sites, report.left) == ([], ["1", "4"])
    text = " ".join(str(report).split())
    assert "only the output is compared, because the norms are not known" in text
    assert "4 not compared, its norm is not known" in text
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "The norms of 2 layers are not known, so only the output is compared" in page
    assert report.to_dict()["sites"] == []
    with pytest.raises(ModelError, match="is converted already"):
        dynorm.measure(loaded, batches(), original=model)


def test_a_folded_model_is_compared_by_its_output() -> None:
    model = converted()
    expected = dynorm.measure(model, batches()).output
    dynorm.fold_(model, batches()[0])
    report = dynorm.measure(model, batches(), original=build())
    assert (report.sites, report.left) == ([], ["1", "4"])
    assert report.output.error == pytest.approx(expected.error, rel=1e-4)
