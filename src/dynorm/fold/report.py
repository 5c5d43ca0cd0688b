"""What a fold did: a row a norm, and what it bought."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FOLDED, REFUSED, NOTHING, OFF = "folded", "refused", "nothing to fold", "off"


@dataclass(frozen=True)
class Rewrite:
    """What one of the three rewrites did at one site.

    Args:
        state: "folded", "refused", "nothing to fold", or "off" where it was not asked for.
        into: the parameters that took it over.
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
class FoldedSite:
    """What became of one norm or point-wise layer.

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

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values that JSON knows."""
        values = asdict(self)
        for name in ("affine", "center", "constants"):
            values[name]["into"] = list(values[name]["into"])
        return values


@dataclass(frozen=True)
class FoldReport:
    """What ``fold_`` did, a row a site.

    Args:
        sites: the norms and point-wise layers, in call order.
        added_biases: the modules that got a bias.
        untied: the parameters that were tied to others before.
        error: the largest relative error of the outputs on fresh inputs and the example, or None if not checked.
        tolerance: what was allowed.
        noise: of a half-precision model, its own error against float32.
        loads_with: "stock" if the model's own class loads the weights with the same result, else "dynorm".
        fresh: on how many inputs beside the example that was; 0 if the model takes no other, or was not checked.

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
        """The sum over the sites."""
        return sum(site.parameters_removed for site in self.sites)

    @property
    def operations_removed(self) -> int:
        """The sum over the sites."""
        return sum(site.operations_removed for site in self.sites)

    def count(self, rewrite: str, state: str = FOLDED) -> int:
        """Return how many sites have a rewrite ("affine", "center" or "constants") in a state."""
        return sum(getattr(site, rewrite).state == state for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values that JSON knows."""
        return {
            "sites": [site.to_dict() for site in self.sites],
            "added_biases": list(self.added_biases),
            "untied": list(self.untied),
            "error": self.error,
            "tolerance": self.tolerance,
            "noise": self.noise,
            "loads_with": self.loads_with,
            "fresh": self.fresh,
            "parameters_removed": self.parameters_removed,
            "operations_removed": self.operations_removed,
        }

    def __str__(self) -> str:
        """Return the report as a table."""
        lines = [
            f"{self._counted('affine')} affine maps folded, {self._counted('center')} means; "
            f"{self.parameters_removed:,} parameters and {self.operations_removed:,} operations less"
        ]
        for site in self.sites:
            lines.append(
                f"  {site.path}  {site.kind}({site.channels})" + (f" -> {site.becomes}" if site.becomes else "")
            )
            for name in ("affine", "center", "constants"):
                rewrite = getattr(site, name)
                if rewrite.state != OFF:
                    lines.append(f"    {name}: {rewrite}")
        if self.added_biases:
            lines.append(f"  biases added: {', '.join(self.added_biases)}")
        if self.untied:
            lines.append(f"  untied: {', '.join(self.untied)}")
        if self.error is not None:
            where = "on fresh inputs" if self.fresh else "on the example alone, as the model takes no other,"
            lines.append(f"  relative error {where} {self.error:.1e}, allowed {self.tolerance:.1e}")
        if self.sites and self.loads_with == "dynorm":
            lines.append("  loads where dynorm is imported: save it with dynorm.save")
        return "\n".join(lines)

    def _counted(self, rewrite: str) -> str:
        asked = [site for site in self.sites if getattr(site, rewrite).state in (FOLDED, REFUSED)]
        return f"{self.count(rewrite)} of {len(asked)}"
