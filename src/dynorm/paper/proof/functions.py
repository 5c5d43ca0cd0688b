"""The functions of dynorm that the statements speak of, each beside the formula of x_i that it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dynorm import functional, theory

Function = Callable[[Tensor, Any], Tensor]
"""Computes a formula for all channels of a token x; the second argument has the free numbers, gamma and bias."""

# Centre and constant of the annealed function.
_MIDDLE, _CONSTANT = "((1 - t)*m_i + t*p)", "exp((1 - t)*log(C*v_i) + t*log(beta))"


def _centering(x: Tensor) -> Tensor:
    return functional.centering_matrix(len(x), dtype=x.dtype)


def _slope_by_integrand(x: Tensor) -> Tensor:
    """Return the derivative of the integral over y, as it is meant, divided by what was integrated."""
    n = len(x) - 1
    y = math.sqrt(n) * torch.sigmoid(x)
    slope: Tensor = torch.func.vmap(torch.func.grad(lambda y: -torch.log(n * y**-2 - 1) / (2 * n)))(y)
    return slope * (n * y - y**3)


def _with_witnesses(x: Tensor, n: Any) -> Tensor:
    chosen = n.g.nonzero().flatten()
    gain = n.g[chosen] if len(chosen) else None
    return functional.dyisru_general(x, n.beta, n.p, scale=n.s, witnesses=chosen, gain=gain)


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, eps=0.0)


FUNCTIONS: dict[str, Mapping[str, Function]] = {
    "reduction": {
        "x_i - mu": lambda x, n: functional.center(x),
        "sigma**2": lambda x, n: x.var(correction=0),
        "m_i": lambda x, n: theory.leave_one_out_mean(x),
        "v_i": lambda x, n: theory.leave_one_out_variance(x),
    },
    "theorem-1": {
        "y_i": lambda x, n: _norm(x),
        "F*(C - 1 - y_i**2)": lambda x, n: theory.layer_norm_derivative(x),
        "sigma": lambda x, n: x.std(correction=0),
    },
    "equation-7": {
        "sqrt(C - 1)": lambda x, n: _norm(torch.diag(x.abs() + 1)).diagonal(),
        "-sqrt(C - 1)": lambda x, n: _norm(-torch.diag(x.abs() + 1)).diagonal(),
    },
    "equation-8": {"F": lambda x, n: theory.layer_norm_slope_factor(x)},
    "theorem-2": {
        "sqrt(C - 1)*tanh(alpha*x_i/C)": lambda x, n: functional.scaled_dyt(x, math.sqrt(len(x) - 1) * n.F / len(x)),
        "tanh(alpha*x_i/C)": lambda x, n: functional.dyt(x, math.sqrt(len(x) - 1) * n.F / len(x)),
    },
    "theorem-3": {"Y": lambda x, n: functional.dyisru_general(x, n.beta, x.mean())},
    "theorem-4": {
        "beta_i": lambda x, n: theory.channel_beta(x),
        "y_i": lambda x, n: functional.dyisru_general(x, theory.channel_beta(x).clamp(min=1e-300), x.mean()),
    },
    "equation-15": {
        "sqrt(C - 1)*(x_i - mu)/sqrt(beta + (x_i - mu)**2)": lambda x, n: functional.dyisru_general(x, n.beta, n.mu),
        "sqrt(C - 1)*x_i/sqrt(beta + x_i**2)": lambda x, n: functional.dyisru(x, n.beta),
    },
    "appendix-b": {
        "x_i/sqrt(1 + alpha*x_i**2)": lambda x, n: functional.isru(x, n.alpha),
        "sqrt(beta)*x_i/sqrt(beta + x_i**2)": lambda x, n: functional.dyisru(x, 1 / n.alpha, scale=n.alpha**-0.5),
    },
    "note-centering": {
        "x_i - mu": lambda x, n: functional.center(x),
        "c_i": lambda x, n: x @ _centering(x),
        "x_i - sum_k(x_k)/C": lambda x, n: x @ _centering(x) @ _centering(x),
    },
    "note-variance": {
        "Var": lambda x, n: x.var(correction=0),
        "MS - mu**2": lambda x, n: functional.mean_square(functional.center(x)),
        "sqrt(MS)": lambda x, n: functional.rms(x),
    },
    "note-rmsnorm": {
        "(x_i - mu)/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: torch.nn.functional.layer_norm(
            x, x.shape, n.gamma, n.bias, n.eps
        ),
        "c_i/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: (
            functional.rms_norm(functional.center(x), n.gamma, None, n.eps) + n.bias
        ),
    },
    "note-matrix": {
        "(x_i - mu)/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: functional.layer_norm(x, n.gamma, n.bias, n.eps),
        "c_i/sqrt(Var + eps)*gamma_i + bias_i": lambda x, n: (
            x / (x.var(correction=0) + n.eps).sqrt() @ (_centering(x) * n.gamma) + n.bias
        ),
    },
    "closed-form-1": {
        "beta_i": lambda x, n: theory.channel_beta(x),
        "v_i": lambda x, n: theory.leave_one_out_variance(x),
    },
    "closed-form-2": {
        "y_i": lambda x, n: theory.layer_norm_as_dyisru(x),
        "(x_i - mu)/sqrt(sigma**2 + eps)": lambda x, n: theory.layer_norm_as_dyisru(x, n.eps),
        "(x_i - mu)/sqrt(eps + sigma**2)": lambda x, n: functional.dyisru_general(
            x, theory.leave_one_out_beta(x, eps=n.eps).detach(), theory.leave_one_out_mean(x).detach()
        ),
    },
    "closed-form-3": {
        "RMS_i": lambda x, n: theory.rms_norm_as_dyisru(x),
        "x_i/sqrt(MS)": lambda x, n: functional.rms_norm(x, eps=0.0),
        "x_i/sqrt(MS + eps)": lambda x, n: theory.rms_norm_as_dyisru(x, n.eps),
    },
    "closed-form-4": {
        f"sqrt(C - 1)*((x_i - {_MIDDLE})/sqrt({_CONSTANT} + (x_i - {_MIDDLE})**2))": lambda x, n: (
            functional.dyisru_general(
                x,
                theory.leave_one_out_beta(x) ** (1 - n.t) * n.beta**n.t,
                (1 - n.t) * theory.leave_one_out_mean(x) + n.t * n.p,
            )
        )
    },
    "closed-form-5": {
        "sqrt(C)*x_i/sqrt(C*sigma**2 + x_i**2)": lambda x, n: functional.dyisru(
            x, theory.closed_form_beta(n.sigma**2, len(x)), scale=math.sqrt(len(x))
        )
    },
    "witness-none": {
        "sqrt(C - 1)*((x_i - p)/sqrt(beta + (x_i - p)**2))": lambda x, n: functional.dyisru_general(
            x, n.beta, n.p, witnesses=torch.arange(0)
        ),
        "sqrt(C - 1)*(x_i/sqrt(beta + x_i**2))": lambda x, n: functional.dyisru(x, n.beta, witnesses=torch.arange(0)),
    },
    "witness-all": {
        "x_i/sqrt(MS + eps)": lambda x, n: theory.rms_norm_by_witnesses(x, n.eps),
        "(x_i - mu)/sqrt(sigma**2 + eps)": lambda x, n: theory.rms_norm_by_witnesses(functional.center(x), n.eps),
    },
    "witness-derivative": {"y_i": _with_witnesses},
    "misprint-first-version": {"1": lambda x, n: _slope_by_integrand(x)},
    "misprint-note": {"x_i - mu": lambda x, n: x @ (torch.eye(len(x)).double() - 1 / len(x))},
}
"""For each statement, what to compare: values and automatic derivatives."""
