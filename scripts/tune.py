#!/usr/bin/env python
"""Times the fused matmuls against cuBLAS on this GPU and writes the table that chooses routes.

For every shape in SHAPES, at several token counts, each of the op's TILES and the cuBLAS route
are checked against each other and timed, interleaved, with a cold L2 cache. The table holds
the times; the rule that turns them into routes is in fusedbwd/kernels/_routes.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from fusedbwd.errors import FusedBwdError
from fusedbwd.kernels import matmul_gelu, matmul_sum, matmul_swiglu
from fusedbwd.kernels._matmul import MatmulTile
from fusedbwd.kernels._op import eager, record_launches
from fusedbwd.kernels._routes import DATA, Shape, measured_on, ranges, write_table
from fusedbwd.numerics import relative_l2

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = (128, 512, 1024, 2048, 4096, 8192)
NARROW_TOKENS = (*TOKENS, 16384, 65536)  # of layers as narrow as the FFN
FEW_TOKENS = (256, 422, 613, 768)  # for sum_matmul too: its tiles are then shared out unevenly

_SQUARE = MatmulTile(128, 128, 64, stages=5, warps=8, subtiles=2)
_WIDE = MatmulTile(128, 256, 64, stages=3, warps=8, subtiles=4)
_PAIR = MatmulTile(128, 128, 64, stages=3, warps=8, programs_per_sm=2, subtiles=4)
# One way each to have more loads in flight, or fewer instructions a finished element.
_SLIM = MatmulTile(64, 128, 64, stages=3, warps=4, programs_per_sm=3, subtiles=4)
_FEW_WARPS = MatmulTile(128, 128, 64, stages=3, warps=4, programs_per_sm=2, subtiles=4)
_STAGED = _PAIR._replace(subtiles=2, staged=True)
TILES = {
    "sum_matmul": (
        _SQUARE,
        _SQUARE._replace(split=True),
        _WIDE._replace(split=True),
        _PAIR,
    ),
    "matmul_swiglu_backward": (
        _SQUARE._replace(subtiles=4, early=2),
        _PAIR,
        _PAIR._replace(subtiles=2),
        _PAIR._replace(staged=True),
        _WIDE._replace(subtiles=8),
        _WIDE._replace(subtiles=4, staged=True),
        _FEW_WARPS._replace(staged=True),
    ),
    "matmul_gelu_backward": (
        _SQUARE._replace(subtiles=4, early=2),
        _PAIR,
        _PAIR._replace(subtiles=2),
        # Two programs of the first have registers enough if x is in bfloat16, of the second if
        # it is in float32.
        _PAIR._replace(early=1),
        _PAIR._replace(subtiles=8, group=1, early=1),
        _SLIM._replace(early=1),
        _SLIM._replace(subtiles=2, early=1),
        _STAGED,
        _STAGED._replace(subtiles=4),
        _STAGED._replace(subtiles=1, stages=2),
        _STAGED._replace(stages=2),
        _FEW_WARPS._replace(subtiles=2, staged=True),
        _FEW_WARPS._replace(early=1, staged=True),
    ),
}
# Of sum_matmul with a residual, besides.
RESIDUAL_TILES = (
    _PAIR._replace(early=1),
    _WIDE._replace(subtiles=8, early=2),
    _STAGED,
    _FEW_WARPS._replace(subtiles=2, staged=True),
)


def candidates(shape: Shape) -> tuple[MatmulTile, ...]:
    """The tiles that are tried for ``shape``."""
    return TILES[shape.op] + (RESIDUAL_TILES if shape.residual else ())


class Job(NamedTuple):
    """One shape to tune: how its operands are drawn, and its routes."""

    name: str
    draw: Callable[[int, str], tuple]
    fused: Callable
    unfused: Callable
    shape: Callable[..., Shape]
    flops: int  # per token
    tokens: tuple[int, ...] = TOKENS


def _rand(*shape: int, device: str, dtype: torch.dtype = BF16, scale: float = 1.0):
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _weight(rows: int, columns: int, device: str) -> torch.Tensor:
    return _rand(rows, columns, device=device, scale=(2 / columns) ** 0.5)


def sum_job(name: str, depths: tuple[int, ...], width: int, residual: bool = False) -> Job:
    """Input gradients of projections [depth_i, width], their gradients packed side by side; with
    a residual, all of it accumulated in float32."""
    out = FP32 if residual else BF16

    def draw(tokens: int, device: str) -> tuple:
        a = list(_rand(tokens, sum(depths), device=device).split(depths, 1))
        b = [_weight(depth, width, device) for depth in depths]
        return a, b, _rand(tokens, width, device=device, dtype=FP32) if residual else None, out

    fused, unfused = matmul_sum.sum_matmul_fused, matmul_sum.sum_matmul_unfused
    flops = 2 * sum(depths) * width
    tokens = _with_few(TOKENS)
    return Job(name, draw, fused, unfused, matmul_sum.sum_matmul_shape, flops, tokens)


def _with_few(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*tokens, *FEW_TOKENS}))


def swiglu_job(name: str, hidden: int, width: int) -> Job:
    """The down projection's input gradient through SwiGLU."""

    def draw(tokens: int, device: str) -> tuple:
        act, linear = (_rand(tokens, width, device=device) for _ in range(2))
        return _rand(tokens, hidden, device=device), _weight(hidden, width, device), act, linear

    m = matmul_swiglu
    fused, unfused = m.matmul_swiglu_backward_fused, m.matmul_swiglu_backward_unfused
    return Job(name, draw, fused, unfused, m.matmul_swiglu_backward_shape, 2 * hidden * width)


