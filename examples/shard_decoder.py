"""Convert a decoder whose training does not fit into one process: weights, gradients, moments and teacher are sharded.

Without arguments, the script starts two processes and converts a small random Llama. To convert a
real model on eight GPUs: torchrun --nproc-per-node 8 examples/shard_decoder.py MODEL OUT [STEPS]
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dynorm
from dynorm.jobs.texts import standard_library_docstrings
from dynorm.train.distill import distill_

LENGTH = 512

Batch = dict[str, Tensor]


def shard(model: nn.Module) -> nn.Module:
    """Leave each process its part of every layer."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def convert(
    load: Callable[[], Any],
    batches: list[Batch],
    steps: int,
    witnesses: int = 8,
    lr: float | None = dynorm.Recipe.lr,
) -> Any:
    """Return the converted model on the first process, and None on the others."""
    rank = distributed.get_rank()
    ranks = distributed.get_world_size()
    batches_of_rank = batches[rank::ranks]

    # Each process holds the whole model until it is sharded.
    model = load()
    sites = dynorm.find_norms(model, **batches[0])
    dynorm.convert_(model, sites, witnesses=witnesses)
    dynorm.calibrate_(model, batches)
    model.activation_checkpointing_enable()
    unsharded = None
    if rank == 0:
        unsharded = copy.deepcopy(model).cpu()

    shard(model)
    report = distill_(
        model,
        batches_of_rank,
        teacher=shard(load()),
        steps=steps,
        lr=lr,
        bf16=torch.cuda.is_available(),
    )
    # All processes take part in this.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if unsharded is not None:
        unsharded.load_state_dict(state)
        print(
            f"{ranks} processes, {report.steps} steps: loss {report.loss_before:.3f} -> "
            f"{report.loss_after:.3f}"
        )
    # No process may leave while another one still gathers. Only the first one has more to do.
    distributed.barrier()
    distributed.destroy_process_group()
    return unsharded


def convert_folder(folder: str, out: str, steps: int) -> None:
    """Convert the model in a folder with the docstrings of the standard library, and save it to another."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(standard_library_docstrings(whole=True))
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    batches = []
    # The last block is shorter, and left out.
    for block in tokens.split(LENGTH)[:-1]:
        batches.append({"input_ids": block[None]})
    device = torch.device("cuda", torch.cuda.current_device())

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder).to(device).eval()

    model = convert(load, batches, steps)
    if model is not None:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def convert_small_model() -> None:
    """Convert a small random model, and check that the result is close to the original."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.1,
    )
    original = LlamaForCausalLM(config).eval()
    batches = []
    for _ in range(8):
        ids = torch.randint(0, 64, (4, 16))
        batches.append({"input_ids": ids})

    def load() -> nn.Module:
        return copy.deepcopy(original)

    model = convert(load, batches, steps=20, witnesses=2, lr=1e-2)
    if model is None:
        return
    divergence = dynorm.measure(model, batches, original=original).output.kl
    print(f"divergence from the original: {divergence:.5f} nats per token")
    if not divergence < 0.02:
        raise SystemExit(
            f"a distilled model should be close to its original, but is {divergence:.3f} nats away"
        )


def start_two_processes() -> None:
    """Run this script again, with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    """Start two processes, or do the work of one."""
    if "RANK" not in os.environ:
        start_two_processes()
    elif len(sys.argv) > 2:
        folder = sys.argv[1]
        out = sys.argv[2]
        steps = int(sys.argv[3]) if len(sys.argv) > 3 else 2000
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")
        convert_folder(folder, out, steps)
    else:
        distributed.init_process_group("gloo")
        convert_small_model()


if __name__ == "__main__":
    main()
