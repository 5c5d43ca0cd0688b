"""LoRA on a converted model, with peft: trained, saved, loaded in a fresh process, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dynorm
from dynorm.replace.converted import dynorm_layers
from tests.ecosystem.models import first, gpt2, ids
from tests.fresh import run

# peft compares with the ends of paths.
NORMS = ["ln_1", "ln_2", "ln_f"]


def adapted(model: nn.Module, **options: Any) -> Any:
    # Its import takes seconds, in each process that collects the tests.
    import peft

    # GPT-2's Conv1D has its weight transposed, which peft would say in a warning.
    settings = {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["c_attn"],
        "fan_in_fan_out": True,
    } | options
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def unconverted() -> Any:
    return dynorm.restore_(gpt2())


def train(model: nn.Module, steps: int = 4) -> None:
    model.train()
    optimizer = torch.optim.AdamW(dynorm.param_groups(model, lr=3e-2, constants_lr=1e-1))
    for _ in range(steps):
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if "lora" not in name
    }


SCRIPT = """
import sys, dynorm, peft, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
folder = Path(sys.argv[1])
model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter").eval()
with torch.no_grad():
    save_file({"logits": model(load_file(folder / "ids.safetensors")["ids"]).logits}, folder / "logits.safetensors")
"""


@pytest.mark.parametrize("constants", ["frozen", "trained"])
def test_an_adapter_is_trained_saved_loaded_and_merged(tmp_path: Path, constants: str) -> None:
    import peft

    model = gpt2()
    dynorm.save(model, tmp_path / "base")
    before, output = values(model), first(model)
    lora = adapted(model, modules_to_save=NORMS if constants == "trained" else None)
    assert torch.equal(first(lora), output)
    trained = {name for name, p in lora.named_parameters() if p.requires_grad}
    assert any(name.endswith("log_beta") for name in trained) == (constants == "trained")
    train(lora)
    tuned = first(lora)
    assert not torch.equal(tuned, output)
    # Frozen weights did not move; it may be the weights of the base below modules_to_save.
    for name, value in before.items():
        here = lora.get_parameter(f"base_model.model.{_at_home(name, constants)}")
        assert torch.equal(here, value), name
    lora.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("log_beta" in name for name in names) == (constants == "trained")
    if constants == "trained":
        save_file({"ids": ids()}, tmp_path / "ids.safetensors")
        run(SCRIPT, tmp_path)
        torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], tuned)
    else:
        again = peft.PeftModel.from_pretrained(
            dynorm.load(tmp_path / "base"), str(tmp_path / "adapter")
        )
        torch.testing.assert_close(first(again.eval()), tuned)
    merged = lora.merge_and_unload()
    assert len(dynorm_layers(merged)) == 5
    torch.testing.assert_close(first(merged), tuned)
    dynorm.save(merged, tmp_path / "merged")
    torch.testing.assert_close(first(dynorm.load(tmp_path / "merged")), tuned)


def _at_home(name: str, constants: str) -> str:
    path, _, leaf = name.rpartition(".")
    if path.endswith("c_attn"):
        return f"{path}.base_layer.{leaf}"
    if constants == "trained" and path.split(".")[-1] in NORMS:
        return f"{path}.original_module.{leaf}"
    return name


def test_a_model_with_adapters_is_converted_and_calibrated() -> None:
    lora = adapted(unconverted())
    sites = dynorm.find_norms(lora, input_ids=ids())
    dynorm.convert_(lora, sites)
    dynorm.calibrate_(lora, [{"input_ids": ids()}])
    assert len(dynorm_layers(lora)) == 5
    # The norms were frozen by peft, and so are the layers in their place.
    assert not any(
        p.requires_grad for layer in dynorm_layers(lora).values() for p in layer.parameters()
    )
    before = first(lora)
    train(lora)
    assert not torch.equal(first(lora), before)


WARNED = r"(\d).*peft adapter.*ln_1\..*base"


# peft warns about a LayerNorm, which it does not merge.
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("kind", ["modules_to_save", "ln_tuning"])
def test_norms_inside_of_an_adapter_are_converted_with_a_warning(tmp_path: Path, kind: str) -> None:
    import peft

    torch.manual_seed(0)
    if kind == "modules_to_save":
        lora = adapted(unconverted(), modules_to_save=["ln_1"]).eval()
    else:
        settings = peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["ln_1"])
        lora = peft.get_peft_model(unconverted(), settings).eval()
    sites = dynorm.find_norms(lora, input_ids=ids())
    with pytest.warns(UserWarning, match=WARNED) as caught:
        dynorm.convert_(lora, sites)
    assert caught[0].filename == __file__
    dynorm.calibrate_(lora, [{"input_ids": ids()}])
    lora.save_pretrained(tmp_path / "adapter")
    assert any(
        "log_beta" in name for name in load_file(tmp_path / "adapter/adapter_model.safetensors")
    )
    # Merged, it is an ordinary converted model.
    tuned = first(lora)
    merged = lora.merge_and_unload()
    torch.testing.assert_close(first(merged), tuned)
    dynorm.save(merged, tmp_path / "merged")
    torch.testing.assert_close(first(dynorm.load(tmp_path / "merged")), tuned)


def test_only_norms_of_the_adapter_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    lora = adapted(unconverted(), modules_to_save=["ln_1"]).eval()
    dynorm.convert_(lora, dynorm.find_norms(lora, input_ids=ids()), to={"*.ln_1.*": "keep"})
    # A module without a norm, saved with the adapter, and single tokens.
    lora = adapted(unconverted(), modules_to_save=["mlp"], trainable_token_indices=[3]).eval()
    dynorm.convert_(lora, dynorm.find_norms(lora, input_ids=ids()))
    assert not [warning for warning in recwarn if "adapter" in str(warning.message)]


def test_single_tokens_are_trained_on_a_converted_base(tmp_path: Path) -> None:
    import peft

    model = gpt2()
    dynorm.save(model, tmp_path / "base")
    lora = adapted(model, trainable_token_indices=[5, 6])
    before = first(lora)
    train(lora)
    tuned = first(lora)
    assert not torch.equal(before, tuned)
    lora.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(dynorm.load(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(first(again.eval()), tuned)
    merged = lora.merge_and_unload()
    dynorm.save(merged, tmp_path / "merged")
    torch.testing.assert_close(first(dynorm.load(tmp_path / "merged")), tuned)
