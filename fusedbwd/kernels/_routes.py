"""Which route a fused matmul takes, by token count: cuBLAS, or the Triton kernel in some tile; and
whether a float32 matmul gets a K-major copy of its weight.

The answer comes from measurements that are shipped as data (``fusedbwd/data``, written by
``scripts/tune.py`` and ``scripts/bench_layouts.py``), never from timing at a call. The rule:

* Token counts fall into the classes that :data:`EDGES` bounds. In each class the fastest route
  wins, by the geometric mean over the class's measured token counts; a kernel that is anywhere
  in the class below :data:`WORTH` of cuBLAS's speed is out. Beyond the last edge, where
  nothing was measured there, the route before it stays.
* A shape that was not measured takes the nearest measured one's routes, by the logarithm of its
  depth and width, if neither differs by more than :data:`REACH` times; else cuBLAS.
* float16 goes by bfloat16's measurements, and a GPU by those of its compute capability; where
  there are none, cuBLAS.

Where the number of tokens is a symbol, comparing it with an edge leaves a guard: the compiler
compiles one variant per range of tokens, and a call costs nothing more than before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusedbwd.kernels._matmul import MatmulTile, describable, takes

T = TypeVar("T")

DATA = Path(__file__).parents[1] / "data"

EDGES = (192, 768, 3072, 8192)
"""The last token counts of the classes but the largest, which has no end."""

WORTH = 0.97
"""The least speed, relative to cuBLAS's, at which a kernel may be used."""

REACH = 4.0
"""How far a measured shape's depth and width may be from those it stands in for."""

_DEFAULT_CAPABILITY = (9, 0)  # H200, as in _op.sm_count
_SETTLED = 0.99  # a class keeps the one before's route if that is so close to the best


class Shape(NamedTuple):
    """A matmul as the table knows it: [tokens, depth] @ [depth, width].

    Attributes:
        op: name of the fused op.
        depth: length of the sum, over all pairs of a sum of matmuls.
        width: columns of the result.
        pairs: matmuls that are added up.
        residual: whether a residual is added.
        out_dtype: dtype of the result.
    """

    op: str
    depth: int
    width: int
    pairs: int
    residual: bool
    out_dtype: str


def route(shape: Shape, tokens: int | torch.SymInt, device: torch.device) -> MatmulTile | None:
    """The tile in which the Triton kernel is launched; None for cuBLAS."""
    ranges = _routes(shape, _capability(device))
    if len(ranges) > 1 and free_unbacked_symbols(tokens):
        return None  # nobody can say how many tokens there will be
    return at(ranges, tokens)


def at(ranges: Sequence[tuple[float, T]], tokens: int | torch.SymInt) -> T:
    """What ``ranges``, each with its end and the last without one, have for ``tokens``; of a
    symbol, every comparison is a guard."""
    for end, found in ranges[:-1]:
        if tokens <= end:
            return found
    return ranges[-1][1]


def tile_for(
    shape: Shape, *operands: torch.Tensor, epilogue: Sequence[torch.Tensor] = ()
) -> MatmulTile | None:
    """:func:`route` for these operands, the first of which has the tokens as rows; None too
    where the kernels do not take them, and for a staged tile that would not be staged because of
    the ``epilogue``'s operands or the 16-bit result's width: it was measured staged."""
    first = operands[0]
    if not takes(first.dtype) or not describable(*operands):
        return None
    tile = route(shape, first.shape[0], first.device)
    if tile is not None and tile.staged and epilogue:
        return tile if shape.width % 8 == 0 and describable(*epilogue) else None
    return tile


def pays(shape: Shape, device: torch.device) -> bool:
    """Whether the Triton kernel is used for any number of tokens. True for a CPU, where ops run
    their references and nothing is measured."""
    if device.type != "cuda":
        return True
    return any(tile is not None for _, tile in _routes(shape, _capability(device)))


def k_major_shape(depth: int, width: int) -> Shape:
    """The float32 matmul by a weight [depth, width], as the table of layouts knows it."""
    return Shape("k_major_weights", depth, width, 1, False, "float32")


def k_major(depth: int, width: int, device: torch.device) -> tuple[tuple[float, bool], ...]:
    """For ``grad [tokens, depth] @ weight [depth, width]`` in TF32, ranges of tokens, each by its
    end, with whether a K-major copy of the weight pays there, the copy's time included; none at all
    where that was not measured."""
    row = nearest(k_major_shape(depth, width), measurements(_capability(device)))
    return () if row is None else tuple((end, i is not None) for end, i in classes(row))


