"""What fusion did to one graph, and why it did not do more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tabulate import tabulate


@dataclass(frozen=True)
class Fired:
    """A fusion that was applied: its name, the node it was anchored on, the nodes replaced."""

    fusion: str
    anchor: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Missed:
    """A near miss: the fusion, the node where it was tried, and why it is not one."""

    fusion: str
    anchor: str
    reason: str


@dataclass
class Report:
    """Fusions applied and missed in one compiled graph (or several, when merged).

    ``precisions``: of float32 matmuls, in force when the graph was compiled ("highest", "high" or
    "medium"); empty if it has none.
    """

    fired: list[Fired] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    switched_off: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How often each fusion was applied; only those that were."""
        return dict(Counter(f.fusion for f in self.fired))

    def merged(self, other: Report) -> Report:
        """Both reports in one."""
        return Report(
            self.fired + other.fired,
            self.missed + other.missed,
            sorted({*self.switched_off, *other.switched_off}),
            sorted({*self.precisions, *other.precisions}),
        )

    def summary(self) -> str:
        """One line: what was fused, how often, and how many near misses there were."""
        counts = self.counts()
        fused = ", ".join(f"{name} x{n}" for name, n in counts.items()) or "nothing"
        off = f"; switched off: {', '.join(self.switched_off)}" if self.switched_off else ""
        return f"fused {fused}{self._matmuls()}; {len(self.missed)} near misses{off}"

    def _matmuls(self) -> str:
        if not self.precisions:
            return ""
        at = " and ".join(self.precisions)
        return f"; float32 matmuls at {at!r}, {self.counts().get('bf16_matmuls', 0)} in bfloat16"

    def __str__(self) -> str:
        lines = [self.summary()]
        if self.fired:
            rows = [(f.fusion, f.anchor, ", ".join(f.replaced)) for f in self.fired]
            lines.append(tabulate(rows, headers=["fused", "anchor", "replaced"]))
        if self.missed:
            rows = [(m.fusion, m.anchor, m.reason) for m in self.missed]
            lines.append(tabulate(rows, headers=["not fused", "at", "because"]))
        return "\n\n".join(lines)
