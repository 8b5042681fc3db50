#!/usr/bin/env python
"""Shows what was fused in a backward, why the rest was not, and the kernels that came of it.

Prints the fusions, the calls of the generated backward in order (Triton kernels of ours and of
Inductor's, library routines), and the sources. --ptx, --sass and --resources add what Triton's
compiler makes of our kernels for --target.

Without a GPU, Inductor generates C++ and the fused ops run their references, so the list of
calls is the CPU's; our Triton kernels are compiled for the target all the same, at the
dimensions and dtypes of this backward. Inductor's own Triton kernels and the list of calls as
on a GPU need one (--device cuda).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from torch.utils import _pytree as pytree

from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError
from fusedbwd.inspection import Inspection, inspect_module, inspect_problem, write_resources
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import PROBLEMS
from fusedbwd.resources import TARGETS


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--problem", choices=list(PROBLEMS), help="a reference problem, exported")
    what.add_argument(
        "--module",
        metavar="PKG.MOD:FACTORY",
        help="a callable that returns (module, example_args), compiled for training",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: the module's own"
    )
    parser.add_argument("--small", action="store_true", help="tiny dimensions (--problem only)")
    parser.add_argument(
        "--case", metavar="BxS", help="the variant that serves these sizes (--problem only)"
    )
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
    parser.add_argument("--target", choices=TARGETS, default="sm_90", help="default: sm_90")
    parser.add_argument("--ptx", action="store_true", help="our kernels' PTX")
    parser.add_argument("--sass", action="store_true", help="our kernels' machine code")
    parser.add_argument(
        "--resources", action="store_true", help="their registers, shared memory and spills"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write sources and code there, not to the screen"
    )
    args = parser.parse_args(argv)
    if args.small and args.module:
        parser.error("--small goes with --problem")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 2 when there is nothing to inspect, with the reason on stderr."""
    args = parse(argv)
    try:
        with matmul_precision(args.precision):
            inspection = inspected(args)
        print(inspection.overview())
        wanted = args.ptx or args.sass or args.resources
        compiled = inspection.resources(args.target) if wanted else []
        if wanted:
            figures = [r.summary() for r in compiled]
            print(tabulate(figures, headers="keys") if figures else "no kernel of ours", end="\n\n")
        if args.out:
            paths = inspection.write(args.out)
            if wanted:
                paths += write_resources(args.out, compiled, ptx=args.ptx, sass=args.sass)
            print(f"{len(paths)} files written to {args.out}")
            return 0
        for r in compiled:
            if args.ptx:
                print(f"# {r.kernel}, {r.target}, PTX\n{r.ptx}")
            if args.sass:
                print(f"# {r.kernel}, {r.target}, SASS\n{r.sass()}")
        print(inspection.sources())
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def inspected(args: argparse.Namespace) -> Inspection:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    config = Config(fp16_scaled=args.fp16 == "scaled", fp16x3=args.fp16 == "x3")
    if args.problem:
        cases = PROBLEMS[args.problem].select_cases(args.case) if args.case else (None,)
        if len(cases) != 1:
            raise FusedBwdError(f"--case: expected one case, got {args.case!r}")
        (case,) = cases
        return inspect_problem(
            args.problem,
            small=args.small,
            dtype=dtype,
            device=args.device,
            case=case,
            config=config,
        )
    module, example_args = load(args.module)()
    module = module.to(device=args.device, dtype=dtype)

    def moved(t):
        if not isinstance(t, torch.Tensor):
            return t
        t = t.to(args.device)
        return t.to(dtype) if dtype and t.is_floating_point() else t

    return inspect_module(module, pytree.tree_map(moved, tuple(example_args)), config=config)


def load(path: str):
    """The callable that ``pkg.mod:factory`` names; the working directory is searched too."""
    name, colon, factory = path.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(name), factory) if colon else None
    except (ImportError, AttributeError) as error:
        raise FusedBwdError(f"--module {path}: {error}") from None
    finally:
        sys.path.remove("")
    if not callable(found):
        raise FusedBwdError(f"--module: expected PKG.MOD:FACTORY, got {path!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