def gelu_job(name: str, hidden: int, width: int, dtype: torch.dtype) -> Job:
    """The second projection's input gradient through GELU, whose input is in ``dtype``."""

    def draw(tokens: int, device: str) -> tuple:
        x = _rand(tokens, width, device=device, dtype=dtype)
        return _rand(tokens, hidden, device=device), _weight(hidden, width, device), x, "tanh"

    m = matmul_gelu
    fused, unfused = m.matmul_gelu_backward_fused, m.matmul_gelu_backward_unfused
    return Job(name, draw, fused, unfused, m.matmul_gelu_backward_shape, 2 * hidden * width)


# The two problems' layers first, then layers like Llama's and GPT's of other sizes.
SHAPES = (
    sum_job("gate + up 5120 14336", (14336, 14336), 5120),
    sum_job("q + k + v 5120 32/8x160", (5120, 1280, 1280), 5120),
    sum_job("fc1 + residual 512 2048", (2048,), 512, residual=True)._replace(
        tokens=_with_few(NARROW_TOKENS)
    ),
    swiglu_job("down 5120 14336", 5120, 14336),
    gelu_job("fc2 512 2048 fp32", 512, 2048, FP32)._replace(tokens=NARROW_TOKENS),
    sum_job("gate + up 2048 8192", (8192, 8192), 2048),
    sum_job("q + k + v 2048 32/8x64", (2048, 512, 512), 2048),
    sum_job("gate + up 4096 14336", (14336, 14336), 4096),
    sum_job("q + k + v 4096 32/8x128", (4096, 1024, 1024), 4096),
    sum_job("q + k + v 4096 32/32x128", (4096, 4096, 4096), 4096),
    sum_job("gate + up 8192 28672", (28672, 28672), 8192),
    sum_job("q + k + v 8192 64/8x128", (8192, 1024, 1024), 8192),
    swiglu_job("down 4096 14336", 4096, 14336),
    gelu_job("fc2 4096 16384 bf16", 4096, 16384, BF16),
)


def compile_one(job: tuple[int, int, int]) -> str | None:
    """Compiles one tile of one shape into Triton's cache, in a worker process."""
    index, tile, tokens = job
    it = SHAPES[index]
    args = it.draw(tokens, "meta")
    try:
        with record_launches() as launches:
            it.fused(*args, tile=candidates(it.shape(*args))[tile])
        for launch in launches:
            launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    except Exception as error:
        return f"{it.name}, tile {tile}: {type(error).__name__}: {str(error)[:120]}"
    return None


