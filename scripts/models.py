#!/usr/bin/env python
"""Trains small models of many families, compiled and eager, and writes docs/models.md.

Each runs in float32 and bfloat16, in the latter with each of its attention implementations. The
fused graphs run as they are, or, with --inductor, are compiled: ten to forty seconds each. The
measurements go to docs/results/models.json, the tables in docs/models.md are made from there.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

from comparison import LOSS, ROUNDS, compare, per_layer  # noqa: E402
from families import CONFIGURATIONS, FAMILIES, LAYERS  # noqa: E402

from fusedbwd.report import Report  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "docs" / "results" / "models.json"
BEGIN, END = "<!-- written by scripts/models.py -->\n", "<!-- end -->\n"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def matrix(names: list[str]) -> list[tuple[str, str, str]]:
    """Model, attention and dtype of every row."""
    return [(n, a, d) for n, a, d in CONFIGURATIONS if n in names]


def key(row: dict) -> tuple:
    """Rows are sorted by it: the families' order, then attention and dtype."""
    return list(FAMILIES).index(row["model"]), row["attention"] == "eager", row["dtype"]


def measure(name: str, attention: str, dtype: str, inductor: bool) -> dict:
    """One row of the results."""
    found = compare(name, attention, DTYPES[dtype], inductor=inductor)
    counts = found.report.counts()
    worst, part = found.worst()
    return {
        "model": name,
        "attention": attention,
        "dtype": dtype,
        "counts": counts,
        "per_layer": per_layer(name, attention, DTYPES[dtype], counts),
        "misses": misses(found.report),
        "loss": found.errors[LOSS],
        "worst": [worst, *found.errors[worst]],
        "part": part,
        "gradients": len(found.errors) - 1,
        "inductor": inductor,
        "rounds": ROUNDS,
    }


def misses(report: Report) -> dict[str, list[str]]:
    """The reasons of each fusion's near misses, once each and without the nodes' names."""
    found: dict[str, dict[str, None]] = {}
    for miss in report.missed:
        reason = re.sub(rf"\b({miss.anchor}|[a-z]\w*_\d+)\b", "…", miss.reason)
        found.setdefault(miss.fusion, {})[re.sub(r" \(.*\)$", "", reason)] = None
    return {fusion: list(reasons) for fusion, reasons in found.items()}


def tables(results: dict) -> str:
    """The generated part of the page: one table for each dtype and attention."""
    at = results["environment"]
    parts = [f"Run with {at}; {LAYERS} layers a model.\n"]
    for dtype in DTYPES:
        for attention in ("sdpa", "eager"):
            rows = [
                (
                    r["model"] + ("" if r["inductor"] else "¹"),
                    ", ".join(per(f, *n) for f, n in r["per_layer"].items()),
                    "; ".join(f"`{f}`: {', '.join(why)}" for f, why in r["misses"].items()) or "–",
                    "{:.1e} of {:.1e}".format(*r["loss"]),
                    "{:.1e} of {:.1e}, `{}`".format(*r["worst"][1:], r["worst"][0]),
                    f"{r['part']:.2f}",
                    r["rounds"],
                )
                for r in results["rows"]
                if (r["dtype"], r["attention"]) == (dtype, attention)
            ]
            if rows:
                parts.append(f"### {dtype}, {attention} attention\n")
                parts.append(tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True))
                parts.append("")
    if not all(r["inductor"] for r in results["rows"]):
        parts.append("¹ the fused graph as it is, not compiled by Inductor")
    return "\n".join(parts)


HEADERS = (
    "model",
    "fused in each layer (and outside them)",
    "near misses",
    "loss error of budget",
    "gradient nearest its budget",
    "part",
    "batches",
)


def per(fusion: str, each: int, outside: int) -> str:
    """``swiglu_backward 1``, ``rms_norm_backward 2 (+1)``."""
    return f"`{fusion}` {each}" + (f" ({outside:+d})" if outside else "")


def page(results: dict) -> str:
    """docs/models.md with its generated part as ``results`` have it."""
    head, rest = PAGE.read_text().split(BEGIN)
    return head + BEGIN + "\n" + tables(results) + "\n" + END + rest.split(END)[1]


def environment() -> str:
    import transformers

    machine = platform.machine()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {machine} CPU"


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all is within budget and, with --check, the page is what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run and write nothing")
    parser.add_argument("--inductor", action="store_true", help="compile, as in training")
    parser.add_argument("--models", default=",".join(FAMILIES), help="comma list")
    args = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if args.check:
        stale = page(results).split() != PAGE.read_text().split()
        if stale:
            print(f"{PAGE} is stale: run scripts/models.py", file=sys.stderr)
        return int(stale)
    results["environment"] = environment()
    over = 0
    for name, attention, dtype in matrix(args.models.split(",")):
        start = time.perf_counter()
        row = measure(name, attention, dtype, args.inductor)
        over += row["part"] > 1 or row["loss"][0] > row["loss"][1]
        results["rows"] = sorted(
            [*(r for r in results["rows"] if key(r) != key(row)), row], key=key
        )
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(
            f"{name}, {attention}, {dtype}: {row['counts']}, {row['part']:.2f} of the "
            f"budget at {row['worst'][0]} ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    PAGE.write_text(page(results))
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
