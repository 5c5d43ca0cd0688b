"""What all tests share: one thread, for the tensors are small, and the same random numbers in every order."""

import os
from collections.abc import Iterator

# Inductor would compile and load a trial for each instruction set of this CPU, which takes longer than most tests.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
