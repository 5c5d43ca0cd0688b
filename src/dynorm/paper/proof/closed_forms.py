"""The closed forms of dynorm: norms that are a DyISRU exactly, with constants that leave one channel out."""

from __future__ import annotations

from dynorm.paper.proof.statement import OURS, TOKEN, Statement, Step, chain

_SIGMA = r"$C > 1$, $\sigma > 0$"
_AROUND_MU, _AROUND_M = "others((x_k - mu)**2)", "others((x_k - m_i)**2)"

CLOSED_FORM_1 = Statement(
    name="closed-form-1",
    title="The constant of eq. 14 does not know its channel",
    source=OURS,
    equations="14",
    claim=r"$\beta_i = \frac{C-1}{C} \sum_{k \neq i} (x_k - m_i)^2 = \frac{(C-1)^2}{C} v_i$, free of $x_i$",
    assumes=r"$C > 1$; $m_i$ and $v_i$ are mean and biased variance of the $C - 1$ other channels",
    steps=(
        Step("Where the mean lies as seen from that of the others.", "mu - m_i", "1/C*(x_i - m_i)"),
        Step("The deviation from it.", "x_i - mu", "(C - 1)/C*(x_i - m_i)"),
        *chain(
            _AROUND_MU,
            (f"{_AROUND_M} + (C - 1)*(mu - m_i)**2", "Squares around another point than their mean."),
            (f"{_AROUND_M} + (C - 1)/C**2*(x_i - m_i)**2", "Put in."),
        ),
        *chain(
            "beta_i",
            (f"(C - 1)/C*{_AROUND_MU} - 1/C*(x_i - mu)**2", "Appendix A.4, before eq. 14."),
            (f"(C - 1)/C*({_AROUND_M} + (C - 1)/C**2*(x_i - m_i)**2) - 1/C*((C - 1)/C*(x_i - m_i))**2", "Put in."),
            (f"(C - 1)/C*{_AROUND_M}", "Both terms with $x_i$ cancel."),
            ("(C - 1)**2/C*v_i", "The definition of $v_i$."),
        ),
        Step("So it stays while $x_i$ moves.", "d(beta_i)", "0"),
        Step("And it is not negative.", "beta_i", "0", ">="),
        Step("$\\sigma_{\\neq i}$ does move: it is not the deviation of the others, but more.",
             "sigma_others**2", "v_i + 1/C**2*(x_i - m_i)**2"),
    ),
    definitions=TOKEN,
)  # fmt: skip

_DEVIATION = "(x_i - m_i)"

CLOSED_FORM_2 = Statement(
    name="closed-form-2",
    title="LayerNorm is a DyISRU",
    source=OURS,
    equations="3, 13, 14",
    claim=r"$\mathrm{LN}(x)_i = \sqrt{C-1}\,\frac{x_i - m_i}{\sqrt{C v_i + (x_i - m_i)^2}}$",
    assumes=_SIGMA + r"; with $\varepsilon$ inside the root, $\varepsilon > 0$",
    steps=(
        *chain(
            "y_i",
            ("sqrt(C - 1)*((x_i - mu)/sqrt(beta_i + (x_i - mu)**2))", "Theorem 4."),
            (f"sqrt(C - 1)*(((C - 1)/C*{_DEVIATION})/sqrt((C - 1)**2/C*v_i + ((C - 1)/C*{_DEVIATION})**2))",
             "closed-form-1."),
            (f"sqrt(C - 1)*({_DEVIATION}/sqrt(C*v_i + {_DEVIATION}**2))", "$\\frac{C-1}{C} > 0$ is taken out."),
        ),
        Step("Its derivative at constant $m_i$, $v_i$ is that of LayerNorm, as both stay while $x_i$ moves.",
             "d(y_i)", f"sqrt(C - 1)*(C*v_i)*(C*v_i + {_DEVIATION}**2)**(-3/2)"),
        Step("With $\\varepsilon$ inside LayerNorm's root the constant gains $\\frac{C^2}{C-1}\\,\\varepsilon$.",
             "(x_i - mu)/sqrt(sigma**2 + eps)",
             f"sqrt(C - 1)*({_DEVIATION}/sqrt(C*v_i + C**2/(C - 1)*eps + {_DEVIATION}**2))"),
        Step("$C \\varepsilon$, right for RMSNorm, would not do here.",
             "(x_i - mu)/sqrt(sigma**2 + eps)",
             f"sqrt(C - 1)*({_DEVIATION}/sqrt(C*v_i + C*eps + {_DEVIATION}**2))", "!="),
    ),
    definitions=TOKEN,
    numbers={"eps": "positive"},
)  # fmt: skip

