"""Whether a fusion pays: our kernel against Inductor's own code, by measurements shipped as data.

``data/fusions_*.json`` holds a table for each GPU that was measured, written by
``scripts/bench_fusions.py``. A proven rewrite asks it with what is known while compiling: the
fusion, the width of a row (the head dimension for attention) and the dtype. Token counts are
not asked for, since one compilation serves many, and nothing is ever timed at a call.

The rule:

- The rows that decide are those of the nearest measured width, on a logarithmic scale, among
  dtypes of the same size: bfloat16 answers for float16 and the other way round. At equal
  distance the dtype itself goes first, then the narrower width.
- Their speed-ups, Inductor's time over ours, are joined as a geometric mean over token counts
  in which each count weighs twice the next smaller one. Time is spent at large counts; a few
  microseconds at small ones still count for something.
- The fusion fires unless that is below ``THRESHOLD``: ours may be 3 % slower, which is what
  two runs of one kernel differ by.
- What no row covers fires: another size of dtype, or a fusion that was not measured.
- A GPU without a table of its own goes by ``MEASURED_GPU``'s. On a CPU, where a fused op runs
  its reference and speed is no aim, everything fires.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fusedbwd.numerics import dtype_name

DATA = Path(__file__).parent / "data"
MEASURED_GPU = "NVIDIA H200"
THRESHOLD = 0.97


@dataclass(frozen=True)
class Row:
    """One measurement: median times of a backward with the fusion and without it.

    Attributes:
        fusion: its name.
        width: elements of a row; the head dimension for attention.
        dtype: of the gradients, as in ``torch.bfloat16`` without the prefix.
        tokens: rows; tokens where a token has several (heads).
        ours_ms, inductor_ms: milliseconds on the GPU.
    """

    fusion: str
    width: int
    dtype: str
    tokens: int
    ours_ms: float
    inductor_ms: float


@dataclass(frozen=True)
class Table:
    """The measurements of one GPU, named as torch names it."""

    gpu: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether a fusion pays, and why in words."""

    pays: bool
    reason: str


@cache
def tables() -> dict[str, Table]:
    """The shipped tables by their GPU's name."""
    found = {}
    for path in sorted(DATA.glob("fusions_*.json")):
        content = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in content["fusions"])
        found[content["gpu"]] = Table(content["gpu"], rows)
    return found


def table_for(device: torch.device) -> Table | None:
    """The table that decides for ``device``; None on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else MEASURED_GPU
    return tables().get(name) or tables().get(MEASURED_GPU)


def verdict(fusion: str, width: int, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Whether ``fusion`` pays for rows of ``width`` elements of ``dtype``; see the module."""
    table = table_for(device)
    if table is None:
        return Verdict(True, f"not measured on a {device.type}")
    rows = deciding(table.rows, fusion, width, dtype)
    if not rows:
        return Verdict(True, f"not measured in {dtype_name(dtype)}")
    gained = speedup(rows)
    nearest, measured = rows[0].width, rows[0].dtype
    where = f"at width {nearest} in {measured}"
    if (nearest, measured) != (width, dtype_name(dtype)):
        where += f", the nearest to {width} in {dtype_name(dtype)}"
    where += f" (measured on an {table.gpu})"
    if gained < THRESHOLD:
        return Verdict(False, f"Inductor's own code is {1 / gained:.2f}x faster {where}")
    return Verdict(True, f"{gained:.2f}x the speed of Inductor's own code {where}")


def deciding(rows: Sequence[Row], fusion: str, width: int, dtype: torch.dtype) -> list[Row]:
    """The rows of the nearest measured width and dtype; none where no dtype has that size."""
    candidates = [
        r for r in rows if r.fusion == fusion and getattr(torch, r.dtype).itemsize == dtype.itemsize
    ]
    if not candidates:
        return []

    def distance(row: Row) -> tuple:
        return abs(math.log(row.width / width)), row.dtype != dtype_name(dtype), row.width

    nearest = min(candidates, key=distance)
    return [r for r in candidates if (r.width, r.dtype) == (nearest.width, nearest.dtype)]


def speedup(rows: Sequence[Row]) -> float:
    """Inductor's time over ours: a geometric mean over token counts, each of which weighs
    twice the next smaller one."""
    ordered = sorted(rows, key=lambda r: r.tokens)
    weights = [2**rank for rank in range(len(ordered))]
    logs = [math.log(r.inductor_ms / r.ours_ms) for r in ordered]
    total = sum(w * x for w, x in zip(weights, logs, strict=True))
    return math.exp(total / sum(weights))


def speedups(rows: Sequence[Row]) -> dict[tuple[str, int, str], float]:
    """The joined :func:`speedup` of every (fusion, width, dtype) in ``rows``, in their order."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r.fusion, r.width, r.dtype), []).append(r)
    return {size: speedup(group) for size, group in groups.items()}
