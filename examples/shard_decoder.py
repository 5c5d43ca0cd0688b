"""Convert a decoder whose training does not fit into one process: weights, gradients, moments and teacher are sharded.

Without arguments it starts two processes and converts a small random Llama. A real model on eight
GPUs: torchrun --nproc-per-node 8 examples/shard_decoder.py MODEL OUT [STEPS]
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dynorm
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.train.distill import distill_

LENGTH = 512


def sharded(model: nn.Module) -> nn.Module:
    """Leave each process its part of every layer."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def convert(
    load: Callable[[], Any],
    batches: list[dict[str, torch.Tensor]],
    steps: int,
    witnesses: int = 8,
    lr: float | None = None,
) -> Any:
    """Return the converted model on the first process, and None on the others."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    share = batches[rank::ranks]
    # Until here each process holds the model once.
    model = load()
    dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), witnesses=witnesses)
    dynorm.calibrate_(model, share, lean=0.0)
    model.activation_checkpointing_enable()
    dynorm.refine_(model, share, steps=min(steps, 50))
    whole = copy.deepcopy(model).cpu() if rank == 0 else None
    sharded(model)
    report = distill_(
        model, share, teacher=sharded(load()), steps=steps, lr=lr, bf16=True, quiet=True
    )
    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if whole is not None:
        whole.load_state_dict(state)
        print(
            f"{ranks} processes, {report.samples} samples: loss {report.loss_before:.3f} -> "
            f"{report.loss_after:.3f}"
        )
    # No process leaves while another one still gathers. Then the first one goes on alone.
    distributed.barrier()
    distributed.destroy_process_group()
    return whole


def real(folder: str, out: str, steps: int) -> None:
    """Convert the model in a folder to one in another, with the docstrings of Python's standard library."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    joined = tokenizer("\n\n".join(standard_library_docstrings(whole=True)), return_tensors="pt")[
        "input_ids"
    ][0]
    batches = [{"input_ids": block[None]} for block in joined.split(LENGTH)[:-1]]
    device = torch.device("cuda", torch.cuda.current_device())
    model = convert(
        lambda: AutoModelForCausalLM.from_pretrained(folder).to(device).eval(), batches, steps
    )
    if model is not None:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def small() -> None:
    """Convert a small random model, and check that the weights found their way back."""
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    original = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.1, **size)).eval()
    batches = [{"input_ids": torch.randint(0, 64, (4, 16))} for _ in range(16)]
    model = convert(lambda: copy.deepcopy(original), batches, 30, witnesses=2, lr=3e-4)
    if model is not None:
        found = dynorm.measure(model, batches, original=original).output
        print(f"divergence from the original: {found.kl:.5f} nats per token")
        if not found.kl < 0.02:
            raise SystemExit(
                f"a distilled model should be close to its original, but is {found.kl:.3f} nats "
                "away"
            )


def main() -> None:
    """Do the work of one process, or start two."""
    if "RANK" not in os.environ:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
        ]
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return
    if len(sys.argv) > 2:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if len(sys.argv) > 2 else "gloo")
    if len(sys.argv) > 2:
        real(sys.argv[1], sys.argv[2], int([*sys.argv, "2000"][3]))
    else:
        small()


if __name__ == "__main__":
    main()
