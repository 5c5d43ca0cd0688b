"""Why one channel is enough: the rules by which sums over channels are reduced, proven with symbolic sums."""

from __future__ import annotations

from dynorm.paper.proof.statement import OURS, TOKEN, Statement, Step

_BODY = "p + q*x_k + r*x_k**2"

REDUCTION = Statement(
    name="reduction",
    title="What one channel sees of its token",
    source=OURS,
    equations="1, 2",
    claim=r"Every mean and variance of a token depends on $x_i$, C, $\sum_{k \neq i} x_k$ and "
    r"$\sum_{k \neq i} x_k^2$ alone, and the last two do not move with $x_i$",
    assumes=r"$C \geq 2$ an integer, $1 \leq i \leq C$; the first five steps are proven with sympy's own sums and "
    r"derivatives over symbolic bounds, and all other proofs rest on them. p, q and r are free of k",
    steps=(
        Step("A sum of polynomials of degree 2 is known from two sums.",
             f"sum_k({_BODY})", "C*p + q*sum_k(x_k) + r*sum_k(x_k**2)", rules="sums"),
        Step("So is the sum that leaves channel i out.",
             f"others({_BODY})", "(C - 1)*p + q*others(x_k) + r*others(x_k**2)", rules="sums"),
        Step("The whole sum moves with $x_i$ as fast as $x_i$.", "d(sum_k(x_k))", "1", rules="sums"),
        Step("The sum of squares moves as the one square does.", "d(sum_k(x_k**2))", "2*x_i", rules="sums"),
        Step("Without channel i, neither moves.", "d(others(p*x_k + q*x_k**2))", "0", rules="sums"),
        Step("In place of the two sums stand mean and variance of the other channels: any $m_i$ and any $v_i \\geq 0$.",
             "others(x_k)", "(C - 1)*m_i"),
        Step("The second sum; $v_i$ is a mean of squares, hence not negative.",
             "others(x_k**2)", "(C - 1)*(v_i + m_i**2)"),
        Step("The deviation from the mean of all is a part of that from the mean of the others.",
             "x_i - mu", "(C - 1)/C*(x_i - m_i)"),
        Step("The variance of all, of that of the others and one deviation.",
             "C*sigma**2", "(C - 1)*v_i + (C - 1)/C*(x_i - m_i)**2"),
    ),
    definitions=TOKEN,
    numbers={"p": "real", "q": "real", "r": "real"},
)  # fmt: skip

STATEMENTS = (REDUCTION,)
