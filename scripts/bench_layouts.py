#!/usr/bin/env python
"""Times the float32 matmuls of the FFN's backward in other layouts of the same operands.

- Input gradients, grad [T, K] @ weight [K, N]: the weight as it lies, contiguous along N; copied
  beforehand so that it is contiguous along K, the summed dimension; and that with the copy timed
  too. The copy is ATen's.
- Weight gradients, grad.t() @ x, both contiguous across the summed dimension: as they are, and as
  the transpose of x.t() @ grad.

Every call finds a cold L2 cache; times are medians of calls that take turns. The pattern
k_major_weights goes by the times with copies under "high": --out writes them for the package.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from fusedbwd import bench_kernels
from fusedbwd.bench import FLUSH_BYTES
from fusedbwd.bench_fusions import timed
from fusedbwd.errors import FusedBwdError
from fusedbwd.kernels._routes import classes, k_major_shape, measured_on, write_table
from fusedbwd.numerics import relative_l2
from fusedbwd.precision import HIGH, HIGHEST, matmul_precision

SIZES = {  # hidden and wide, each with token counts in every class that routes know
    (512, 2048): (128, 613, 2984, 4096, 7184, 17312, 65536, 131072),
    (1024, 4096): (128, 613, 2984, 3500, 8192, 16384, 65536),
    (4096, 14336): (128, 613, 2984, 3500, 8192, 16384),
}
AS_IT_LIES, TRANSPOSED, COPYING = "as it lies", "transposed", "copy, transposed"
WAYS = (AS_IT_LIES, TRANSPOSED, COPYING)
AGREE = 2e-3  # twice what rounding to TF32 changes: that differs by kernel

Runs = Mapping[str, Callable[[], torch.Tensor]]


class Row(NamedTuple):
    """Medians of one matmul, in microseconds, by way."""

    precision: str
    tokens: int
    matmul: str
    flops: float
    us: dict[str, float]

    def speed(self, way: str) -> float:
        """Relative to the operands as they lie."""
        return self.us[AS_IT_LIES] / self.us[way]


def matmuls(tokens: int, hidden: int, wide: int, device: torch.device) -> dict[str, Runs]:
    """The four of an FFN [hidden, wide], each in its ways, on random operands."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    dy, x, dh, h = (rand(tokens, n) for n in (hidden, hidden, wide, wide))
    fc1, fc2 = rand(wide, hidden), rand(hidden, wide)
    return {
        "fc2 input": input_gradient(dy, fc2),
        "fc1 input": input_gradient(dh, fc1),
        "fc2 weight": weight_gradient(dy, h),
        "fc1 weight": weight_gradient(dh, x),
    }


def input_gradient(grad: torch.Tensor, weight: torch.Tensor) -> Runs:
    k_major = weight.t().contiguous().t()
    return {
        AS_IT_LIES: lambda: torch.mm(grad, weight),
        TRANSPOSED: lambda: torch.mm(grad, k_major),
        COPYING: lambda: torch.mm(grad, weight.t().contiguous().t()),
    }


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> Runs:
    return {
        AS_IT_LIES: lambda: torch.mm(grad.t(), x),
        TRANSPOSED: lambda: torch.mm(x.t(), grad).t(),
    }


