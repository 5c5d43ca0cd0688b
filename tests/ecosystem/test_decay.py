"""Weight decay by the stock Trainer, and by others that group parameters in the same way: no layer is decayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS
from transformers.trainer_pt_utils import get_parameter_names

import dynorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.converted import dynorm_layers
from tests.ecosystem.models import gpt2, ids
from tests.fresh import run

# peft 0.21 asks by the old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

TARGETS = ("dyisru", "dyt", "derf", "linear", "annealed", "annealed_dyt")


def dinov2(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    model = transformers.Dinov2ForImageClassification(config).eval()
    pixels = torch.randn(4, 3, 28, 28)
    dynorm.convert_(model, dynorm.find_norms(model, pixels), **options)
    dynorm.calibrate_(model, [pixels])
    return model


def stock_trainer(model: nn.Module, folder: Path, kind: type[Trainer] = Trainer) -> Trainer:
    """Return a Trainer that makes its optimizer itself, with weight decay."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=30, per_device_train_batch_size=4, learning_rate=1e-2,
        weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        save_strategy="no", logging_steps=30, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids(16)]
    return kind(model, arguments, train_dataset=rows)


def decayed(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    groups = [group for group in optimizer.param_groups if group["weight_decay"] > 0]
    return {parameter for group in groups for parameter in group["params"]}


def layer_parameters(model: nn.Module) -> set[Tensor]:
    return {p for layer in dynorm_layers(model).values() for p in layer.parameters()}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("build", [gpt2, dinov2])
def test_the_stock_trainer_decays_no_layer(tmp_path: Path, build: Any, to: str) -> None:
    model = build(to=to, per_channel=to == "dyt", witnesses=2 if to == "dyisru" else 0)
    trainer = stock_trainer(model, tmp_path)
    groups = decayed(trainer.create_optimizer())
    assert len(dynorm_layers(model)) == 5
    assert not groups & layer_parameters(model)
    # Everything else as before the conversion: the matrices are decayed.
    matrices = {p for p in model.parameters() if p.dim() > 1} - layer_parameters(model)
    assert matrices <= groups
    names = trainer.get_decay_parameter_names(model)
    assert {model.get_parameter(name) for name in names} == groups


def test_what_is_decayed_is_what_was_decayed_before(tmp_path: Path) -> None:
    model = gpt2()
    after = stock_trainer(model, tmp_path).get_decay_parameter_names(model)
    dynorm.restore_(model)
    before = stock_trainer(model, tmp_path).get_decay_parameter_names(model)
    assert after == before


def test_a_subclass_of_the_trainer_and_an_adapter(tmp_path: Path) -> None:
    import peft

    class OfMine(Trainer):  # type: ignore[misc]
        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return [name for name in super().get_decay_parameter_names(model) if "wte" not in name]

    model = gpt2()
    groups = decayed(stock_trainer(model, tmp_path, OfMine).create_optimizer())
    assert groups
    assert not groups & layer_parameters(model)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        modules_to_save=["ln_1"],
    )
    lora = peft.get_peft_model(gpt2(), settings)
    trained = {p for p in layer_parameters(lora) if p.requires_grad}
    assert trained
    groups = decayed(stock_trainer(lora, tmp_path).create_optimizer())
    assert groups
    assert not groups & trained


def test_scripts_that_read_the_table_of_norms() -> None:
    model = gpt2()
    names = get_parameter_names(model, ALL_LAYERNORM_LAYERS)
    parameters = dict(model.named_parameters())
    assert not {parameters[name] for name in names if name in parameters} & layer_parameters(model)
    # A script that leaves out other classes does not mean norms.
    names = get_parameter_names(model, [nn.Embedding])
    assert {name for name in parameters if "ln_" in name} <= set(names)


def test_the_norm_that_a_fold_leaves_is_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), RMSNorm(4, bias=True))
    assert get_parameter_names(model, [nn.LayerNorm], ["bias"]) == ["0.weight"]


SHOW = """
import importlib, sys

def show():
    import torch
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names
    model = nn.Sequential(nn.Linear(4, 4), dynorm.DyISRU(4), nn.Linear(4, 4))
    names = get_parameter_names(model, [nn.LayerNorm], ["bias"])
    trainers = transformers.trainer.get_parameter_names(model, [nn.LayerNorm], ["bias"])
    print(names, trainers)
"""
DYNORM_FIRST = """
import dynorm
assert "transformers" not in sys.modules
import transformers.trainer
show()
"""
TRANSFORMERS_FIRST = """
import transformers.trainer, dynorm
show()
import dynorm.hub
importlib.reload(dynorm.hub)
show()
"""


@pytest.mark.parametrize(
    ("order", "imported", "times"),
    [(DYNORM_FIRST, "libraries", 1), (TRANSFORMERS_FIRST, "transformers", 2)],
    ids=["dynorm first", "transformers first"],
)
def test_it_holds_in_either_order_of_imports(order: str, imported: str, times: int) -> None:
    lines = run(SHOW + order, imported=imported).splitlines()
    assert lines == ["['0.weight', '2.weight'] ['0.weight', '2.weight']"] * times
