"""A statement and the steps of its proof, as sympy expressions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import sympy as sp
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.paper.proof.vocabulary import Expr, d

# A function of a token x, and of the numbers of the statement by name.
Computed = Callable[[Tensor, SimpleNamespace], Tensor]

PAPER = (
    "The Mathematical Relationship Between Layer Normalization and Dynamic Activation Functions "
    "(2503.21708)"
)
NOTE_SOURCE = "The note: LayerNorm is centring, then RMSNorm, then the bias"
OURS = "dynorm, beyond the sources"

_RELATIONS = {sp.Eq: "=", sp.Ne: "!=", sp.Ge: ">=", sp.Gt: ">"}


@dataclass(frozen=True)
class Step:
    """One link of a proof: two formulas and the relation between them."""

    left: Expr
    relation: str  # "=", ">=", ">" or "!="
    right: Expr
    reason: str  # in words; a formula between dollar signs is LaTeX
    tag: str = ""  # the equation's number in the source, if it has one
    # Whether ``left`` is the ``right`` of the previous step, so that it need not be shown again.
    follows: bool = False
    # Whether symbolic sums prove it. All other steps may contain only means and variances, which
    # the statement "reduction" replaces.
    by_sums: bool = False


@dataclass(frozen=True)
class Comparison:
    """A formula, and a function of dynorm that computes it for all channels of a token."""

    formula: Expr
    derivative: Expr
    computed: Computed


@dataclass
class Statement:
    """A theorem, an equation or an identity, with its proof.

    Build one inside :func:`~dynorm.paper.proof.vocabulary.as_written`: first its words and
    definitions, then one call of :meth:`step` or :meth:`then` per step and one of :meth:`compare`
    per function of dynorm. The words may contain LaTeX between dollar signs.

    Example:
        >>> from sympy import Eq
        >>> from dynorm.paper.proof.prove import check
        >>> from dynorm.paper.proof.vocabulary import as_written, positive, x_i
        >>> with as_written():
        ...     a = positive("a")
        ...     statement = Statement(
        ...         "scaling", "Scaling", "example", "1", "Squares scale with $a^2$", "$a > 0$"
        ...     )
        ...     statement.step(Eq((a * x_i) ** 2, a**2 * x_i**2), "The square of a product.")
        ...     statement.compare((a * x_i) ** 2, lambda x, at: (at.a * x).square())
        >>> check(statement).holds
        True
    """

    name: str  # short, for the command line
    title: str
    source: str
    equations: str  # numbers of the equations that it covers, as the source counts them
    claim: str
    assumes: str  # the conditions under which it holds
    # Symbols that abbreviate formulas; a formula may use the symbols before it.
    definitions: dict[Expr, Expr] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    least_channels: int = 2  # the smallest C that it covers
    steps: list[Step] = field(default_factory=list)
    compared: list[Comparison] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Reject a definition that uses a later one, which the proofs would take for a number."""
        later = set(self.definitions)
        for symbol, formula in self.definitions.items():
            if later & symbols_in(formula):
                raise ArgumentError(
                    f"a definition of {self.name} must use only those before it, but {symbol} "
                    "uses a later one or itself: reorder them"
                )
            later.remove(symbol)

    def step(
        self,
        claim: Expr,
        reason: str,
        *,
        tag: str = "",
        by_sums: bool = False,
    ) -> None:
        """Add a step: ``sympy.Eq``, ``Ne``, ``Ge`` or ``Gt`` of two formulas, and why it holds."""
        if type(claim) not in _RELATIONS:
            raise ArgumentError(
                f"a step of {self.name} must be an Eq, Ne, Ge or Gt built with as_written(), "
                f"got {claim}"
            )
        if by_sums and not isinstance(claim, sp.Eq):
            raise ArgumentError(f"sums can prove only an Eq, got {claim}: leave out by_sums")
        relation = _RELATIONS[type(claim)]
        self._add(Step(claim.lhs, relation, claim.rhs, reason, tag, by_sums=by_sums))

    def then(self, right: Expr, reason: str, *, tag: str = "") -> None:
        """Add a step that goes on from the right side of the one before: it equals ``right``."""
        left = self.steps[-1].right
        right = sp.sympify(right)
        self._add(Step(left, "=", right, reason, tag, follows=True))

    def compare(self, formula: Expr, computed: Computed) -> None:
        """Add a function of dynorm that computes a formula for all channels of a token.

        ``computed`` gets the token x and, as attributes, C and all other vectors and numbers of the
        statement by name.
        """
        formula = sp.sympify(formula)
        self.compared.append(Comparison(formula, d(formula), computed))

    def _add(self, step: Step) -> None:
        for formula in (step.left, step.right):
            if formula.has(sp.Float):
                raise ArgumentError(
                    f"numbers of a formula must be exact, got {formula} in {self.name}: "
                    "write Rational(1, 2), not 1/2"
                )
        self.steps.append(step)

    @property
    def formulas(self) -> list[Expr]:
        """All formulas: of the definitions, the steps and the comparisons."""
        formulas = list(self.definitions.values())
        for step in self.steps:
            formulas += [step.left, step.right]
        for comparison in self.compared:
            formulas.append(comparison.formula)
        return formulas


def symbols_in(formula: Expr) -> set[object]:
    """Return the symbols of a formula; not the indices and the vectors of its channels."""
    symbols = set()
    parts = sp.preorder_traversal(formula)
    for part in parts:
        if isinstance(part, sp.Tuple | sp.Indexed | sp.KroneckerDelta):
            parts.skip()
        elif isinstance(part, sp.Symbol):
            symbols.add(part)
    return symbols
