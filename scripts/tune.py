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
import triton
from tabulate import tabulate

from fusedbwd.kernels import matmul_gelu, matmul_sum, matmul_swiglu
from fusedbwd.kernels._matmul import MatmulTile
from fusedbwd.kernels._op import eager, record_launches
from fusedbwd.kernels._routes import DATA, Shape, ranges
from fusedbwd.numerics import relative_l2

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = (128, 512, 1024, 2048, 4096, 8192)
NARROW_TOKENS = (128, 512, 1024, 2048, 4096, 16384, 65536)  # of layers as narrow as the FFN

_SQUARE = MatmulTile(128, 128, 64, stages=5, warps=8, subtiles=2)
_WIDE = MatmulTile(128, 256, 64, stages=3, warps=8, subtiles=4)
_PAIR = MatmulTile(128, 128, 64, stages=3, warps=8, programs_per_sm=2, subtiles=4)
_LOW = MatmulTile(64, 128, 64, stages=4, warps=4, programs_per_sm=2, subtiles=4)
TILES = {
    "sum_matmul": (
        _SQUARE,
        _SQUARE._replace(split=True),
        _WIDE._replace(split=True),
        _PAIR,
    ),
    "matmul_swiglu_backward": (
        _SQUARE,
        _PAIR,
        _PAIR._replace(subtiles=2),
        _PAIR._replace(subtiles=8),
        _PAIR._replace(group=16),
        _WIDE._replace(subtiles=8),
    ),
    "matmul_gelu_backward": (
        _SQUARE._replace(stages=4, subtiles=4, flat=True),
        _PAIR,
        _PAIR._replace(subtiles=2),
        _PAIR._replace(subtiles=8),
        _LOW,
    ),
}


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
    return Job(name, draw, fused, unfused, matmul_sum.sum_matmul_shape, flops)


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
    sum_job("fc1 + residual 512 2048", (2048,), 512, residual=True)._replace(tokens=NARROW_TOKENS),
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
            it.fused(*args, tile=TILES[it.shape(*args).op][tile])
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
    tiles = TILES[shape.op]
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


def _first(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def table(rows: list[dict[str, Any]], flops: dict[str, int]) -> str:
    """Each shape's speed by tokens, relative to cuBLAS, and the route that the rule takes."""
    lines: Iterator = (
        [row["name"], tokens, f"{base:.4f}", f"{flops[row['name']] * tokens / base / 1e9:.0f}"]
        + [f"{base / r['ms'][i]:.2f}" if r["ms"][i] else "-" for r in row["routes"]]
        + [""] * (max(map(len, TILES.values())) - len(row["routes"]))
        + [_name(row, tokens)]
        for row in rows
        for i, (tokens, base) in enumerate(zip(row["tokens"], row["cublas_ms"], strict=True))
    )
    heads = [f"tile {i}" for i in range(max(map(len, TILES.values())))]
    return tabulate(lines, ["shape", "tokens", "cuBLAS ms", "TFLOP/s", *heads, "route"])


def _name(row: dict[str, Any], tokens: int) -> str:
    tile = next(tile for end, tile in ranges(row) if tokens <= end)
    return "cuBLAS" if tile is None else f"tile {TILES[row['op']].index(tile)}"


def main(argv: list[str] | None = None) -> int:
    """Writes the table and prints it; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: fusedbwd/data")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each route")
    parser.add_argument("--shapes", type=int, help="only the first so many shapes")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    start, shapes = time.time(), SHAPES[: args.shapes]

    def progress(text: str) -> None:
        print(f"\r{time.time() - start:4.0f} s  {text:60}", end="", file=sys.stderr, flush=True)

    # With a number of tokens that sixteen divides, and one that it does not.
    jobs = [
        (i, t, tokens)
        for i, job in enumerate(shapes)
        for t in range(len(TILES[job.shape(*job.draw(1, "meta")).op]))
        for tokens in (1024, 1023)
    ]
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for i, problem in enumerate(pool.map(compile_one, jobs)):
            progress(f"compiled {i + 1} of {len(jobs)}")
            if problem:
                print(f"\n{problem}")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rows = []
    for i, job in enumerate(shapes):
        progress(f"timing {i + 1} of {len(shapes)}: {job.name}")
        rows.append(tune(job, flush, args.calls))
    print(f"\n{table(rows, {job.name: job.flops for job in shapes})}")
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    head = {"gpu": name, "capability": [major, minor]}
    head |= {"torch": torch.__version__, "triton": triton.__version__}
    out = args.out or DATA / f"matmul_{name.split()[-1].lower()}.json"
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
