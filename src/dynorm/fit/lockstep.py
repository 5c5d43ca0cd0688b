"""Run a model on many batches side by side: all of them stop at each layer until it is fitted.

A layer should be fitted to the outputs of the finished layers before it, on all tokens. So every
batch must have arrived at a layer before any of them goes on. A forward pass cannot be stopped from
outside, but a hook in it can wait. So each batch runs in its own thread, and only one thread runs
at a time.
"""

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.arguments import upcast
from dynorm.batches import Batch, call
from dynorm.errors import DataError, ModelError
from dynorm.guard import hooked, random_states, set_random_states, undisturbed
from dynorm.layers import PointwiseNorm
from dynorm.replace.swap import original_forward

# ``run`` is the PausedRun that this thread belongs to.
_running = threading.local()
# Inputs that differ less than this, relatively, count as the same.
_SAME = 1e-3


class _Closed(BaseException):
    """Raised inside a model to end its run early; no ``except Exception`` in the model catches it."""


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer at which a run has stopped."""

    layer: PointwiseNorm
    x: Tensor
    norm_output: Tensor  # the output of the norm that the layer replaced, on the same input


class PausedRun:
    """One forward pass over one batch, which stops at every call of a layer until it is resumed.

    When the pass goes on, ``answer(layer, x)`` computes the output of the layer. Without it the
    output is that of the norm, as in the original model.

    Each run has its own random states, which begin as they are when it is made. So its random
    numbers do not depend on other runs.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        answer: Callable[[PointwiseNorm, Tensor], Tensor] | None = None,
    ) -> None:
        self.call: LayerCall | None = None  # the call at which it waits; None when it is over
        self._model = model
        self._batch = batch
        self._answer = answer
        self._error: BaseException | None = None
        self._closed = False
        self._over = False
        self._go_on = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        # Not looked for at each stop: the model may have thousands of parameters.
        self._on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        self._random_states = random_states(self._on_gpu)
        self._settings = _torch_settings(model)
        # The thread has the context variables of the thread that makes it.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), daemon=True)
        self._thread.start()
        try:
            self.resume()
        except BaseException:
            # After Ctrl-C, for instance: the caller has no run to close.
            self.close()
            raise

    def resume(self) -> None:
        """Run to the next call of a layer, or to the end; raise the error of the model, if there is one."""
        self.call = None
        outside = random_states(self._on_gpu)
        set_random_states(self._random_states)
        try:
            self._go_on.release()
            self._has_stopped.acquire()
        finally:
            self._random_states = random_states(self._on_gpu)
            set_random_states(outside)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the run wherever it is, and free its tensors."""
        if not self._over:
            self._closed = True
            self._go_on.release()
        self._thread.join()
        self.call = None

    def stop_at(self, layer: PointwiseNorm, x: Tensor, norm_output: Tensor) -> Tensor:
        """Wait at a layer for :meth:`resume`, and return the output to go on with."""
        if self._closed:
            # The model caught the exception that ends it, or calls a layer in a ``finally``.
            raise _Closed
        # Without an answer the model gets this tensor and may write into it, so a copy is kept.
        kept = norm_output.clone() if self._answer is None else norm_output
        self.call = LayerCall(layer, x, kept)
        self._has_stopped.release()
        self._go_on.acquire()
        if self._closed:
            raise _Closed
        if self._answer is None:
            return norm_output
        return self._answer(layer, x)

    def _work(self) -> None:
        self._go_on.acquire()
        _running.run = self
        try:
            if not self._closed:
                with ExitStack() as stack:
                    for setting in self._settings:
                        stack.enter_context(setting)
                    call(self._model, self._batch)
        except _Closed:
            pass
        except BaseException as error:  # resume() raises it in its own thread
            self._error = error
        finally:
            self._over = True
            self._has_stopped.release()


@contextmanager
def stopping_at(layers: Iterable[PointwiseNorm]) -> Iterator[None]:
    """Make every :class:`PausedRun` stop at these layers while the context lasts.

    A call outside of any run is left as it is, because the batches may be made with the model.
    """
    home = threading.get_ident()

    def stop(layer: PointwiseNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        run: PausedRun | None = getattr(_running, "run", None)
        if run is None and threading.get_ident() == home:
            return output
        if run is None:
            raise ModelError(
                "the model must call its layers in the thread that calls the model, but calls some "
                "in a thread that it has started: let it call them one after another meanwhile"
            )
        norm_output = original_forward(layer, *args)
        return run.stop_at(layer, args[0], norm_output)

    with hooked(layers, stop):
        yield


# The other run continues with outputs of another size. So it differs even if the batches are equal.
_OTHER_SIZE = 1.1


def can_share(
    model: nn.Module, layers: Iterable[PointwiseNorm], first: Batch, second: Batch
) -> bool:
    """Return whether several batches can run through a model side by side, by trying it.

    They cannot if a run stores a value, on a module or elsewhere, that another run would read. The
    trial uses the norms, and ``second`` may be the same batch as ``first``.
    """
    layers = list(layers)
    alone = _inputs(model, layers, first)
    try:
        beside = _inputs(model, layers, first, second)
    except DataError:
        # A value stored by the other run may have had the wrong shape. Any other error comes again
        # in the calibration.
        return False
    return len(beside) == len(alone) and all(map(_are_close, beside, alone))


def _inputs(
    model: nn.Module, layers: list[PointwiseNorm], batch: Batch, other_batch: Batch | None = None
) -> list[Tensor]:
    """Return the summaries of the layers' inputs for a batch, while another one may run in turn with it."""

    def answer(layer: PointwiseNorm, x: Tensor) -> Tensor:
        return original_forward(layer, x) * _OTHER_SIZE

    inputs: list[Tensor] = []
    runs: list[PausedRun] = []
    with undisturbed(model, (batch, other_batch), attributes=True), stopping_at(layers):
        try:
            run = PausedRun(model, batch)
            runs.append(run)
            if other_batch is not None:
                runs.append(PausedRun(model, other_batch, answer))
            while run.call is not None:
                # Means over the last axis: no copy of all of it.
                inputs.append(upcast(run.call.x.detach()).mean(-1))
                for each in runs:
                    if each.call is not None:
                        each.resume()
        finally:
            for started in runs:
                started.close()
    return inputs


def _are_close(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    # The difference of two infinities is NaN, so they are compared as they are.
    return bool((x - y).norm() <= _SAME * y.norm()) or torch.equal(x, y)


def _torch_settings(model: nn.Module) -> list[AbstractContextManager[object]]:
    """Return contexts that apply the settings of this thread in another, without gradients."""
    first = next(model.parameters(), None)
    kind = "cpu" if first is None else first.device.type
    settings: list[AbstractContextManager[object]] = []
    if kind == "cuda":
        settings.append(torch.cuda.device(torch.cuda.current_device()))
    # A default device is a mode of torch, and under a mode layers use their plain definition. So it
    # is set again only where there was one.
    if torch._C._len_torch_function_stack() > 0:
        settings.append(torch.get_default_device())
    settings.append(torch.inference_mode(torch.is_inference_mode_enabled()))
    settings.append(torch.no_grad())
    dtype = torch.get_autocast_dtype(kind)
    enabled = torch.is_autocast_enabled(kind)
    settings.append(torch.autocast(kind, dtype, enabled, cache_enabled=False))
    return settings
