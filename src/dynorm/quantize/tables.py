"""A point-wise layer as a table: a function from int8 to int8 has 256 values."""

import torch
from torch import Tensor, nn

from dynorm.arguments import check_floating
from dynorm.errors import ArgumentError
from dynorm.layers import PointwiseNorm
from dynorm.quantize.bounds import Range, output_range, require_function, static_scale


class Int8Table(nn.Module):
    r"""A point-wise layer from int8 to int8: one look-up instead of its arithmetic.

    .. math:: q_y = T[q_x], \qquad T[q] = \mathrm{quantize}(f(\mathrm{dequantize}(q)))

    It equals the layer between a dequantization and a quantization, bit for bit. A floating point
    input is quantized first and the result dequantized, so that ``model.set_submodule(path,
    table)`` replaces the layer by the table. If all channels have the same parameters and ranges,
    the table has 256 bytes, otherwise 256 for each channel; :func:`dynorm.fold_` removes weight and
    bias from a layer.

    Args:
        layer: a point-wise layer without witnesses, which would make an output depend on several
            inputs.
        inputs: the least and the largest input: tensors of one number, or of ``normalized_shape``
            for one scale per channel. :func:`observed_ranges` with ``inputs_of`` measures them.
        outputs: the same of the output; None takes the bound over all channels, from
            :func:`output_range`.
        symmetric: as for :func:`static_scale`.

    Shape:
        input and output are those of the layer.

    Raises:
        ArgumentError: ``layer`` is not one of dynorm's, has witnesses, is annealed to t < 1, or has
            no bound and ``outputs`` is None; a range is empty, not finite, or of another number of
            channels.

    Example:
        >>> layer = dynorm.DyISRU(4, elementwise_affine=False)
        >>> table = Int8Table(layer, inputs=(torch.tensor(-8.0), torch.tensor(8.0)))
        >>> table(torch.tensor([-127, 0, 1, 127], dtype=torch.int8))
        tensor([-123,    0,    4,  123], dtype=torch.int8)
        >>> table.table.nbytes
        256
    """

    table: Tensor
    first: Tensor
    input_scale: Tensor
    input_zero: Tensor
    output_scale: Tensor
    output_zero: Tensor

    def __init__(
        self,
        layer: PointwiseNorm,
        inputs: Range,
        outputs: Range | None = None,
        *,
        symmetric: bool = True,
    ) -> None:
        super().__init__()
        require_function(layer)
        if layer.witness_channels:
            raise ArgumentError(
                f"layer must have no witnesses, got {layer.witness_channels}: a table holds a "
                "function of one number; keep the layer, or convert with witnesses=0"
            )
        self.shape = shape = layer.normalized_shape
        self.dims = layer.dims
        self.last = tuple(range(-len(shape), 0))
        if outputs is None:
            low, high = output_range(layer)
            outputs = (low.min(), high.max())
        for name, (low, high) in (("input", inputs), ("output", outputs)):
            if low.shape not in ((), shape):
                raise ArgumentError(
                    f"a range must be two numbers or of {shape}, got {tuple(low.shape)}"
                )
            low = low.detach().float().cpu()
            high = high.detach().float().cpu()
            scale, zero = static_scale(low, high, symmetric=symmetric)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_zero", zero)
        # The axes of 1 leave room for layers whose dims count from the front.
        room = [1] * max(abs(d) for d in self.dims)
        codes = torch.arange(-128.0, 128.0, device="cpu").reshape(256, *room, *[1] * len(shape))
        x = ((codes - self.input_zero) * self.input_scale).expand(256, *room, *shape)
        device = next(layer.parameters()).device
        with torch.no_grad():
            y = layer(x.movedim(self.last, self.dims).to(device))
        y = y.movedim(self.dims, self.last).cpu()
        # One row for each channel.
        table = _quantize(y, self.output_scale, self.output_zero).reshape(256, -1).T.contiguous()
        channels = shape
        if (table == table[:1]).all():
            table = table[:1]
            channels = ()
        self.register_buffer("table", table.flatten())
        # The index of the entry of code 0 in each row.
        first = 128 + 256 * torch.arange(len(table), device="cpu")
        self.register_buffer("first", first.reshape(channels))
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Look up each element: int8 for int8, or the input's own dtype.

        Raises:
            ArgumentError: ``x`` is neither int8 nor floating point, or its sizes are not the
                layer's.
        """
        sizes = tuple(x.shape[d] for d in self.dims if -x.ndim <= d < x.ndim)
        if sizes != self.shape:
            raise ArgumentError(
                f"x must have {self.shape} at dim {self.dims}, got {sizes}: give the layer's input"
            )
        x_last = x.movedim(self.dims, self.last)
        if x.dtype == torch.int8:
            return self.table[x_last.long() + self.first].movedim(self.last, self.dims)
        check_floating("x", x, "give int8, or convert it")
        codes = _quantize(x_last, self.input_scale, self.input_zero)
        y_codes = self.table[codes.long() + self.first]
        y = (y_codes - self.output_zero.float()) * self.output_scale
        return y.movedim(self.last, self.dims).to(x.dtype)


def _quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)
