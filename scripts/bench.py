#!/usr/bin/env python
"""Times the exported backward of a reference problem beside eager PyTorch and torch.compile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from fusedbwd import bench
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError
from fusedbwd.export import export_backward
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import PROBLEMS, get_problem


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
        help="of fp32 matmuls, in every variant",
    )
    parser.add_argument(
        "--fp16",
        choices=["scaled", "x3"],
        help="switch on the opt-in fp16_scaled (from precision high on) or fp16x3",
    )
    parser.add_argument("--variants", default="eager,compile,ours", help="comma list of these")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each variant")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when everything timed as ``ours`` was also right after the timing."""
    args = parse(argv)
    try:
        with matmul_precision(args.precision):
            return run(args)
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    problem = get_problem(args.problem)
    dtype = getattr(torch, args.dtype) if args.dtype else problem.dtype
    dims = problem.small if args.small else {}
    cases = problem.select_cases(args.cases, small=args.small)
    module = problem.build(seed=args.seed, device=args.device, dtype=dtype, **dims)

    def export():
        config = Config(fp16_scaled=args.fp16 == "scaled", fp16x3=args.fp16 == "x3")
        schema = problem.schema(module)
        return export_backward(module, saved=schema, device=args.device, config=config)

    start = time.perf_counter()
    fns = bench.variants(problem, module, args.variants.split(","), export)
    export_s = time.perf_counter() - start
    environment = bench.environment(torch.device(args.device)) | {"fp16": args.fp16}
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    print(f"export: {export_s:.1f} s", flush=True)

    results = []
    for index, case in enumerate(cases):
        result = bench.bench_case(
            problem, module, fns, case, calls=args.calls, seed=args.seed + index
        )
        results.append(result)
        print(f"{case[0]}x{case[1]} done", file=sys.stderr)
    print(bench.table(results))
    if args.json:
        report = {
            "problem": problem.name,
            "dtype": str(dtype),
            "export_s": export_s,
            "environment": environment,
            "cases": [dataclasses.asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(t.ok for r in results for t in r.timings if t.variant == "ours") else 1


if __name__ == "__main__":
    sys.exit(main())