def milliseconds(
    runs: dict[int, Callable], args: tuple, flush: torch.Tensor, calls: int
) -> dict[int, float]:
    """Median time of each, interleaved, the host ahead of the GPU."""
    pending: list[tuple[int, Any, Any]] = []
    names = list(runs)
    for call in range(calls):
        shift = call % len(names)
        for name in names[shift:] + names[:shift]:
            torch.cuda._sleep(300_000)
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[name](*args)
            end.record()
            pending.append((name, start, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(s.elapsed_time(e) for n, s, e in pending if n == name)
        for name in names
    }


def tune(job: Job, flush: torch.Tensor, calls: int) -> dict[str, Any]:
    """The table's row for one shape."""
    shape = job.shape(*job.draw(1, "meta"))
    tiles = candidates(shape)
    ms: list[list[float | None]] = [[] for _ in tiles]
    base: list[float] = []
    for tokens in job.tokens:
        args = job.draw(tokens, "cuda")
        runs: dict[int, Callable] = {-1: eager(job.unfused)}
        expected = _first(runs[-1](*args))
        for i, tile in enumerate(tiles):
            run = eager(lambda *a, t=tile: job.fused(*a, tile=t))
            try:
                error = relative_l2(_first(run(*args)), expected)
            except Exception as problem:
                print(f"\n{job.name}, {tile}: {type(problem).__name__}: {str(problem)[:120]}")
                continue
            # Both round their result once, the cuBLAS route perhaps a product before that.
            if error > 4 * torch.finfo(BF16).eps:
                print(f"\n{job.name}, {tile}: differs from cuBLAS by {error:.1e}, left out")
                continue
            runs[i] = run
        times = milliseconds(runs, args, flush, calls)
        base.append(round(times[-1], 5))
        for i in range(len(tiles)):
            ms[i].append(round(times[i], 5) if i in times else None)
    routes = [{"tile": t._asdict(), "ms": m} for t, m in zip(tiles, ms, strict=True)]
    return {"name": job.name, **shape._asdict(), "tokens": job.tokens, "cublas_ms": base} | {
        "routes": routes
    }


def known(out: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of ``out``, or of the shipped table of that name, by their own names.

    Raises:
        FusedBwdError: the table is of another GPU, torch or triton than ``head``.
    """
    for path in (out, DATA / out.name):
        if path.exists():
            table = json.loads(path.read_text())
            rows = table.pop("rows")
            if table != head:
                raise FusedBwdError(f"{path} is of {table}, measured now is {head}: tune all anew")
            return {row["name"]: row for row in rows}
    return {}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new``, and at token counts that it lacks what ``old`` has of cuBLAS and the same tiles.

    A tile that is new was not measured there: :func:`ranges` leaves it out of their classes.
    """
    tokens = sorted({*old["tokens"], *new["tokens"]})

    def at_all(before: list, now: list) -> list:
        times = dict(zip(old["tokens"], before, strict=True))
        times |= dict(zip(new["tokens"], now, strict=True))
        return [times[t] for t in tokens]

    never = [None] * len(old["tokens"])
    before = {MatmulTile(**r["tile"]): r["ms"] for r in old["routes"]}
    routes = [
        r | {"ms": at_all(before.get(MatmulTile(**r["tile"]), never), r["ms"])}
        for r in new["routes"]
    ]
    cublas = at_all(old["cublas_ms"], new["cublas_ms"])
    return new | {"tokens": tokens, "cublas_ms": cublas, "routes": routes}


def _first(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def table(rows: list[dict[str, Any]], flops: dict[str, int]) -> str:
    """Each shape's speed by tokens, relative to cuBLAS, and the route that the rule takes."""
    most = max(len(row["routes"]) for row in rows)
    lines: Iterator = (
        [row["name"], tokens, f"{base:.4f}", f"{flops[row['name']] * tokens / base / 1e9:.0f}"]
        + [f"{base / r['ms'][i]:.2f}" if r["ms"][i] else "-" for r in row["routes"]]
        + [""] * (most - len(row["routes"]))
        + [_name(row, tokens)]
        for row in rows
        for i, (tokens, base) in enumerate(zip(row["tokens"], row["cublas_ms"], strict=True))
    )
    heads = [f"tile {i}" for i in range(most)]
    return tabulate(lines, ["shape", "tokens", "cuBLAS ms", "TFLOP/s", *heads, "route"])


def _name(row: dict[str, Any], tokens: int) -> str:
    tile = next(tile for end, tile in ranges(row) if tokens <= end)
    tiles = [MatmulTile(**r["tile"]) for r in row["routes"]]
    return "cuBLAS" if tile is None else f"tile {tiles.index(tile)}"


def main(argv: list[str] | None = None) -> int:
    """Writes the table and prints it; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: fusedbwd/data")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each route")
    parser.add_argument("--shapes", type=int, help="only the first so many; other rows stay")
    parser.add_argument(
        "--only",
        type=lambda s: s.split(","),
        metavar="PART[,..]",
        help="only shapes in whose name one of these occurs; the table's other rows stay",
    )
    parser.add_argument(
        "--tokens",
        type=lambda s: tuple(sorted(map(int, s.split(",")))),
        metavar="N[,..]",
        help="only these token counts; the rows' other counts stay",
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    start = time.time()
    shapes = {
        i: job._replace(tokens=args.tokens or job.tokens)
        for i, job in enumerate(SHAPES[: args.shapes])
        if any(part in job.name for part in args.only or [""])
    }
    if not shapes:
        print(f"error: no shape's name has any of {args.only}", file=sys.stderr)
        return 2

    head = measured_on()
    out = args.out or DATA / f"matmul_{head['gpu'].split()[-1].lower()}.json"
    try:
        rows = known(out, head) if len(shapes) < len(SHAPES) or args.tokens else {}
    except FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def progress(text: str) -> None:
        print(f"\r{time.time() - start:4.0f} s  {text:60}", end="", file=sys.stderr, flush=True)

    # With a number of tokens that sixteen divides, and one that it does not.
    jobs = [
        (i, t, tokens)
        for i, job in shapes.items()
        for t in range(len(candidates(job.shape(*job.draw(1, "meta")))))
        for tokens in (1024, 1023)
    ]
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for i, problem in enumerate(pool.map(compile_one, jobs)):
            progress(f"compiled {i + 1} of {len(jobs)}")
            if problem:
                print(f"\n{problem}")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for i, job in enumerate(shapes.values()):
        progress(f"timing {i + 1} of {len(shapes)}: {job.name}")
        row = tune(job, flush, args.calls)
        whole = job.name not in rows or not args.tokens
        rows[job.name] = row if whole else merged(rows[job.name], row)
    flops = {job.name: job.flops for job in shapes.values()}
    print(f"\n{table([rows[name] for name in flops], flops)}")
    write_table(out, head, rows.values())
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
