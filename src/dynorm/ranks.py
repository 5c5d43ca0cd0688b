"""Several processes in step: before a sum over all ranks they compare how far they are, so that none waits in vain."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynorm.errors import DataError, DynormError, ModelError
from dynorm.layers import PointwiseNorm

# Words that a rank exchanges instead of the path of the layer that it has reached.
BATCH = "a new batch"
OVER = "the end of its batches"
END = "the end of a batch"
FAILED = ("an error",)  # a tuple, so that it is equal to no path of a layer
Word = TypeVar("Word")
Sample = TypeVar("Sample")


@contextmanager
def joined(device: str) -> Iterator["Ranks"]:
    """Join the processes of torchrun, if it started any; with "cuda" each process has a separate GPU."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    makes_group = processes > 1 and not torch.distributed.is_initialized()
    if makes_group:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    yield Ranks()
    # After an error this may wait for the others, who wait for nobody.
    if makes_group:
        torch.distributed.destroy_process_group()


class Ranks:
    """The processes of the default group, each with its own share of the data; without a group only this one.

    All exchange a word, however far they are; sums follow only when all have reached the same
    layer. So the others notice if a rank fails or goes another way, and raise ``error`` instead of
    waiting.

    A ``local`` one is only this process, even in a group, and never communicates.
    """

    def __init__(
        self,
        group: "torch.distributed.ProcessGroup | None" = None,
        error: type[DynormError] = DataError,
        *,
        local: bool = False,
    ) -> None:
        self.size = 1
        self.rank = 0
        self._group = group
        self._error = error
        is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        # In a fake group, which serves to count collectives, nobody answers.
        if is_joined and not local and torch.distributed.get_backend(group) != "fake":
            self.size = torch.distributed.get_world_size(group)
        if self.size > 1:
            self.rank = torch.distributed.get_rank(group)
        # Whether nobody is listening any more: there is only one rank, or all know that one failed.
        self._over = self.size <= 1

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
            self._communicate(torch.distributed.all_reduce, values)
        return values

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return this rank's part of the samples: of n ranks, rank k has samples k, k + n, k + 2 n, ..."""
        return samples[self.rank :: self.size]

    def exchange(self, word: Word) -> list[Word]:
        """Send the others a word, such as how far this rank is, and return those of all ranks; raise if one failed."""
        if self._over:
            return [word]
        words: list[Any] = [None] * self.size
        self._communicate(torch.distributed.all_gather_object, words, word)
        if FAILED in words:
            self._over = True
            if word != FAILED:
                raise self._error(
                    f"every rank must get through, but rank {words.index(FAILED)} raised an error: "
                    "see its message; the model is as it was on all ranks"
                )
        return words

    def require_same_place(self, path: str = END) -> None:
        """Wait until every rank has reached the layer at ``path``, or the end of a batch; DataError if one has not."""
        paths = self.exchange(path)
        if len(set(paths)) == 1:
            return
        self._over = True
        listed = ", ".join(f"rank {rank} {name!r}" for rank, name in list(enumerate(paths))[:8])
        raise DataError(
            f"all ranks must reach the same layers in the same order, but came to {listed}: give "
            "each rank batches that use the same layers, or call this before the process group is "
            "initialized"
        )

    def require_alike(self, layers: Iterable[tuple[str, PointwiseNorm]]) -> None:
        """Check that every rank has the same layers and values; ModelError on every rank if one differs."""
        words = []
        values = []
        for path, layer in layers:
            parameters = []
            for name, parameter in layer.named_parameters():
                parameters.append((name, parameter.dtype, parameter.shape))
                if not parameter.is_meta:
                    values.append(parameter)
            words.append((path, type(layer).__name__, layer.config(), parameters))
        self.require_same(words, values)

    def require_same(
        self,
        words: object,
        values: Iterable[Tensor] = (),
        what: str = "point-wise layers with the same constants",
        remedy: str = "build the model from one seed or checkpoint everywhere, and change it alike on every rank",
    ) -> None:
        """Check that every rank has the same words and values for its layers; ModelError on every rank if not."""
        if self._over:
            return
        digest = hashlib.sha256(repr(words).encode())
        for value in values:
            # float64 holds each value of the smaller dtypes.
            digest.update(value.detach().double().cpu().contiguous().numpy().tobytes())
        digests = self.exchange(digest.digest())
        others = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            self._over = True
            raise ModelError(
                f"all ranks must have the same {what}, but those of rank {', '.join(others[:8])} "
                f"differ from rank 0's: {remedy}"
            )

    def _communicate(self, collective: Callable[..., object], *tensors: object) -> None:
        try:
            collective(*tensors, group=self._group)
        except BaseException:
            # The group itself has failed: a rank is gone, and the next exchange would wait for it.
            self._over = True
            raise