CLOSED_FORM_3 = Statement(
    name="closed-form-3",
    title="RMSNorm is a DyISRU without a centre",
    source=OURS,
    equations="15",
    claim=r"$\mathrm{RMS}(x)_i = \sqrt{C}\,\frac{x_i}{\sqrt{s_i + x_i^2}}$ with $s_i = \sum_{k \neq i} x_k^2$",
    assumes=r"$C > 1$, x not 0, $\varepsilon > 0$",
    steps=(
        *chain(
            "RMS_i",
            ("x_i/sqrt(1/C*sum_k(x_k**2))", "The definition."),
            ("sqrt(C)*(x_i/sqrt(sum_k(x_k**2)))", "C is taken out of the root."),
            ("sqrt(C)*(x_i/sqrt(others(x_k**2) + x_i**2))", "$k = i$ is taken out of the sum."),
            ("sqrt(C)*(x_i/sqrt(s_i + x_i**2))", "The definition of $s_i$."),
        ),
        Step("The constant stays while $x_i$ moves.", "d(s_i)", "0"),
        Step("RMSNorm's derivative is eq. 5 with C for $C - 1$.", "d(RMS_i)", "1/(C*sqrt(MS))*(C - RMS_i**2)"),
        Step("With $\\varepsilon$ the constant gains $C \\varepsilon$.",
             "x_i/sqrt(MS + eps)", "sqrt(C)*(x_i/sqrt(s_i + C*eps + x_i**2))"),
    ),
    definitions={"MS": "sum_k(x_k**2) / C", "RMS_i": "x_i/sqrt(MS)", "s_i": "others(x_k**2)"},
    numbers={"eps": "positive"},
)  # fmt: skip


def _on_path(t: str) -> tuple[str, str, str]:
    """Return centre, constant and function at a place of the path."""
    middle = f"((1 - {t})*m_i + {t}*p)"
    constant = f"exp((1 - {t})*log(C*v_i) + {t}*log(beta))"
    return middle, constant, f"sqrt(C - 1)*((x_i - {middle})/sqrt({constant} + (x_i - {middle})**2))"


CLOSED_FORM_4 = Statement(
    name="closed-form-4",
    title="The path from LayerNorm to DyISRU",
    source=OURS,
    equations="3, 13",
    claim=r"With centre $(1-t)\,m_i + t\,p$ and $\log b = (1-t) \log(C v_i) + t \log \beta$, a DyISRU is LayerNorm at "
    r"$t = 0$ and uses no statistic at $t = 1$",
    assumes=r"$v_i > 0$, hence $C > 2$ and the other channels not all equal; $\beta > 0$ and the centre p are learned",
    steps=(
        Step("At $t = 0$ the centre is that of the others.", _on_path("0")[0], "m_i"),
        Step("And the constant theirs.", _on_path("0")[1], "C*v_i"),
        Step("So the function is LayerNorm, by closed-form-2.", _on_path("0")[2], "y_i"),
        Step("At $t = 1$ it is eq. 13 with learned constants.",
             _on_path("1")[2], "sqrt(C - 1)*((x_i - p)/sqrt(beta + (x_i - p)**2))"),
        Step("Whatever the constant $\\beta_t > 0$ and the deviation $z$ from the centre, the bound is the same.",
             "C - 1", "(sqrt(C - 1)*(z/sqrt(beta_t + z**2)))**2", ">"),
        Step("All along, its constants stay while $x_i$ moves.", f"d({_on_path('t')[1]})", "0"),
    ),
    definitions=TOKEN,
    numbers={"beta": "positive", "beta_t": "positive", "p": "real", "t": "positive", "z": "real"},
    least_channels=3,
)  # fmt: skip

CLOSED_FORM_5 = Statement(
    name="closed-form-5",
    title="A constant that needs no tuning",
    source=OURS,
    equations="15",
    claim=r"With $\beta_0 = C \sigma^2$ and scale $\sqrt{C}$, DyISRU has slope $1/\sigma$ at 0 and bound $\sqrt{C}$",
    assumes=r"$C > 1$; $\sigma > 0$ the deviation of a site's activations, a constant",
    steps=(
        Step("The slope at 0 is that of LayerNorm at a token of deviation $\\sigma$.",
             "limit(diff(sqrt(C)*x/sqrt(C*sigma**2 + x**2), x), x)", "1/sigma"),
        Step("The bound.", "C", "(sqrt(C)*x/sqrt(C*sigma**2 + x**2))**2", ">"),
        Step("With the scale $\\sqrt{C-1}$ of eq. 15 the slope is a little less.",
             "limit(diff(sqrt(C - 1)*x/sqrt(C*sigma**2 + x**2), x), x)", "sqrt((C - 1)/C)/sigma"),
        Step("That is, not $1/\\sigma$.",
             "limit(diff(sqrt(C - 1)*x/sqrt(C*sigma**2 + x**2), x), x)", "1/sigma", "!="),
    ),
    numbers={"sigma": "positive", "x": "positive"},
    remarks=(
        r"Scale and constant belong together: $\sqrt{C}$ with $\beta_0 = C\sigma^2$, "
        r"or $\sqrt{C-1}$ with $(C-1)\,\sigma^2$.",
    ),
)  # fmt: skip

STATEMENTS = (CLOSED_FORM_1, CLOSED_FORM_2, CLOSED_FORM_3, CLOSED_FORM_4, CLOSED_FORM_5)
