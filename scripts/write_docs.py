#!/usr/bin/env python
"""Writes docs/saved-tensors.md from the reference problems' schemas, or checks it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from fusedbwd.problems import PROBLEMS, Problem

FILE = Path(__file__).resolve().parents[1] / "docs" / "saved-tensors.md"

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


def text() -> str:
    """The whole file."""
    return "\n".join([HEAD, *map(section, PROBLEMS.values())])


def words(page: str) -> list[str]:
    """The page without table rules and spacing, which differ between releases of tabulate."""
    return re.sub(r"[\s|:-]+", " ", page).split()


def main(argv: list[str] | None = None) -> int:
    """Returns 0; with --check, 1 when the file is not what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    if not args.check:
        FILE.write_text(text())
    elif not FILE.exists() or words(FILE.read_text()) != words(text()):
        print(f"{FILE} is stale: run scripts/write_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
