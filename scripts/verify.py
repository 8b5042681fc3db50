#!/usr/bin/env python
"""Checks the exported backward of a reference problem against float64, case by case."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from fusedbwd import bench
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError
from fusedbwd.export import export_backward
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import PROBLEMS, get_problem
from fusedbwd.verify import table, verify


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problem", required=True, choices=list(PROBLEMS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", default="all", help="all, or case numbers and BxS: 0,3,8x256")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: the problem's own"
    )
    parser.add_argument("--small", action="store_true", help="tiny dimensions and cases")
    parser.add_argument(
        "--precision",
        choices=[HIGHEST, HIGH, MEDIUM],
        default=HIGHEST,
        help="of float32 matmuls (default: highest)",
    )
    parser.add_argument(
        "--fp16",
        choices=["scaled", "x3"],
        help="switch on the opt-in fp16_scaled (from precision high on) or fp16x3",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument(
        "--rounds", type=int, help="runs per case, judged together (default: 1, small cases 20)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when every gradient is within budget and every call kept its contract."""
    args = parse(argv)
    with matmul_precision(args.precision):
        return run(args)


def run(args: argparse.Namespace) -> int:
    problem = get_problem(args.problem)
    dtype = getattr(torch, args.dtype) if args.dtype else problem.dtype
    dims = problem.small if args.small else {}
    checks = []
    try:
        cases = problem.select_cases(args.cases, small=args.small)
        module = problem.build(seed=args.seed, device=args.device, dtype=dtype, **dims)
        config = Config(fp16_scaled=args.fp16 == "scaled", fp16x3=args.fp16 == "x3")
        schema = problem.schema(module)
        bwd = export_backward(module, saved=schema, device=args.device, config=config)
        rounds = args.rounds or (20 if args.small else 1)
        for check in verify(problem, module, bwd, cases, seed=args.seed, rounds=rounds):
            print(table([check]), end="\n\n", flush=True)
            checks.append(check)
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [f"{c.batch}x{c.seq}" for c in checks if not c.ok]
    print(f"{problem.name}, {dtype}, float32 matmuls at {args.precision!r}", end="")
    print(f", fp16 {args.fp16}: " if args.fp16 else ": ", end="")
    print(f"{len(checks) - len(failed)} of {len(checks)} cases pass")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if args.json:
        report = {
            "problem": problem.name,
            "dtype": str(dtype),
            "fp16": args.fp16,
            "environment": bench.environment(torch.device(args.device)),
            "cases": [dataclasses.asdict(c) | {"ok": c.ok} for c in checks],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