def microseconds(runs: Runs, calls: int, flush: torch.Tensor) -> dict[str, float]:
    """Median time of each, interleaved; on a GPU by events, with the host ahead of it."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    for call, way in itertools.product(range(calls + 2), runs):
        flush.zero_()
        if flush.is_cuda:
            torch.cuda._sleep(300_000)
        milliseconds = timed(runs[way], flush.device)
        elapsed = milliseconds() * 1e3
        if call >= 2:
            times[way].append(elapsed)
    return {way: statistics.median(found) for way, found in times.items()}


def measure(
    precision: str, tokens: int, sizes: tuple[int, int], calls: int, flush: torch.Tensor
) -> list[Row]:
    """A row for each of the four matmuls.

    Raises:
        FusedBwdError: two ways differ by more than kernels of one precision may.
    """
    rows = []
    for name, runs in matmuls(tokens, *sizes, flush.device).items():
        with matmul_precision(precision):
            expected = runs[AS_IT_LIES]()
            for way, run in runs.items():
                if not (error := relative_l2(run(), expected)) < AGREE:
                    raise FusedBwdError(f"{name}, {tokens} tokens, {way}: differs by {error:.1e}")
            us = microseconds(runs, calls, flush)
        rows.append(Row(precision, tokens, name, 2.0 * tokens * sizes[0] * sizes[1], us))
    return rows


def table(rows: list[Row]) -> str:
    """Times, TFLOP/s as the operands lie, and speeds relative to that."""
    lines = [
        [r.precision, r.tokens, r.matmul, r.us[AS_IT_LIES], r.flops / r.us[AS_IT_LIES] / 1e6]
        + [f(r, way) for way in WAYS[1:] if way in r.us for f in (lambda r, w: r.us[w], Row.speed)]
        for r in rows
    ]
    heads = ["precision", "tokens", "gradient of", AS_IT_LIES, "TFLOP/s"]
    heads += [head for way in WAYS[1:] for head in (way, "speed")]
    formats = ("", "", "", ".1f", ".0f", ".1f", ".2f", ".1f", ".2f")
    return tabulate(lines, headers=heads, floatfmt=formats)


def rows_of(rows: list[Row], sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows for fusedbwd/data of the input gradients under "high": [K, N] is the weight."""
    found = []
    for name, (k, n) in {"fc2 input": sizes, "fc1 input": sizes[::-1]}.items():
        measured = [r for r in rows if (r.precision, r.matmul) == (HIGH, name)]
        times = {way: [round(r.us[way] / 1e3, 5) for r in measured] for way in WAYS}
        found.append(
            k_major_shape(k, n)._asdict()
            | {"tokens": [r.tokens for r in measured], "cublas_ms": times[AS_IT_LIES]}
            | {"routes": [{"layout": COPYING, "ms": times[COPYING]}]}
        )
    return found


def where_it_pays(row: dict[str, Any]) -> str:
    """The rule's answer for one row, in words."""
    low, words = 0.0, []
    for end, route in classes(row):
        if route is not None:
            words.append(f"{low:.0f} < tokens" + ("" if end == math.inf else f" <= {end:.0f}"))
        low = end
    size = f"[{row['depth']}, {row['width']}]"
    return f"a copy of a weight {size} pays: {' and '.join(words) or 'nowhere'}"


def print_kernels(tokens: int, sizes: tuple[int, int], device: torch.device) -> None:
    """Which kernels each way runs under "high"."""
    for name, runs in matmuls(tokens, *sizes, device).items():
        for way, run in runs.items():
            with matmul_precision(HIGH):
                found = bench_kernels.kernels(lambda _, r=run: (r(),), {}, device, calls=1)
            print(f"{name}, {way}: " + ", ".join(f"{k.name[:90]} {k.us:.0f} µs" for k in found))


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 if results differ, 2 if --out is given without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs=2, metavar=("HIDDEN", "WIDE"), help="only these")
    parser.add_argument("--tokens", type=int, nargs="+", help="only these token counts")
    parser.add_argument("--calls", type=int, default=15, help="timed calls of each way")
    parser.add_argument("--kernels", action="store_true", help="name them, at the most tokens")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a look on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table there")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.out and device.type != "cuda":
        print("error: --out is for measurements of a GPU", file=sys.stderr)
        return 2
    runs = {(16, 24): (7, 200)} if args.small else SIZES
    if args.sizes:
        runs = {tuple(args.sizes): runs.get(tuple(args.sizes), SIZES[512, 2048])}
    flush = torch.empty(1024 if args.small else FLUSH_BYTES, dtype=torch.uint8, device=device)
    table_rows = []
    for sizes, tokens in runs.items():
        rows: list[Row] = []
        try:
            for precision, t in itertools.product((HIGH, HIGHEST), args.tokens or tokens):
                if precision == HIGH or sizes[0] < 1024:  # float32 takes its time
                    rows += measure(precision, t, sizes, args.calls, flush)
        except FusedBwdError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"{sizes[0]} x {sizes[1]}, microseconds\n{table(rows)}")
        if args.kernels:
            print_kernels(max(args.tokens or tokens), sizes, device)
        table_rows += rows_of(rows, sizes)
    print("\n".join(map(where_it_pays, table_rows)))
    if args.out:
        write_table(args.out, measured_on(device), table_rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
