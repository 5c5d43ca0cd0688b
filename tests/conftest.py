"""Shared by all tests: one thread, because the tensors are small, and the same random numbers in every order."""

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from typing import Any

# Inductor would compile and load a trial for each instruction set of this CPU, which takes longer
# than most tests.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# And it would start processes that import torch, which compile nothing for a CPU.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest

from tests import fresh

# pytest listens to each logger that does not propagate, and torch then writes down each graph that
# it traces.
logging.getLogger("torch.__trace").propagate = True

# torch makes many objects that stay. To look for garbage after each 700 of them, as Python does by default,
# takes a twentieth of the time.
gc.set_threshold(20_000, 20, 20)

# After the two longest, tests that use the same libraries, so that one process imports these for most
# of them.
FIRST = (
    "test_triton.py",
    "test_silence.py",
    "test_peft.py",
    "test_sentence_transformers.py",
    "test_export.py",
    "test_examples.py",
)

# The process that starts xdist's workers runs no test, and they wait for it: fixtures import torch.


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(fresh.start())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests take longest: at the end another core would wait for one of them."""

    def place(item: pytest.Item) -> int:
        name = item.path.name
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Exclude imported objects from garbage collection: they stay, and looking at them takes long."""
    # Its own check of random generators, once it is imported, sees no object that is frozen here.
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def headers() -> None:
    """Let inductor precompile no headers without the program openssl, which it asks for their checksum."""
    if shutil.which("openssl") is None:
        # For the processes that tests start; AOTInductor has no such variable.
        os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        import torch._inductor.config

        torch._inductor.config.cpp_cache_precompile_headers = False
        torch._inductor.config.aot_inductor.precompile_headers = False


@pytest.fixture(autouse=True, scope="session")
def quick_compiler() -> Iterator[None]:
    """Let torch note no stack traces, and not time guards: for that it empties the processor's caches."""
    import torch.fx.config
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        patch.setattr(torch.fx.config, "do_not_emit_stack_traces", True, raising=False)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Seed fixtures that several tests share: a test before them may have drawn any number of times."""
    if fixturedef.scope != "function":
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["DyISRU", "DyT", "Derf", "LinearControl"])
def kind(request: pytest.FixtureRequest) -> Any:
    """Each layer class in turn."""
    import dynorm

    return getattr(dynorm, request.param)
