"""Appendix B, ISRU, equations 30 to 32; and the identities of the LayerNorm note, its matrix form too."""

from __future__ import annotations

from dynorm.paper.proof.statement import NOTE, PAPER, Statement, Step, chain

_ISRU = "x/sqrt(1 + alpha*x**2)"

APPENDIX_B = Statement(
    name="appendix-b",
    title="Appendix B: the inverse square root unit",
    source=PAPER,
    equations="30-32",
    claim=r"$\frac{x}{\sqrt{1 + \alpha x^2}} = \frac{\sqrt{\beta}\,x}{\sqrt{\beta + x^2}}$ with $\beta = 1/\alpha$",
    assumes=r"$\alpha > 0$, x real",
    steps=(
        *chain(
            _ISRU,
            ("x/sqrt(alpha*(1/alpha + x**2))", "Eq. 30, $\\alpha$ taken out under the root."),
            ("1/sqrt(alpha) * (x/sqrt(1/alpha + x**2))", "The root of a product of positive numbers."),
            ("sqrt(beta)*x/sqrt(beta + x**2)", "Eq. 32: $\\beta = 1/\\alpha$.", "31"),
        ),
        Step("The constants are each other's inverse.", "alpha*beta", "1", tag="32"),
        Step("DyISRU is the ISRU but for the height: $\\sqrt{C-1}$ stands for $\\sqrt{\\beta}$.",
             "sqrt(C - 1)*(x/sqrt(beta + x**2))", "sqrt((C - 1)/beta)*(sqrt(beta)*x/sqrt(beta + x**2))"),
        Step("The slope of ISRU, 1 at 0.", f"diff({_ISRU}, x)", "(1 + alpha*x**2)**(-3/2)"),
        Step("Its height.", "beta", f"({_ISRU})**2", ">"),
    ),
    definitions={"beta": "1/alpha"},
    numbers={"alpha": "positive", "x": "real"},
)  # fmt: skip

_SHARED = {
    "mu": "sum_k(x_k) / C",
    "Var": "sum_k((x_k - mu)**2) / C",
    "MS": "sum_k(x_k**2) / C",
    "c_i": "sum_k(x_k*(delta_ki - 1/C))",
    "MS_c": "sum_k(sum_l(x_l*(delta_lk - 1/C))**2) / C",
}

CENTERING = Statement(
    name="note-centering",
    title="Centring is a projection",
    source=NOTE,
    equations="mean, c(x)",
    claim=r"$c(x) = x - \mu 1 = x\,(I - \frac{1}{C} 1^\top 1)$, and this matrix is its own square",
    assumes=r"C channels, x a row; entry (k, i) of the matrix is $\delta_{ki} - \frac{1}{C}$",
    steps=(
        *chain(
            "x_i - mu",
            ("x_i - 1/C*sum_k(x_k)", "The mean is $\\frac{1}{C}\\,x 1^\\top$."),
            ("sum_k(x_k*delta_ki) - sum_k(x_k*(1/C))", "$x_i$ is entry i of $x I$."),
            ("sum_k(x_k*(delta_ki - 1/C))", "Entry i of $x\\,(I - \\frac{1}{C} 1^\\top 1)$."),
        ),
        Step("The matrix is its own square: centring twice is centring once.",
             "sum_l((delta_kl - 1/C)*(delta_lj - 1/C))", "delta_kj - 1/C"),
        Step("It takes a constant row to 0.", "sum_k(delta_ki - 1/C)", "0"),
        Step("So what was centred has mean 0.", "sum_k(x_k - mu)", "0"),
        Step("Its trace is its rank: one dimension, the mean, is lost.", "sum_k(delta_kk - 1/C)", "C - 1"),
    ),
    definitions=_SHARED,
)  # fmt: skip

VARIANCE = Statement(
    name="note-variance",
    title="The variance is the mean of squares of what was centred",
    source=NOTE,
    equations="RMS, MS, Var",
    claim=r"$\mathrm{Var}(x) = \mathrm{MS}(c(x))$, $\mathrm{MS}(x) = \mathrm{RMS}(x)^2 = \|x\|^2 / C$",
    assumes="C channels, any x",
    steps=(
        Step("The root mean square is a norm over $\\sqrt{C}$.",
             "sqrt(1/C*sum_k(x_k**2))", "sqrt(sum_k(x_k**2)) / sqrt(C)"),
        Step("Its square is the mean of squares.", "(sqrt(sum_k(x_k**2)) / sqrt(C))**2", "MS"),
        *chain(
            "Var",
            ("1/C*sum_k((x_k - mu)**2)", "The definition."),
            ("1/C*sum_k(sum_l(x_l*(delta_lk - 1/C))**2)", "Each deviation is an entry of $c(x)$."),
            ("MS_c", "The definition of MS."),
        ),
        Step("It is what the mean takes from the mean of squares.", "Var", "MS - mu**2"),
    ),
    definitions=_SHARED,
)  # fmt: skip

_LAYER_NORM = "(x_i - mu)/sqrt(Var + eps)*gamma_i + bias_i"

AS_RMS_NORM = Statement(
    name="note-rmsnorm",
    title="LayerNorm is centring, then RMSNorm, then the bias",
    source=NOTE,
    equations="RMSNorm, LayerNorm",
    claim=r"$\mathrm{LayerNorm}(x) = \mathrm{RMSNorm}(c(x)) + \mathrm{bias}$",
    assumes=r"C channels, $\varepsilon > 0$ (or $\sigma > 0$), any weight $\gamma$ and bias",
    steps=chain(
        _LAYER_NORM,
        ("c_i/sqrt(Var + eps)*gamma_i + bias_i", "note-centering: $x_i - \\mu = c(x)_i$."),
        ("c_i/sqrt(MS_c + eps)*gamma_i + bias_i", "note-variance: $\\mathrm{Var}(x) = \\mathrm{MS}(c(x))$; "
         "what is left of the bias is RMSNorm of $c(x)$."),
    ),
    definitions=_SHARED,
    numbers={"eps": "positive"},
)  # fmt: skip

MATRIX_FORM = Statement(
    name="note-matrix",
    title="LayerNorm in matrix form",
    source=NOTE,
    equations="LayerNorm",
    claim=r"$\mathrm{LayerNorm}(x) = \frac{x}{\sqrt{\mathrm{Var}(x) + \varepsilon}}"
    r"\,(I - \frac{1}{C} 1^\top 1)\,\mathrm{diag}(\gamma) + \mathrm{bias}$",
    assumes=r"as in note-rmsnorm; entry (l, j) of $\mathrm{diag}(\gamma)$ is $\delta_{lj}\,\gamma_j$",
    steps=(
        Step("The product of both matrices, entry by entry.",
             "sum_l((delta_kl - 1/C)*(delta_lj*gamma_j))", "(delta_kj - 1/C)*gamma_j"),
        *chain(
            "sum_k(x_k/sqrt(Var + eps)*sum_l((delta_kl - 1/C)*(delta_li*gamma_i))) + bias_i",
            ("sum_k(x_k/sqrt(Var + eps)*((delta_ki - 1/C)*gamma_i)) + bias_i", "The product before, at $j = i$."),
            ("1/sqrt(Var + eps)*sum_k(x_k*(delta_ki - 1/C))*gamma_i + bias_i",
             "The division, the one step that is not linear, is the same for all channels."),
            (_LAYER_NORM, "note-centering."),
        ),
    ),
    definitions=_SHARED,
    numbers={"eps": "positive"},
)  # fmt: skip

STATEMENTS = (APPENDIX_B, CENTERING, VARIANCE, AS_RMS_NORM, MATRIX_FORM)
