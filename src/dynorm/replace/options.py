"""Choose the layer of each norm: its options, and globs that give different norms different ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from dynorm.arguments import MOST_WITNESSES, check_count, refuse_witnesses
from dynorm.errors import ArgumentError
from dynorm.family import layer_class
from dynorm.layers import AnnealedNorm, DyISRU, PointwiseNorm
from dynorm.site import NormSite, require_matches

Target = str | Mapping[str, str | Mapping[str, Any]]
"""The name of one layer for all norms, or names or options by the globs of the paths of norms."""

REST = "*"
"""The glob of the norms that no other glob matches."""
KEEP = "keep"
"""In the place of a layer: the norms stay."""


@dataclass(frozen=True)
class LayerOptions:
    """The layer in the place of a norm, as the arguments of ``convert_`` describe it.

    Example:
        >>> LayerOptions(witnesses=2).changed({"witnesses": 4})
        LayerOptions(to='dyisru', witnesses=4)
    """

    to: str = "dyisru"
    witnesses: int = 0

    @property
    def kind(self) -> type[PointwiseNorm]:
        """The class of the layer."""
        return layer_class(self.to)

    @property
    def is_annealed(self) -> bool:
        """Whether the layer is a norm until its annealing ends."""
        return issubclass(self.kind, AnnealedNorm)

    def changed(self, choice: str | Mapping[str, Any]) -> LayerOptions:
        """Return the checked options with another layer, or with other values of some."""
        if isinstance(choice, str):
            choice = {"to": choice}
        known = [field.name for field in fields(self)]
        if not isinstance(choice, Mapping):
            raise ArgumentError(
                f'a glob must have the name of a layer, a mapping of options, "{KEEP}", which leaves '
                f'its norms, or for convert_model "none", which removes them, got {choice!r}: the '
                f"options are {', '.join(known)}"
            )
        require_known(choice, known, "a site")
        options = replace(self, **choice)
        options.check()
        return options

    def check(self) -> None:
        """Check every value, or raise ArgumentError."""
        # An unknown layer has no class.
        _ = self.kind
        if check_count("witnesses", self.witnesses, 0) > MOST_WITNESSES:
            raise ArgumentError(
                f"witnesses must be at most {MOST_WITNESSES}, got {self.witnesses!r}: a sum over "
                "many channels is a norm again: keep the norm"
            )
        if self.witnesses and not issubclass(self.kind, DyISRU):
            refuse_witnesses(repr(self.to), self.witnesses)


def options_by_glob(to: Target, base: LayerOptions) -> dict[str, LayerOptions | None]:
    """Return the checked options for each glob of ``to``, those for the rest last.

    ``base`` has the options that a glob leaves out. Where the norms stay there is None.
    """
    choices: Mapping[str, Any] = to if isinstance(to, Mapping) else {REST: to}
    for glob in choices:
        if not isinstance(glob, str):
            raise ArgumentError(f"globs must be strings such as 'encoder.*', got {glob!r}")
    globs = [glob for glob in choices if glob != REST]
    options: dict[str, LayerOptions | None] = {}
    for glob in [*globs, REST]:
        choice = choices.get(glob, {})
        options[glob] = None if choice == KEEP else base.changed(choice)
    return options


def chosen_options(
    sites: Sequence[NormSite], by_glob: Mapping[str, LayerOptions | None]
) -> dict[str, LayerOptions]:
    """Return the options of each site to convert, by its path: those of the first glob."""
    require_matches(sites, [glob for glob in by_glob if glob != REST])
    chosen = {}
    for site in sites:
        glob = next(glob for glob in by_glob if site.matches(glob))
        options = by_glob[glob]
        if options is not None:
            chosen[site.path] = options
    return chosen


def require_known(values: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Refuse a name that is not among the known ones, and suggest the nearest."""
    for name in values:
        if name in known:
            continue
        near = get_close_matches(str(name), known, 1)
        hint = f"do you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ArgumentError(f"in {owner} every option must be known, got {name!r}: {hint}")
