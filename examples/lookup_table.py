"""Replace a point-wise layer by a lookup table: a function from int8 to int8 has only 256 values.

The table equals the layer between a dequantization and a quantization, bit for bit. Here all
channels share one table of 256 bytes. A layer with a weight, a bias or constants per channel needs
one table per channel (`dynorm.fold_` removes weight and bias). A layer with witnesses has no table,
because each output depends on several channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import dynorm

CHANNELS = 64


@dataclass
class Quantizer:
    """An int8 code q stands for the number ``(q - zero) * scale``."""

    scale: Tensor
    zero: Tensor

    def quantize(self, x: Tensor) -> Tensor:
        """Return the int8 codes of ``x``."""
        codes = (x / self.scale).round() + self.zero
        return codes.clamp(-128, 127).to(torch.int8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the numbers that the codes stand for."""
        return (codes - self.zero.float()) * self.scale


def quantizer_for(values: Tensor) -> Quantizer:
    """Return a quantizer for numbers in the range of some values, and 0."""
    low = values.min().clamp_max(0)
    high = values.max().clamp_min(0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    return Quantizer(scale, zero)


def main() -> None:
    """Make the table of a layer, and compare its outputs with those of the layer."""
    torch.manual_seed(0)
    layer = dynorm.DyISRU(CHANNELS, elementwise_affine=False)
    model = torch.nn.Sequential(layer)
    batches = [torch.randn(16, CHANNELS) for _ in range(8)]
    dynorm.init_from_batch_(model, batches[0])

    inputs = quantizer_for(torch.cat(batches))
    # Entry q + 128 is the output code of the input code q.
    every_input = inputs.dequantize(torch.arange(-128, 128))
    with torch.no_grad():
        every_output = layer(every_input[:, None].expand(256, CHANNELS))[:, 0]
    outputs = quantizer_for(every_output)
    table = outputs.quantize(every_output)
    print(f"the table of a layer with {CHANNELS} channels: {table.nbytes} bytes")

    codes = inputs.quantize(batches[0])
    looked_up = table[codes.long() + 128]
    with torch.no_grad():
        computed = outputs.quantize(layer(inputs.dequantize(codes)))
        exact = layer(batches[0])
    if not torch.equal(looked_up, computed):
        raise SystemExit("the table must equal the layer, bit for bit")

    y = outputs.dequantize(looked_up)
    error = (y - exact).norm() / y.norm()
    print(f"int8 outputs, dequantized: {error:.1%} from the layer in float32")
    if error > 0.05:
        raise SystemExit("the int8 outputs must be close to those of the layer")


if __name__ == "__main__":
    main()