def _capability(device: torch.device) -> tuple[int, int] | None:
    """Of ``device``; meta tensors stand for this machine's GPU, or the default one's."""
    if device.type == "cpu":
        return None
    if not torch.cuda.is_available():
        return _DEFAULT_CAPABILITY
    return torch.cuda.get_device_capability(device if device.type == "cuda" else None)


@cache
def _routes(
    shape: Shape, capability: tuple[int, int] | None
) -> tuple[tuple[float, MatmulTile | None], ...]:
    """Ranges of tokens, each by its end, with a tile or None; adjacent ones differ."""
    return ranges(nearest(shape, measurements(capability)))


@cache
def _tables() -> tuple[tuple[tuple[int, int], list[Mapping[str, Any]]], ...]:
    """The shipped tables: compute capability and rows of each."""
    paths = sorted(p for kind in ("matmul", "layouts") for p in DATA.glob(f"{kind}_*.json"))
    found = (json.loads(path.read_text()) for path in paths)
    return tuple((tuple(table["capability"]), table["rows"]) for table in found)


def measured_on(device: torch.device | None = None) -> dict[str, Any]:
    """The head of a table that is measured on this GPU, with these versions."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def write_table(path: Path, head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a table as those shipped are written, a row a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")


def measurements(capability: tuple[int, int] | None) -> tuple[Mapping[str, Any], ...]:
    """The rows measured on GPUs of this compute capability."""
    return tuple(
        row for measured_on, rows in _tables() if measured_on == capability for row in rows
    )


def nearest(shape: Shape, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The measured row that stands for ``shape``."""

    def distance(row: Mapping[str, Any]) -> float:
        steps = (row["depth"] / shape.depth, row["width"] / shape.width)
        return max(abs(math.log(s)) for s in steps)

    if not shape.depth or not shape.width:
        return None
    out_dtype = "bfloat16" if shape.out_dtype == "float16" else shape.out_dtype
    kind = (shape.op, shape.pairs, shape.residual, out_dtype)
    alike = [
        r
        for r in rows
        if (r["op"], r["pairs"], r["residual"], r["out_dtype"]) == kind
        and distance(r) <= math.log(REACH)
    ]
    return min(alike, key=distance, default=None)


def ranges(
    row: Mapping[str, Any] | None,
) -> tuple[tuple[float, MatmulTile | None], ...]:
    """:func:`classes` of a row of tiles; cuBLAS for any number of tokens if there is none."""
    if row is None:
        return ((math.inf, None),)
    return tuple((end, None if i is None else _tile(row["routes"][i])) for end, i in classes(row))


def classes(row: Mapping[str, Any]) -> tuple[tuple[float, int | None], ...]:
    """The rule applied to one measured row, ``{"tokens": [...], "cublas_ms": [...], "routes":
    [{"tile": {...}, "ms": [...]}, ...]}``, entries of lists belonging together. Returns ranges of
    tokens, each by its end, with the number of the route, or None for cuBLAS."""
    found: list[tuple[float, int | None]] = []
    low = 0.0
    for high in (*EDGES, math.inf):
        inside = [i for i, t in enumerate(row["tokens"]) if low < t <= high]
        low = high
        speeds: dict[int | None, float] = {None: 1.0}
        speeds |= {i: s for i, r in enumerate(row["routes"]) if (s := _speed(row, r, inside))}
        best = max(speeds, key=speeds.__getitem__)
        unmeasured = high == math.inf and not inside
        if found and (unmeasured or speeds.get(found[-1][1], 0.0) >= _SETTLED * speeds[best]):
            best = found[-1][1]
        if found and found[-1][1] == best:
            found.pop()
        found.append((high, best))
    return tuple(found)


def _speed(row: Mapping[str, Any], candidate: Mapping[str, Any], where: Sequence[int]) -> float:
    """Speed relative to cuBLAS; 0 where the kernel is out, or was not measured."""
    speeds = [row["cublas_ms"][i] / ms if (ms := candidate["ms"][i]) else 0.0 for i in where]
    if not speeds or min(speeds) < WORTH:
        return 0.0
    return math.exp(sum(map(math.log, speeds)) / len(speeds))


@cache
def tiles(op: str) -> tuple[tuple[MatmulTile, tuple[int, int]], ...]:
    """Every tile in which an op's kernel is launched, and on which compute capability."""
    used: dict[tuple[MatmulTile, tuple[int, int]], None] = {}
    for capability, rows in _tables():
        for row in rows:
            if row["op"] == op:
                found = (tile for _, tile in ranges(row) if tile is not None)
                used |= dict.fromkeys((tile, capability) for tile in found)
    return tuple(used)


def _tile(candidate: Mapping[str, Any]) -> MatmulTile:
    return MatmulTile(**candidate["tile"])
