"""Look a point-wise layer up in a table: a function from int8 to int8 has 256 values.

The table equals the layer between a dequantization and a quantization, bit for bit. Here all
channels share one table of 256 bytes. A layer with a weight, a bias or constants per channel needs
one for each channel (`dynorm.fold_` removes weight and bias), and a layer with witnesses, whose
outputs depend on several channels, has no table.
"""

import torch
from torch import Tensor

import dynorm
from dynorm.quantize import observed_ranges, output_range, static_scale

CHANNELS = 64


def quantized(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the int8 codes of some values."""
    return ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)


def main() -> None:
    """Make the table of a layer, and compare its outputs with those of the layer."""
    torch.manual_seed(0)
    layer = dynorm.DyISRU(CHANNELS, elementwise_affine=False)
    model = torch.nn.Sequential(layer)
    batches = [torch.randn(16, CHANNELS) for _ in range(8)]
    dynorm.init_from_batch_(model, batches[0])
    low, high = observed_ranges(model, batches, inputs_of=["0"])["0"]
    input_scale, input_zero = static_scale(low.min(), high.max())
    low, high = output_range(layer)
    output_scale, output_zero = static_scale(low.min(), high.max())

    # Entry q + 128 is the output code of the input code q.
    inputs = (torch.arange(-128.0, 128.0) - input_zero) * input_scale
    with torch.no_grad():
        outputs = layer(inputs[:, None].expand(256, CHANNELS))[:, 0]
    table = quantized(outputs, output_scale, output_zero)
    print(f"the table of a layer with {CHANNELS} channels: {table.nbytes} bytes")

    codes = quantized(batches[0], input_scale, input_zero)
    looked_up = table[codes.long() + 128]
    with torch.no_grad():
        computed = layer((codes - input_zero.float()) * input_scale)
    if not torch.equal(looked_up, quantized(computed, output_scale, output_zero)):
        raise SystemExit("the table must equal the layer, bit for bit")
    y = (looked_up - output_zero.float()) * output_scale
    error = (y - layer(batches[0])).norm() / y.norm()
    print(f"int8 outputs, dequantized: {error:.1%} from the layer in float32")
    if error > 0.05:
        raise SystemExit("int8 must be near to the layer")


if __name__ == "__main__":
    main()
