"""The report of a fold: one row per norm."""

from dataclasses import dataclass, field

from dynorm.plain import Plain
from dynorm.site import NormSite
from dynorm.table import Table

FOLDED, REFUSED = "folded", "refused"
NOTHING, OFF = "nothing to fold", "off"
_REWRITES = ("affine", "center")


@dataclass(frozen=True)
class Rewrite:
    """The outcome of one rewrite at one site.

    Args:
        state: "folded", "refused", "nothing to fold", or "off" if the caller did not want it.
        into: the parameters that took it over.
        reason: why it stays.

    Example:
        >>> Rewrite("folded", ("q.weight", "k.weight")).into
        ('q.weight', 'k.weight')
    """

    state: str
    into: tuple[str, ...] = ()
    reason: str | None = None


NOT_WANTED = Rewrite(OFF)


@dataclass(frozen=True)
class FoldedSite(Plain):
    """One norm or point-wise layer after a fold.

    Args:
        path: its path.
        kind: "layernorm", "rmsnorm", or the layer's name in small letters.
        channels: how many there are.
        affine: its weight and bias, into its readers; with them the scale of a point-wise layer.
        center: the mean, out of its stream.
        becomes: the class that is there now.
    """

    path: str
    kind: str
    channels: int
    affine: Rewrite
    center: Rewrite
    becomes: str = ""


@dataclass(frozen=True)
class FoldReport(Plain):
    """The outcome of ``fold_``, one row per site.

    Args:
        sites: the norms in call order, then the point-wise layers in the order of the modules.
        added_biases: the modules that got a bias.
        untied: the parameters that were tied to others before.
        error: the largest relative error of the outputs on fresh inputs and the example, or None if
            not checked.
        tolerance: the error that was allowed.
        noise: the error of a half-precision model against float32.
        loads_with: "stock" if the model's own class loads the weights with the same result, else
            "dynorm".
        fresh: on how many inputs the outputs were compared, in addition to the example; 0 if the model
            takes no other, or was not checked.
        norms: the norms that are left, as :func:`find_norms` would find them, for
            :func:`convert_`.

    Example:
        >>> print(FoldReport([], [], []))
        no affine map or mean to fold
    """

    sites: list[FoldedSite]
    added_biases: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    error: float | None = None
    tolerance: float | None = None
    noise: float | None = None
    loads_with: str = "stock"
    fresh: int = 0
    norms: list[NormSite] = field(default_factory=list)

    @property
    def lines(self) -> list[FoldedSite]:
        """The sites that are lines, or were."""
        return [site for site in self.sites if site.kind == "linearcontrol"]

    def count(self, rewrite: str, state: str = FOLDED) -> int:
        """Return how many sites have a rewrite, "affine" or "center", in a state."""
        return sum(getattr(site, rewrite).state == state for site in self.sites)

    def table(self) -> Table:
        """Return the report as a table, one row per site, with the reasons of refusals as notes."""
        wanted = []
        for name in _REWRITES:
            if any(getattr(site, name).state != OFF for site in self.sites):
                wanted.append(name)
        reasons: list[str] = []
        rows = []
        for site in self.sites:
            norm = f"{site.kind}({site.channels})"
            if site.becomes:
                norm += f" -> {site.becomes}"
            cells = [site.path, norm]
            for name in wanted:
                outcome: Rewrite = getattr(site, name)
                cell = "-" if outcome.state in (NOTHING, OFF) else outcome.state
                if outcome.reason:
                    if outcome.reason not in reasons:
                        reasons.append(outcome.reason)
                    cell += f" ({reasons.index(outcome.reason) + 1})"
                cells.append(cell)
            rows.append(cells)
        notes = [f"({number}) {reason}" for number, reason in enumerate(reasons, start=1)]
        return Table(["site", "norm", *wanted], rows, notes + self._notes(), self._title())

    def summary(self) -> str:
        """Return the report without its table."""
        return "\n".join([self._title(), *self._notes()])

    def _notes(self) -> list[str]:
        notes = []
        if self.added_biases:
            notes.append(f"biases added: {', '.join(self.added_biases)}")
        if self.untied:
            notes.append(f"untied: {', '.join(self.untied)}")
        if self.error is not None:
            where = "on fresh inputs"
            if not self.fresh:
                where = "on the example only, because the model takes no other input,"
            notes.append(f"relative error {where} {self.error:.1e}, allowed {self.tolerance:.1e}")
        if self.sites and self.loads_with == "dynorm":
            notes.append("loads where dynorm is imported: save it with dynorm.save")
        return notes

    def _title(self) -> str:
        parts = []
        if self.lines:
            removed = sum(site.becomes == "Identity" for site in self.lines)
            parts.append(f"{removed} of {len(self.lines)} linear layers removed")
        for name, noun in (("affine", "affine maps"), ("center", "means")):
            folded = self.count(name)
            # An RMSNorm has no mean, and a norm that was folded before has no affine map.
            possible = folded + self.count(name, REFUSED)
            if possible:
                parts.append(f"{folded} of {possible} {noun} folded")
        return ", ".join(parts) or "no affine map or mean to fold"

    def __str__(self) -> str:
        """Return the report as plain text."""
        return str(self.table())
