#!/usr/bin/env python
"""Writes what is generated in docs/, or checks it.

docs/saved-tensors.md comes from the reference problems' schemas; in docs/fusions.md, the column
`speed against Inductor` comes from the measurements in fusedbwd/data/; in docs/performance.md, the
table after a comment `results: FILE` comes from that file in docs/results/.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fusedbwd import gate
from fusedbwd.bench_results import by_case, load
from fusedbwd.kernels._routes import measurements
from fusedbwd.problems import PROBLEMS, Problem

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLUMN = "speed against Inductor"

HEAD = """\
# Saved tensors

What the exported backward of each reference problem takes and returns, in order. This file is
written by `scripts/write_docs.py` from the schemas in `fusedbwd/problems/`; for a module of
your own, `print(bwd.schema.table())` prints the same tables.

- Sizes in letters are open: one export serves all their values.
- Tensors in another layout than the one given are accepted, and copied.
- *Read* inputs are used as given, never computed again. The others are checked and ignored:
  what they hold follows from the inputs named there.
- Gradients are fresh contiguous tensors.
"""


def section(problem: Problem) -> str:
    """The tables of one problem, at its own dimensions and dtype."""
    module = problem.build(device="meta")
    schema = problem.schema(module)
    summary = (type(module).__doc__ or "").partition("\n")[0]
    path = f"{type(module).__module__}.{type(module).__name__}"
    return f"## {problem.name}\n\n`{path}`: {summary}\n\n{schema.table()}\n"


def saved_tensors() -> str:
    """The whole of docs/saved-tensors.md."""
    return "\n".join([HEAD, *map(section, PROBLEMS.values())])


def fusions(page: str) -> str:
    """docs/fusions.md with its table's last column as the data says; other cells stay."""
    lines = page.splitlines()
    head = next(line for line in lines if line.endswith(f"| {COLUMN} |"))
    for i, line in enumerate(lines):
        if row := re.match(r"\| \[`(\w+)`\]", line):
            cells = line.split("|")[: head.count("|") - 1]
            lines[i] = "|".join([*cells, f" {against_inductor(row[1])} |"])
    return "\n".join(lines) + "\n"


def against_inductor(fusion: str) -> str:
    """The measured speed-ups of a fusion on the H200, least and greatest over widths."""
    rows = [row for row in measurements((9, 0)) if row["op"] == fusion]
    if rows:
        script = "tune.py" if "tile" in rows[0]["routes"][0] else "bench_layouts.py"
        return f"by token count, against cuBLAS: see `scripts/{script}`"
    table = gate.tables().get(gate.MEASURED_GPU)
    of_it = [r for r in table.rows if r.fusion == fusion] if table else []
    found: dict[str, list[float]] = {}
    off = []
    for (_, width, dtype), gained in gate.speedups(of_it).items():
        found.setdefault(dtype, []).append(gained)
        if gained < gate.THRESHOLD:
            off.append(f"{width} in {dtype}")
    parts = [
        f"{span(gains)} in {dtype} ({len(gains)} width{'s' * (len(gains) > 1)})"
        for dtype, gains in found.items()
    ]
    if off:
        parts.append(f"does not fire at {', '.join(off)}")
    return "; ".join(parts) or "not measured"


def span(gains: list[float]) -> str:
    least, most = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return f"{least}×" if least == most else f"{least} to {most}×"


def performance(page: str) -> str:
    """docs/performance.md with its tables of benchmark results as the files say."""

    def current(match: re.Match) -> str:
        results = load(DOCS / "results" / match[2])
        return f"{match[1]}\n{by_case(results, 'github')}\n"

    return re.sub(r"(<!-- results: (\S+) -->)\n(?:\|.*\n)*", current, page)


def pages() -> dict[Path, str]:
    """What each file should hold."""
    by_hand = {"fusions.md": fusions, "performance.md": performance}
    return {DOCS / "saved-tensors.md": saved_tensors()} | {
        DOCS / name: update((DOCS / name).read_text()) for name, update in by_hand.items()
    }


def words(page: str) -> list[str]:
    """The page without table rules and spacing, which differ between releases of tabulate."""
    return re.sub(r"[\s|:-]+", " ", page).split()


def main(argv: list[str] | None = None) -> int:
    """Returns 0; with --check, 1 when a file is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    stale = 0
    for path, text in pages().items():
        if not args.check:
            path.write_text(text)
        elif not path.exists() or words(path.read_text()) != words(text):
            print(f"{path} is stale: run scripts/write_docs.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
