"""What the matmul kernels share: tiles, their order, loads, the main loop, split tiles.

Every kernel is persistent: a fixed number of programs, each taking every so many-th tile of the
result, so that a grid needs no number of tokens. Operands are read by tensor descriptors, made
in the kernel, or by pointers where their layout rules descriptors out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch._library.triton import is_wrap_triton_enabled
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedbwd import compat
from fusedbwd.kernels._op import launch, sm_count
from fusedbwd.kernels._tiles import row_stride

_DESCRIPTOR_ALIGNMENT = 16  # bytes: of a descriptor's base and of its row stride


class MatmulTile(NamedTuple):
    """How a matmul kernel covers its result.

    Attributes:
        rows, columns: size of a tile of the result.
        depth: steps of the summed dimension loaded at a time.
        stages: loads in flight, the one being multiplied included.
        warps: warps a program.
        programs_per_sm: programs that share a multiprocessor; with two, one multiplies while
            the other finishes a tile, if both fit.
        subtiles: pieces, side by side, in which a finished tile is processed, a power of two.
            More pieces need fewer registers.
        group: rows of tiles that are covered column by column, for reuse in the L2 cache.
        split: let several programs share one tile of an incomplete last round (sum_matmul only).
        early: how many pieces ahead, at most all, the epilogue's operands are loaded: the first
            so many before the main loop, which hides their latency, at the price of registers
            (matmuls with an elementwise epilogue; sum_matmul's residual, if tiles are whole).
        staged: load the epilogue's operands by descriptors, a piece at a time through shared
            memory, and store 16-bit results likewise (matmuls with an elementwise epilogue; of
            sum_matmul only the residual's load).
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    programs_per_sm: int = 1
    subtiles: int = 1
    group: int = 8
    split: bool = False
    early: int = 0
    staged: bool = False

    def programs(self, device: torch.device) -> int:
        """Programs in the grid."""
        return sm_count(device) * self.programs_per_sm

    def options(self, device: torch.device) -> dict[str, int]:
        """What every matmul kernel is launched with."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "GROUP": self.group,
            "SUBTILES": self.subtiles,
            "PROGRAMS": self.programs(device),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply in ``dtype``; float32 and float64 are left to cuBLAS."""
    return dtype in (torch.bfloat16, torch.float16)


def describable(*operands: torch.Tensor) -> bool:
    """Whether the kernels can read ``operands`` by tensor descriptors, known before they run."""
    if not compat.scratch_is_sound():
        return False
    device = operands[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return all(_describable(operand) for operand in operands)


def _describable(operand: torch.Tensor) -> bool:
    # While tracing there is no address; Inductor sees to it that storage is aligned.
    traced = is_wrap_triton_enabled() or operand.is_meta
    start = operand.storage_offset() * operand.itemsize if traced else operand.data_ptr()
    step = operand.stride(0)
    return (
        statically_known_true(operand.stride(1) == 1)
        and statically_known_true(start % _DESCRIPTOR_ALIGNMENT == 0)
        and statically_known_true(step * operand.itemsize % _DESCRIPTOR_ALIGNMENT == 0)
        and statically_known_true(step >= operand.shape[1])
    )


def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` by cuBLAS, accumulated in float32 and rounded once to ``out_dtype``."""
    if out_dtype == a.dtype:
        return torch.mm(a, b)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


@triton.jit
def operand(
    ptr,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """What :func:`block` loads from: a descriptor of ``ptr``'s matrix, or ``ptr`` itself."""
    if DESCRIBED:
        return tl.make_tensor_descriptor(ptr, [rows, columns], [stride, 1], [ROWS, COLUMNS])
    else:
        return ptr


@triton.jit
def block(
    source,
    row,
    column,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ONCE: tl.constexpr = False,
):
    """Elements [row, row + ROWS) x [column, column + COLUMNS); zeros outside the matrix.

    ONCE: no other program reads them. They then do not push those out of the L2 cache that others
    do read (by pointers; a descriptor's loads have no such hint)."""
    if DESCRIBED:
        return source.load([row, column])
    else:
        r = (row + tl.arange(0, ROWS))[:, None].to(tl.int64)
        c = (column + tl.arange(0, COLUMNS))[None, :]
        mask = (r < rows) & (c < columns)
        EVICTION: tl.constexpr = "evict_first" if ONCE else ""
        return tl.load(source + r * stride + c, mask, 0.0, eviction_policy=EVICTION)


@triton.jit
def place(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, column by column."""
    width = GROUP * tiles_across
    first = tile // width * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def rounds(tiles, programs, steps, SPLIT: tl.constexpr):
    """How the tiles of the last round are shared out.

    Returns the tiles of complete rounds, which come first; those left over; and among how many
    programs each of the latter is split: as many as there are, and no more than the ``steps``
    of the sum.
    """
    rest = tiles % programs
    splits = 1
    if SPLIT:
        splits = tl.maximum(tl.minimum(programs // tl.maximum(rest, 1), steps), 1)
        splits = tl.where(rest == 0, 1, splits)
    return tiles - rest, rest, splits


@triton.jit
def share(unit, full, rest, splits, steps):
    """The tile that unit of work ``unit`` belongs to, and its steps of the sum, [begin, end).

    Units are whole tiles, then the first share of every tile left over, then the second, and so
    on: programs that run side by side share operands, as they do on whole tiles.
    """
    left = unit - full
    split = tl.maximum(left, 0) // tl.maximum(rest, 1)
    splits = tl.where(left < 0, 1, splits)
    return unit - split * rest, steps * split // splits, steps * (split + 1) // splits


@triton.jit
def multiply(
    acc,
    a,
    b,
    row,
    column,
    a_rows,
    depth,
    b_columns,
    a_stride,
    b_stride,
    begin,
    end,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """acc + a[row:, steps] @ b[steps, column:], over steps [begin, end) of DEPTH each."""
    for step in tl.range(begin, end):
        k = step * DEPTH
        x = block(a, row, k, a_rows, depth, a_stride, ROWS, DEPTH, DESCRIBED)
        y = block(b, k, column, depth, b_columns, b_stride, DEPTH, COLUMNS, DESCRIBED)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def subtiles(tile, COUNT: tl.constexpr):
    """``tile`` in COUNT pieces side by side, from left to right."""
    if COUNT == 1:
        return (tile,)
    else:
        halves = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2)
        left, right = tl.split(halves.permute(0, 2, 1))
        return subtiles(left, COUNT // 2) + subtiles(right, COUNT // 2)


@triton.jit
def store_piece(target, piece, row, column, rows, columns, stride, DESCRIBED: tl.constexpr):
    """Writes ``piece`` to its place in a matrix, what :func:`operand` made of its pointer."""
    if DESCRIBED:
        target.store([row, column], piece)
    else:
        r = (row + tl.arange(0, piece.shape[0]))[:, None].to(tl.int64)
        c = (column + tl.arange(0, piece.shape[1]))[None, :]
        tl.store(target + r * stride + c, piece, (r < rows) & (c < columns))


@triton.jit
def store_partial(
    partial_ptr,
    slot,
    acc,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """Writes one program's share of a split tile to its slot of the workspace."""
    WIDTH: tl.constexpr = COLUMNS // SUBTILES
    inner = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, WIDTH)[None, :]
    pieces = subtiles(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        tl.store(partial_ptr + slot.to(tl.int64) * ROWS * COLUMNS + i * WIDTH + inner, pieces[i])


@triton.jit
def store_sum(
    out_ptr,
    residual_ptr,
    residual_stride,
    acc,
    row,
    column,
    rows,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Writes ``acc``, plus the residual there, to its place in the result [rows, COLUMNS]."""
    if HAS_RESIDUAL:
        acc += block(
            residual_ptr, row, column, rows, COLUMNS, residual_stride,
            acc.shape[0], acc.shape[1], False,
        ).to(tl.float32)  # fmt: skip
    rounded = acc.to(out_ptr.dtype.element_ty)
    store_piece(out_ptr, rounded, row, column, rows, COLUMNS, COLUMNS, False)


@triton.jit
def _join_kernel(
    partial_ptr,
    out_ptr,
    residual_ptr,
    rows,
    steps,
    residual_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STRIP: tl.constexpr,
):
    # One split tile, and STRIP of its rows. Where no tile is split there is nothing to do.
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(WIDTH, COLUMNS)
    full, rest, splits = rounds(tiles_down * tiles_across, PROGRAMS, steps, True)
    index = tl.program_id(0)
    strip = tl.program_id(1) * STRIP
    if (index < rest) & (splits > 1):
        down, across = place(full + index, tiles_down, tiles_across, GROUP)
        inner = (strip + tl.arange(0, STRIP))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        total = tl.zeros([STRIP, COLUMNS], tl.float32)
        for split in tl.range(0, splits):
            slot = (split * rest + index).to(tl.int64)
            total += tl.load(partial_ptr + slot * ROWS * COLUMNS + inner)
        store_sum(
            out_ptr,
            residual_ptr,
            residual_stride,
            total,
            down * ROWS + strip,
            across * COLUMNS,
            rows,
            WIDTH,
            HAS_RESIDUAL,
        )


def workspace(like: torch.Tensor, tile: MatmulTile) -> torch.Tensor | None:
    """Room for what the programs that share a tile each computed; None if tiles are whole."""
    if not tile.split:
        return None
    shape = (tile.programs(like.device), tile.rows, tile.columns)
    return like.new_empty(shape, dtype=torch.float32)


def join(
    partial: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    steps: int,
    tile: MatmulTile,
) -> None:
    """Adds up the shares of every split tile, in a fixed order, into its place in ``out``."""
    strip = min(tile.rows, 4096 // tile.columns)
    programs = partial.shape[0]
    # A tile is split only if two programs or more are there for each that is left over.
    launch(_join_kernel, (programs // 2, tile.rows // strip))(
        partial,
        out,
        out if residual is None else residual,
        out.shape[0],
        steps,
        row_stride(residual),
        WIDTH=out.shape[1],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=tile.group,
        PROGRAMS=programs,
        HAS_RESIDUAL=residual is not None,
        STRIP=strip,
        num_warps=4,
    )
