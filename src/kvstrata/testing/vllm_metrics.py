"""Numbers on a server's `/metrics` page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


class Metrics:
    """What `/metrics` said at one time.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """A sum over everything that has the name and these labels; 0 if there is nothing."""
        wanted = labels.items()
        found = (s.value for s in self.samples if s.name == name and wanted <= s.labels.items())
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        values = {s.labels[label] for s in self.samples if s.name == name}
        return {value: self.total(name, **{label: value}) for value in sorted(values)}
