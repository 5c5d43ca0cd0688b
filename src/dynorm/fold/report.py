"""The report of a fold: one row per norm, and its savings."""

from dataclasses import dataclass, field
from typing import Any

from dynorm.table import Plain, Table

FOLDED, REFUSED, NOTHING, OFF = "folded", "refused", "nothing to fold", "off"
_REWRITES = ("affine", "center", "constants", "redundant")


@dataclass(frozen=True)
class Rewrite:
    """The outcome of one rewrite at one site.

    Args:
        state: "folded", "refused", "nothing to fold", or "off" where the caller did not want it.
        into: the parameters that took it over, or "the stream" where all of one was rescaled.
        reason: why it was refused.

    Example:
        >>> print(Rewrite("folded", ("q.weight", "k.weight")))
        folded into q.weight, k.weight
    """

    state: str
    into: tuple[str, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        """Return it in a few words."""
        if self.state == FOLDED:
            more = f" and {len(self.into) - 3} more" if len(self.into) > 3 else ""
            return f"folded into {', '.join(self.into[:3])}{more}"
        return f"refused: {self.reason}" if self.reason else self.state


@dataclass(frozen=True)
class FoldedSite(Plain):
    """One norm or point-wise layer after a fold.

    Args:
        path: its path.
        kind: "layernorm", "rmsnorm", or the layer's name in small letters.
        channels: how many there are.
        affine: its weight and bias, into its readers.
        center: the mean, out of its stream.
        constants: the scale and the learned centre of a point-wise layer.
        parameters_removed: numbers that the model no longer holds, or holds as ones and zeros.
        operations_removed: operations on numbers that one call of the example no longer takes.
        becomes: the class that stands there now.
        redundant: the whole norm, where it feeds only norms, which ``into`` names.
        change: the largest relative change of their outputs by that, for tokens as large as the
            example's.
    """

    path: str
    kind: str
    channels: int
    affine: Rewrite
    center: Rewrite
    constants: Rewrite
    parameters_removed: int = 0
    operations_removed: int = 0
    becomes: str = ""
    redundant: Rewrite = Rewrite(OFF)
    change: float = 0.0


@dataclass(frozen=True)
class FoldReport(Plain):
    """The outcome of ``fold_``, one row per site.

    Args:
        sites: the norms and point-wise layers, in call order.
        added_biases: the modules that got a bias.
        untied: the parameters that were tied to others before.
        error: the largest relative error of the outputs on fresh inputs and the example, or None if
            not checked.
        tolerance: the error that was allowed.
        noise: of a half-precision model, its own error against float32.
        loads_with: "stock" if the model's own class loads the weights with the same result, else
            "dynorm".
        fresh: on how many inputs beside the example that was; 0 if the model takes no other, or was
            not checked.

    Example:
        >>> print(FoldReport([], [], []))
        0 of 0 affine maps folded, 0 of 0 means; 0 parameters and 0 operations less
    """

    sites: list[FoldedSite]
    added_biases: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)
    error: float | None = None
    tolerance: float | None = None
    noise: float | None = None
    loads_with: str = "stock"
    fresh: int = 0

    @property
    def parameters_removed(self) -> int:
        """Return the sum over the sites."""
        return sum(site.parameters_removed for site in self.sites)

    @property
    def operations_removed(self) -> int:
        """Return the sum over the sites."""
        return sum(site.operations_removed for site in self.sites)

    def count(self, rewrite: str, state: str = FOLDED) -> int:
        """Return how many sites have a rewrite ("affine", "center", "constants" or "redundant") in a state."""
        return sum(getattr(site, rewrite).state == state for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows."""
        sums = {
            "parameters_removed": self.parameters_removed,
            "operations_removed": self.operations_removed,
        }
        return super().to_dict() | sums

    def table(self) -> Table:
        """Return the report as a table: one row per site, the reasons of its refusals as numbered notes."""
        reasons: dict[str, int] = {}
        rows = []
        for site in self.sites:
            cells = [
                site.path,
                f"{site.kind}({site.channels})" + (f" -> {site.becomes}" if site.becomes else ""),
            ]
            for rewrite in (getattr(site, name) for name in self._wanted()):
                number = (
                    reasons.setdefault(rewrite.reason, len(reasons) + 1) if rewrite.reason else None
                )
                known = {NOTHING: "-", OFF: "-"}.get(rewrite.state, rewrite.state)
                cells.append(known if number is None else f"{known} ({number})")
            rows.append(cells)
        notes = [f"({number}) {reason}" for reason, number in reasons.items()]
        if self.added_biases:
            notes.append(f"biases added: {', '.join(self.added_biases)}")
        if self.untied:
            notes.append(f"untied: {', '.join(self.untied)}")
        if self.error is not None:
            where = (
                "on fresh inputs"
                if self.fresh
                else "on the example alone, as the model takes no other,"
            )
            notes.append(f"relative error {where} {self.error:.1e}, allowed {self.tolerance:.1e}")
        if changes := [site.change for site in self.sites if site.redundant.state == FOLDED]:
            notes.append(
                f"gone before other norms: {len(changes)}; those change by at most "
                f"{max(changes):.1e}"
            )
        if self.sites and self.loads_with == "dynorm":
            notes.append("loads where dynorm is imported: save it with dynorm.save")
        of = {
            name: f"{self.count(name)} of {self.count(name) + self.count(name, REFUSED)}"
            for name in _REWRITES
        }
        linear = [site.becomes == "Identity" for site in self.sites if site.kind == "linearcontrol"]
        title = f"{sum(linear)} of {len(linear)} linear layers gone; " if linear else ""
        title += (
            f"{of['affine']} affine maps folded, {of['center']} means; "
            f"{self.parameters_removed:,} parameters and {self.operations_removed:,} operations "
            "less"
        )
        return Table(["site", "norm", *self._wanted()], rows, notes, title)

    def __str__(self) -> str:
        """Return the report as plain text."""
        return str(self.table())

    def _wanted(self) -> list[str]:
        return [
            name
            for name in _REWRITES
            if any(getattr(site, name).state != OFF for site in self.sites)
        ]
