"""Notice whether the weights around the norms are still those of the conversion.

A converted model can run with its old norms, but that is the original only while all other weights
are as they were. So ``convert_`` leaves a checksum of each parameter on the module that holds it.
The checksums are not saved with the model, but copied and pickled with its modules.
"""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import replaced_by

_RECORD = "_dynorm_weights"
# Checksums are of about this many values of a parameter, at even distances: at least one of each
# row of an embedding with 65,536 tokens.
_SAMPLED = 1 << 16

# For each parameter of a module, its checksums; None if it is not compared.
Record = dict[str, frozenset[int] | None]


def remember_weights_(model: nn.Module) -> None:
    """Keep the checksums of all weights outside the point-wise layers.

    Modules that have a record keep it, if another norm of the model was replaced before.
    """
    for module in model.modules():
        if isinstance(module, PointwiseNorm) or _RECORD in module.__dict__:
            continue
        record: Record = {}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                record[name] = checksums(parameter)
        module.__dict__[_RECORD] = record


def forget_weights_(model: nn.Module) -> None:
    """Drop the checksums, unless a layer of the model can still be restored."""
    if any(replaced_by(module) is not None for module in model.modules()):
        return
    for module in model.modules():
        module.__dict__.pop(_RECORD, None)


@contextmanager
def exact_edit(model: nn.Module) -> Iterator[None]:
    """Take the weights after an edit as those of the conversion, if those before it were."""
    was_changed = bool(changed_weights(model))
    yield
    if was_changed:
        return
    is_recorded = any(_RECORD in module.__dict__ for module in model.modules())
    for module in model.modules():
        module.__dict__.pop(_RECORD, None)
    if is_recorded:
        remember_weights_(model)


def hand_over_record_(new: nn.Module, before: nn.Module) -> None:
    """Give a module that dynorm puts in the place of another one the record of that one.

    Its weight is not compared any more, because it has another layout.
    """
    record = before.__dict__.get(_RECORD)
    if record is not None:
        new.__dict__[_RECORD] = {**record, "weight": None}


def changed_weights(model: nn.Module) -> list[str]:
    """Return the names of the parameters that changed since the conversion, or were added.

    Casts to bfloat16, float16, float32 and float64 are not changes. Parameters on the meta device,
    sharded or quantized ones are not compared.
    """
    names = []
    for path, module, record in _recorded_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if name in record:
                is_changed = differs(parameter, record[name])
            else:
                # An adapter, or a new head: if it can be trained, it may have been.
                is_changed = parameter.requires_grad and _is_comparable(parameter)
            if is_changed:
                names.append(f"{path}.{name}".lstrip("."))
    return names


def require_same_weights(model: nn.Module, remedy: str) -> None:
    """Refuse a model whose old norms no longer make it the original."""
    changed = changed_weights(model)
    if changed:
        verb = "parameter was" if len(changed) == 1 else "parameters were"
        raise ModelError(
            "the model with its old norms must still be the original, but "
            f"{len(changed)} {verb} changed or added outside its layers since convert_, for "
            f"example by training (the first is {changed[0]!r}): {remedy}"
        )


def _recorded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Record]]:
    """Yield the modules with records, and with an empty record the new ones inside of them."""
    inside: set[nn.Module] = set()
    # A parent comes before its children.
    for path, module in model.named_modules():
        if isinstance(module, PointwiseNorm):
            continue
        record = module.__dict__.get(_RECORD)
        if record is None and module not in inside:
            continue
        inside.update(module.children())
        yield path, module, record or {}


def _is_comparable(parameter: Tensor) -> bool:
    """Return whether a parameter holds plain floating point values."""
    tensor = parameter.detach()
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return False
    # One byte is a weight quantized to float8.
    return tensor.is_floating_point() and tensor.element_size() > 1


def _values(parameter: Tensor, *, complete: bool) -> Tensor:
    """Return a parameter's values, or without ``complete`` a sample of them, in float32."""
    flat = parameter.detach().reshape(-1)
    step = 1 if complete else max(flat.numel() // _SAMPLED, 1)
    return flat[::step].to("cpu", torch.float32)


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.contiguous().numpy().tobytes())


def checksums(parameter: Tensor, *, complete: bool = False) -> frozenset[int] | None:
    """Return the checksums of a parameter's values as they are, and rounded by casts.

    They are of a sample of the values; with ``complete`` of all.
    """
    if not _is_comparable(parameter):
        return None
    values = _values(parameter, complete=complete)
    in_bfloat16 = values.bfloat16()
    casts = [
        values,
        in_bfloat16.float(),
        values.half().float(),
        in_bfloat16.half().float(),
    ]
    return frozenset(_checksum(cast) for cast in casts)


def differs(parameter: Tensor, expected: Collection[int] | None, *, complete: bool = False) -> bool:
    """Return whether a parameter differs from that of the checksums; False if not comparable."""
    if expected is None or not _is_comparable(parameter):
        return False
    return _checksum(_values(parameter, complete=complete)) not in expected
