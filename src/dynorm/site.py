"""Sites: the norms of a model, and globs of their paths."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from dynorm.arguments import check_items
from dynorm.errors import ArgumentError
from dynorm.plain import Plain


@dataclass(frozen=True)
class NormSite(Plain):
    """One norm of a model, as `find_norms` recovered it.

    Args:
        path: Dotted path of the module, the first one found; empty for the model itself.
        aliases: Its other paths, where several parents share the module.
        kind: "layernorm", "rmsnorm", or empty when refused.
        dim: The channel axis: -1 when it is the last one, else counted from the front (1 for
            channels-first).
        normalized_shape: The number of channels, as `torch.nn.LayerNorm` names it: (C,).
        eps: The number added to the variance, or to the mean square, inside the root.
        refused: Why it cannot be replaced, or None.
        class_name: The qualified name of the module's class.
        calls: How often the example called it with tokens.
        order: Its position in the list of sites: call order, those never called last.
        weight_offset: 1.0 where the layer scales by 1 + w, else 0.0.
        weight_name: The parameter or buffer that holds w, relative to the module; None when it does
            not scale its channels.
        bias_name: The same for the bias.
        input_shape: Shape of the tensor at the first call.
        promote: Whether its output has the dtype that input and weight are promoted to, as Llama's;
            otherwise it has that of the input.

    Example:
        >>> site = NormSite("encoder.norm", kind="layernorm", normalized_shape=(768,), eps=1e-5)
        >>> site.to_dict()["normalized_shape"]
        [768]
    """

    path: str
    aliases: tuple[str, ...] = ()
    kind: str = ""
    dim: int = -1
    normalized_shape: tuple[int, ...] = ()
    eps: float = 0.0
    refused: str | None = None
    class_name: str = ""
    calls: int = 0
    order: int = 0
    weight_offset: float = 0.0
    weight_name: str | None = None
    bias_name: str | None = None
    input_shape: tuple[int, ...] = ()
    promote: bool = False

    def matches(self, glob: str) -> bool:
        """Return whether one of its paths, aliases too, matches a glob; `*` also spans dots."""
        return any(fnmatchcase(path, glob) for path in (self.path, *self.aliases))


def check_sites(sites: object) -> None:
    """Refuse anything but sites."""
    check_items("sites", sites, NormSite, "pass the result of dynorm.find_norms(model, batch)")


def require_matches(sites: Sequence[NormSite], globs: Iterable[str]) -> None:
    """Refuse a glob that matches no site, and name the paths nearest to it."""
    for glob in globs:
        if any(site.matches(glob) for site in sites):
            continue
        paths = [path for site in sites for path in (site.path, *site.aliases)]
        # A cutoff of 0 also takes paths that have little in common with the glob.
        nearest = ", ".join(get_close_matches(glob, paths, 5, 0.0)) or "none"
        more = ""
        if len(paths) > 5:
            more = f" and {len(paths) - 5} more"
        raise ArgumentError(
            f"the glob {glob!r} must match the path of a norm, but matches none; the norms are, "
            f"nearest first: {nearest}{more}"
        )
