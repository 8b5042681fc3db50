"""What fusion did to one graph, and why it did not do more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tabulate import tabulate

from fusedbwd.config import OPT_INS


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
    "medium"); empty if it has none. ``notes``: what else there is to know, a line each: dtypes that
    no kernel takes and, of a compiled module, how many graphs it has, graph breaks and the
    recompile limit.
    """

    fired: list[Fired] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    switched_off: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How often each fusion was applied; only those that were."""
        return dict(Counter(f.fusion for f in self.fired))

    def near_misses(self) -> dict[str, list[Missed]]:
        """The near misses of each fusion that has any, in the order of the graph."""
        found: dict[str, list[Missed]] = {}
        for miss in self.missed:
            found.setdefault(miss.fusion, []).append(miss)
        return found

    def merged(self, other: Report) -> Report:
        """Both reports in one."""
        return Report(
            self.fired + other.fired,
            self.missed + other.missed,
            sorted({*self.switched_off, *other.switched_off}),
            sorted({*self.precisions, *other.precisions}),
            list(dict.fromkeys([*self.notes, *other.notes])),
        )

    def summary(self) -> str:
        """One line: what was fused and nearly fused, how often, and what is switched off."""
        fused = _listed(self.counts()) or "nothing"
        misses = _listed({name: len(found) for name, found in self.near_misses().items()})
        off = f"; switched off: {', '.join(self.switched_off)}" if self.switched_off else ""
        return f"fused {fused}{self._matmuls()}; near misses: {misses or 'none'}{off}"

    def _matmuls(self) -> str:
        if not self.precisions:
            return ""
        at, counts = " and ".join(self.precisions), self.counts()
        kinds = [f"{counts.get('bf16_matmuls', 0)} in bfloat16"]
        kinds += [f"{counts[name]} by {name}" for name in OPT_INS if name in counts]
        return f"; float32 matmuls at {at!r}, {', '.join(kinds)}"

    def __str__(self) -> str:
        lines = ["\n".join([self.summary(), *(f"note: {note}" for note in self.notes)])]
        if self.fired:
            rows = [(f.fusion, f.anchor, ", ".join(f.replaced)) for f in self.fired]
            lines.append(tabulate(rows, headers=["fused", "anchor", "replaced"]))
        if self.missed:
            rows = [(m.fusion, m.anchor, m.reason) for m in self.missed]
            lines.append(tabulate(rows, headers=["not fused", "at", "because"]))
        return "\n\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{n}" for name, n in counts.items())
