"""The one table of the family: every point-wise function with its names, its layers and its kernel.

A new function f takes one row here, and the parts that the row names: its formula in
``functional.py``, its layer in a file of ``layers/`` (and in ``annealed.py``), and its kernel, a
functor in ``kernels/csrc/functions.h`` and a branch in ``_triton_functions.py``. Its number is in
``FunctionCode`` of ``_form.py``, and the same in ``csrc/types.h``. Its colours
are in ``report/colours.py``. Converting, saved folders and the titles of reports read this table.
"""

from dataclasses import dataclass

from dynorm import layers
from dynorm.errors import ArgumentError
from dynorm.layers import annealed


@dataclass(frozen=True)
class Function:
    """One row of the table."""

    name: str  # in code, in saved folders and on the command line
    title: str  # in prose, tables and pictures
    layer: type[layers.PointwiseNorm]
    annealed: type[layers.AnnealedNorm]  # begins as a norm and ends as that layer

    @property
    def annealed_name(self) -> str:
        """Return the name of the annealed layer; DyISRU's is the short one."""
        if self.layer is layers.DyISRU:
            return "annealed"
        return f"annealed_{self.name}"


FAMILY: dict[str, Function] = {
    row.name: row
    for row in (
        Function("dyisru", "DyISRU", layers.DyISRU, annealed.AnnealedDyISRU),
        Function("dyt", "DyT", layers.DyT, annealed.AnnealedDyT),
        Function("derf", "Derf", layers.Derf, annealed.AnnealedDerf),
        Function("linear", "linear", layers.LinearControl, annealed.AnnealedLinear),
    )
}
"""The functions by name."""

LAYERS: dict[str, type[layers.PointwiseNorm]] = {row.name: row.layer for row in FAMILY.values()} | {
    row.annealed_name: row.annealed for row in FAMILY.values()
}
"""The layers by the name that ``convert_`` takes and that saved folders hold."""

NAMES: dict[type, str] = {layer: name for name, layer in LAYERS.items()}  # the names by layer


def layer_class(name: str) -> type[layers.PointwiseNorm]:
    """Return the layer of a name."""
    if not isinstance(name, str) or name not in LAYERS:
        raise ArgumentError(
            f'the layer must be one of {", ".join(LAYERS)}, got {name!r}: or "keep", which leaves the '
            'norm, and for convert_model and `dynorm convert` "none", which removes it'
        )
    return LAYERS[name]
