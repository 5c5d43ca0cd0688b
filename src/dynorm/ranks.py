"""Several processes in step: before a sum over all ranks each says how far it is, so that none waits in vain."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynorm.errors import DataError, DynormError, ModelError
from dynorm.layers import PointwiseNorm

# Said instead of the path of the layer that a rank has reached.
BATCH, OVER, END = "a new batch", "the end of its batches", "the end of a batch"
FAILED = ("an error",)  # the one word that decides, which no path of a layer is equal to
Word = TypeVar("Word")


@contextmanager
def joined(device: str) -> Iterator["Ranks"]:
    """Join the processes that torchrun started, if it did, for the work inside; with "cuda" each on its own GPU."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch.distributed.is_initialized()
    if not alone:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    yield Ranks()
    # After an error it may wait for the others, who wait for nobody.
    if not alone:
        torch.distributed.destroy_process_group()


class Ranks:
    """The processes of the default group, each with its own share of the data; without a group this one alone.

    Each says a word, however far it is; sums follow only when all have reached the same layer. So a
    rank that fails, or goes another way, is seen by the others, which raise ``error`` instead of
    waiting.

    A ``local`` one is this process only, in a group too, and never communicates.
    """

    def __init__(
        self,
        group: "torch.distributed.ProcessGroup | None" = None,
        error: type[DynormError] = DataError,
        *,
        local: bool = False,
    ) -> None:
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        there = joined and not local
        backend = torch.distributed.get_backend(group) if there else ""
        # In a fake group, which serves to count collectives, nobody answers.
        self.size = torch.distributed.get_world_size(group) if there and backend != "fake" else 1
        self.rank = torch.distributed.get_rank(group) if self.size > 1 else 0
        self._group = group
        self._error = error
        self._over = self.size <= 1  # nobody is listening any more: all ranks know that one failed

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Tell the other ranks of any error that is raised inside, so that they raise as well."""
        try:
            yield
        except Exception:
            if not self._over:
                self.exchange(FAILED)
            raise

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        if self.size > 1:
            self._run(torch.distributed.all_reduce, values)
        return values

    def share(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's part: every so manieth, from the one of its own number."""
        return samples[self.rank :: self.size]

    def exchange(self, word: Word) -> list[Word]:
        """Tell the others a word, such as how far this rank is, and return each one's; raise where one has failed."""
        if self._over:
            return [word]
        found: list[Any] = [None] * self.size
        self._run(torch.distributed.all_gather_object, found, word)
        if FAILED in found:
            self._over = True
            if word != FAILED:
                raise self._error(
                    f"every rank must get through, but rank {found.index(FAILED)} raised an error: "
                    "see its message; "
                    "the model is as it was on all ranks"
                )
        return found

    def require_same_place(self, path: str = END) -> None:
        """Wait until every rank has reached the layer at ``path``, or the end of a batch; DataError if one has not."""
        found = self.exchange(path)
        if len(set(found)) == 1:
            return
        self._over = True
        listed = ", ".join(f"rank {rank} {name!r}" for rank, name in list(enumerate(found))[:8])
        raise DataError(
            f"all ranks must reach the same layers in the same order, but came to {listed}: give "
            "each rank batches "
            "that use the same layers, or call this before the process group is initialized"
        )

    def require_alike(self, layers: Iterable[tuple[str, PointwiseNorm]]) -> None:
        """Check that every rank has the same layers and values; ModelError on every rank if one differs."""
        own = dict(layers)
        words = [
            (
                path,
                type(layer).__name__,
                layer.config(),
                [(n, p.dtype, p.shape) for n, p in layer.named_parameters()],
            )
            for path, layer in own.items()
        ]
        self.require_same(
            words, (p for layer in own.values() for p in layer.parameters() if not p.is_meta)
        )

    def require_same(
        self,
        words: object,
        values: Iterable[Tensor] = (),
        what: str = "point-wise layers with the same constants",
    ) -> None:
        """Check that every rank has the same words and values for its layers; ModelError on every rank if not."""
        if self._over:
            return
        seen = hashlib.sha256(repr(words).encode())
        for value in values:
            # float64 holds each value of the smaller dtypes.
            seen.update(value.detach().double().cpu().contiguous().numpy().tobytes())
        found = self.exchange(seen.digest())
        if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
            self._over = True
            raise ModelError(
                f"all ranks must have the same {what}, but those of rank "
                f"{', '.join(map(str, odd[:8]))} differ from "
                "rank 0's: build the model from one seed or checkpoint everywhere, and change it "
                "alike on every rank"
            )

    def _run(self, collective: Callable[..., Any], *tensors: Any) -> None:
        try:
            collective(*tensors, group=self._group)
        except BaseException:
            # The group itself has failed: a rank is gone, and the next exchange would wait for it.
            self._over = True
            raise
