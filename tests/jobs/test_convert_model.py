"""The main job in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import dynorm
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.replace.converted import dynorm_layers


def model_of(dim: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(dim, dim),
        nn.LayerNorm(dim),
        nn.GELU(),
        nn.Linear(dim, dim),
        nn.RMSNorm(dim, 1e-6),
    )


def data(count: int = 8, dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, dim, generator=generator) for _ in range(count)]


def test_it_is_the_verbs_one_after_another() -> None:
    one, batches = model_of(), data()
    report = dynorm.convert_model(one, batches, to="dyt", refine=4, fold_means=False)
    other, original = model_of(), model_of()
    dynorm.convert_(
        other, dynorm.find_norms(other, batches[0]), "dyt", per_channel=False, witnesses=5
    )
    fit, tests = [batches[k] for k in (0, 1, 2, 4, 5, 6)], [batches[3], batches[7]]
    dynorm.calibrate_(other, fit)
    dynorm.refine_(other, fit, steps=4)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)
    recipe = dynorm.Recipe(to="dyt", refine=4, fold_means=False).filled_for(original)
    expected = dynorm.measure(
        other, tests, original=original, fit_on=fit, meta={"recipe": recipe.to_dict()}
    )
    # Its times differ from run to run.
    assert set(report.meta.pop("cost")) == {"original", "now"}
    assert report.to_dict() == expected.to_dict()


def test_a_model_that_generates_is_fitted_as_a_language_model() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    one = LlamaForCausalLM(config).eval()
    other = copy.deepcopy(one)
    batches = [{"input_ids": torch.randint(0, 64, (4, 8))} for _ in range(6)]
    dynorm.convert_model(one, batches[:4], held_out=batches[4:], refine=0)
    # A third of the channels.
    dynorm.convert_(other, dynorm.find_norms(other, **batches[0]), witnesses=5)
    dynorm.calibrate_(other, batches[:4], lean=0.0)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)


def test_the_recipe_of_a_report_makes_the_same_model_again() -> None:
    one, other = small_decoder(), small_decoder()
    batches = token_batches()
    report = dynorm.convert_model(one, batches, refine=0)
    again = dynorm.Recipe().changed(**report.meta["recipe"])
    dynorm.convert_model(other, batches, recipe=again)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=0)


def test_a_norm_may_have_fewer_channels_than_a_layer_may_have_witnesses() -> None:
    model = model_of(3)
    dynorm.convert_model(model, data(dim=3), refine=0)
    assert [0 < len(layer.witnesses) <= 3 for layer in dynorm_layers(model).values()] == [
        True,
        True,
    ]


def test_steps_of_distillation_train_the_weights() -> None:
    options: Any = {"refine": 0, "fold_means": False}
    model, weight = model_of(), model_of()[0].weight.detach()
    dynorm.convert_model(model, data(), steps=2, **options)
    assert not torch.equal(model[0].weight, weight)
    plain = model_of()
    dynorm.convert_model(plain, data(), held_out=data(2), **options)
    assert torch.equal(plain[0].weight, weight)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": data(1)}, DataError),
        ({"batches": []}, DataError),
        # A single tensor is no list of batches, though its rows could be read as such.
        ({"batches": torch.randn(32, 16)}, DataError),
        ({"held_out": data(1)[0]}, DataError),
        ({"to": "nothing"}, ArgumentError),
        ({"to": nn.Linear}, ArgumentError),
        ({"only": "5"}, ArgumentError),
        ({"refine": -1}, ArgumentError),
        ({"batches": [*data(6), torch.full((32, 16), torch.nan)]}, DataError),
        ({"held_out": [torch.zeros(3, 5)]}, DataError),
    ],
)
def test_what_fails_leaves_the_model_as_it_was(
    options: dict[str, Any], error: type[Exception]
) -> None:
    model = model_of()
    with pytest.raises(error):
        dynorm.convert_model(model, **{"batches": data(), "refine": 2, "steps": 0} | options)
    assert [type(module) for module in model] == [type(module) for module in model_of()]
    for ours, theirs in zip(model.parameters(), model_of().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(ModelError):
        dynorm.convert_model(nn.Sequential(nn.Linear(16, 16)), data())


def test_a_layer_may_be_given_by_its_class() -> None:
    model = model_of()
    done = dynorm.convert_(model, dynorm.find_norms(model, data()[0]), dynorm.Derf)
    assert done.to == "derf"
    assert isinstance(model[1], dynorm.Derf)


def test_labels_in_a_batch_are_told_from_inputs() -> None:
    labelled = [(x, torch.zeros(len(x))) for x in data(4)]
    with pytest.raises(DataError, match="leave labels out"):
        dynorm.convert_model(model_of(), labelled)
    model = model_of()
    dynorm.convert_(model, dynorm.find_norms(model, data(1)[0]))
    with pytest.raises(DataError, match="leave labels out"):
        dynorm.calibrate_(model, labelled)


def test_find_norms_takes_one_batch() -> None:
    with pytest.raises(DataError, match=r"one batch.*list"):
        dynorm.find_norms(model_of(), data(4))


def small_decoder() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).eval()


def token_batches(count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(40, (4, 16), generator=generator)} for _ in range(count)]


def test_an_error_in_the_fit_puts_the_model_back() -> None:
    model, original = small_decoder(), small_decoder()
    names = list(model.state_dict())
    batches = token_batches()
    batches[2] = {"input_ids": torch.full((4, 16), 99)}
    with pytest.raises(DataError):
        dynorm.convert_model(model, batches, refine=0)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        assert_close(model(**batches[0]).logits, original(**batches[0]).logits)


def test_an_error_with_tensors_of_inference_mode_is_that_of_the_verb() -> None:
    with torch.inference_mode():
        model = model_of()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="inference_mode"):
        dynorm.convert_model(model, data(), fold_means=False)
    assert isinstance(model[1], nn.LayerNorm)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_error_puts_back_a_model_that_loads_in_its_own_way() -> None:
    class Strict(nn.Sequential):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not a checkpoint of this model")

    model = Strict(*model_of())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError):
        dynorm.convert_model(model, data(), held_out=[torch.randn(2, 3)])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_annealed_layers_are_refused_before_all_stages_unless_there_is_no_refinement() -> None:
    model = model_of()
    with pytest.raises(ArgumentError, match="refine must be 0"):
        dynorm.convert_model(model, data(), to="annealed")
    with pytest.raises(ArgumentError, match="refine must be 0"):
        dynorm.convert_model(model, data(), sites={"1": {"to": "annealed"}})
    dynorm.convert_model(model, data(), to="annealed", refine=0)
    assert isinstance(model[1], dynorm.layers.AnnealedNorm)


def test_a_model_that_cannot_be_copied_or_has_no_values_is_refused() -> None:
    model = model_of()
    # As torch.nn.utils.weight_norm keeps its weight.
    model.kept = model(data()[0])
    with pytest.raises(ModelError, match="deepcopy"):
        dynorm.convert_model(model, data())
    with pytest.raises(ModelError, match="meta device"):
        dynorm.convert_model(model_of().to("meta"), data())


def test_a_model_that_is_converted_in_part_is_refused_before_all_stages() -> None:
    model = model_of()
    dynorm.convert_model(model, data(), refine=0)
    layer = model[1]
    with pytest.raises(ModelError, match="restore_"):
        dynorm.convert_model(model, data())
    assert model[1] is layer
    dynorm.convert_model(dynorm.restore_(model), data(), refine=0)
