#!/usr/bin/env python
"""Times the exported backward of a reference problem beside eager PyTorch and torch.compile.

scripts/bench.py --problem decoder_backward --json new.json --plot new.svg
scripts/bench.py --problem decoder_backward --check docs/results/bench-decoder-h200.json
scripts/bench.py --from new.json --plot new.svg  # measures nothing
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from fusedbwd import bench, bench_kernels
from fusedbwd.bench_plot import plot
from fusedbwd.bench_results import CaseTimings, Results, load, regressions, summary, table
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError
from fusedbwd.export import export_backward
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import PROBLEMS, get_problem

PLOTTED = (".svg", ".png", ".pdf")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--problem", choices=list(PROBLEMS))
    source.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="show results instead"
    )
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
    parser.add_argument(
        "--variants",
        default="eager,compile,ours",
        help="comma list of these and max-autotune, which is for few cases: minutes each",
    )
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each variant")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there: svg, png, pdf")
    parser.add_argument(
        "--kernels", action="store_true", help="also list each case's kernels of ours (GPU)"
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="exit 1 if a case's speed-up is over 5 %% below that of these earlier results",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when everything timed as ``ours`` was also right after the timing, and ``--check``
    found nothing slower."""
    args = parse(argv)
    try:
        check_arguments(args)
        earlier = load(args.check) if args.check else None
        results = load(args.source) if args.source else measure(args)
        print(f"{table(results.cases)}\n{summary(results)}")
        if args.json:
            results.save(args.json)
        if args.plot:
            plot(results, args.plot)
        slower = regressions(results, earlier) if earlier else []
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in slower:
        print(f"slower than before: {line}")
    wrong = any(not t.ok for case in results.cases for t in case.timings if t.variant == "ours")
    return 1 if wrong or slower else 0


def check_arguments(args: argparse.Namespace) -> None:
    """Tells of what would fail after the measurements, and lose them.

    Raises:
        FusedBwdError: for results that could not be written, or no calls to time.
    """
    if args.calls < 1:
        raise FusedBwdError(f"--calls {args.calls}: at least one call is to be timed")
    for path in (args.json, args.plot):
        if path and not path.parent.is_dir():
            raise FusedBwdError(f"{path} cannot be written: there is no folder {path.parent}")
    if args.plot and args.plot.suffix not in PLOTTED:
        raise FusedBwdError(f"{args.plot} is none of {', '.join(PLOTTED)}")


def measure(args: argparse.Namespace) -> Results:
    """Exports the backward and times the cases, telling of each as it ends."""
    problem = get_problem(args.problem)
    dtype = getattr(torch, args.dtype) if args.dtype else problem.dtype
    dims = problem.small if args.small else {}
    cases = problem.select_cases(args.cases, small=args.small)
    module = problem.build(seed=args.seed, device=args.device, dtype=dtype, **dims)

    def export():
        config = Config(fp16_scaled=args.fp16 == "scaled", fp16x3=args.fp16 == "x3")
        schema = problem.schema(module)
        return export_backward(module, saved=schema, device=args.device, config=config)

    with matmul_precision(args.precision):
        start = time.perf_counter()
        fns = bench.variants(problem, module, args.variants.split(","), export)
        export_s = time.perf_counter() - start
        environment = bench.environment(torch.device(args.device)) | {"fp16": args.fp16}
        print(", ".join(f"{key} {value}" for key, value in environment.items()))
        print(f"export: {export_s:.1f} s", flush=True)

        seeds = range(args.seed, args.seed + len(cases))
        firsts = []
        for case, seed in zip(cases, seeds, strict=True):
            firsts.append(bench.first_calls(problem, module, fns, case, seed=seed))
            print(f"{case} compiled", file=sys.stderr)
        timed: list[CaseTimings] = []
        for case, seed, first in zip(cases, seeds, firsts, strict=True):
            timed.append(
                bench.bench_case(
                    problem, module, fns, case, first=first, calls=args.calls, seed=seed
                )
            )
            print(f"{timed[-1].name} done", file=sys.stderr)
            if args.kernels and "ours" in fns:
                inputs = problem.inputs(module, *case, seed)
                found = bench_kernels.kernels(fns["ours"], inputs, torch.device(args.device))
                print(f"{timed[-1].name}\n{bench_kernels.table(found)}", flush=True)
    return Results(problem.name, str(dtype), export_s, environment, tuple(timed))


if __name__ == "__main__":
    sys.exit(main())
