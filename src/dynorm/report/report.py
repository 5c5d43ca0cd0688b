"""The base of the reports on a model: each prints itself as a table, and writes itself as a page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dynorm.files import write_text
from dynorm.plain import JsonObject, plain
from dynorm.report.rendering import rendered
from dynorm.table import Table, count_of, wrapped

KINDS = {"layernorm": "LN", "rmsnorm": "RMS"}
"""The kinds of norms as tables name them."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """A report on a model, which prints itself as a table and writes itself as a page."""

    _template: ClassVar[str]
    model: str
    sites: Sequence[Any]
    batches: int
    unreached: list[str] = field(default_factory=list)
    meta: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, without the sampled points; None for NaN."""
        values: JsonObject = plain(asdict(self))
        for site in values["sites"]:
            site.pop("picture", None)
        return values

    def title(self) -> str:
        """Return one line: the model, and the treatment of its norms."""
        raise NotImplementedError

    def findings(self) -> list[str]:
        """Return the paragraphs between the title and the table."""
        return []

    def table(self) -> Table:
        """Return the report as a table, one row per site."""
        raise NotImplementedError

    def advice(self) -> list[str]:
        """Return the recommendations, each a few sentences or nothing."""
        raise NotImplementedError

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML page that needs no other file.

        If it fails, no partly written file is left.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            ArgumentError: matplotlib is not installed.
            StorageError: the file cannot be written.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
            >>> report = dynorm.inspect_norms(model, [torch.randn(64, 8)])
            >>> report.to_html(getfixture("tmp_path") / "report.html")
        """
        write_text(path, rendered(self._template, report=self))

    def __str__(self) -> str:
        """Return the report as text: the title, the findings, the table and the advice."""
        parts = [self.title(), *self.findings(), str(self.table()), *map(wrapped, self.advice())]
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        """Return the report in a few words."""
        sites = count_of(len(self.sites), "site")
        return f"<{type(self).__name__} of {self.name}: {sites}, {self.batches} batches>"

    @property
    def name(self) -> str:
        """Return the model's name, or its class if it has none."""
        return str(self.meta.get("model", self.model))
