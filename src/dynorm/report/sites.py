"""The sites of a report: the norms of the original model, and the tokens that reach them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn

from dynorm.batches import Batch, arguments, require_finite, site_tokens, token_masks
from dynorm.errors import DataError
from dynorm.find.probe import find_norms
from dynorm.site import NormSite, check_sites


class SiteStats:
    """A norm of the original model, and how many tokens it saw."""

    def __init__(self, site: NormSite) -> None:
        self.site = site
        self.channels = math.prod(site.normalized_shape)
        self.tokens = 0

    def tokens_of(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the tokens of x, (tokens, C), without padding; DataError if one is not finite."""
        tokens = site_tokens(self.site, x, token_masks(batch))
        require_finite(self.site.path, tokens)
        return tokens


Stats = TypeVar("Stats", bound=SiteStats)


def reached_sites(sites: Iterable[Stats], what: str) -> list[Stats]:
    """Return the sites that a batch reached, in call order; DataError if there is none."""
    reached = [site for site in sites if site.tokens]
    if not reached:
        raise DataError(
            f"the batches must reach at least one {what}, but reached none: give batches that use "
            "them"
        )
    return sorted(reached, key=lambda site: site.site.order)


def with_sites(
    model: nn.Module, batches: Iterator[Batch], sites: Sequence[NormSite] | None
) -> tuple[Sequence[NormSite], Iterator[Batch]]:
    """Return the sites, found with the first batch if they are not given, and all batches."""
    if sites is not None:
        check_sites(sites)
        return sites, batches
    first = next(batches)
    args, kwargs = arguments(model, first)
    return find_norms(model, *args, **kwargs), chain([first], batches)
