#!/usr/bin/env python
"""Times each fusion against Inductor's own code: the table that decides where fusions fire.

On a GPU of its own the whole table takes a few minutes. `--json fusedbwd/data/fusions_h200.json`
writes the file that is shipped; it belongs to the GPU whose name is in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Each process compiles by itself. Read when torch is imported, in the processes too.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from fusedbwd import bench_fusions, fusion_cases
from fusedbwd.errors import FusedBwdError


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fusions", default="", help="comma list; by default all")
    parser.add_argument("--quick", action="store_true", help="the reference problems' sizes alone")
    parser.add_argument("--small", action="store_true", help="one tiny size each: a smoke test")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each variant")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that compile; 0: none but this one",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there, or add them to what it has"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when every case was measured."""
    args = parse(argv)
    try:
        return run(args)
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    fusions = [name for name in args.fusions.split(",") if name]
    wanted = fusion_cases.cases(fusions, quick=args.quick, small=args.small)
    start = time.perf_counter()
    rows, failed = [], []
    results = bench_fusions.measure_all(wanted, device, jobs=args.jobs, calls=args.calls)
    for case, result in zip(wanted, results, strict=True):
        if isinstance(result, str):
            failed.append(result)
            print(f"FAILED {result}", file=sys.stderr, flush=True)
            continue
        rows.append(result)
        elapsed = time.perf_counter() - start
        print(f"{elapsed:.0f} s: {case.fusion} {case.width} {case.tokens}", file=sys.stderr)
        if args.json:  # what has been measured stays, whatever happens to the rest
            bench_fusions.write(args.json, rows, device)
    print(bench_fusions.table(rows))
    print(f"{len(rows)} of {len(wanted)} cases in {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
