"""What the kernel files share: operand layout, accumulation dtype, tiles of the norm kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl  # noqa: F401 (what the interpreter asks of a file with kernels)

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._op import next_power_of_2, sm_count


class NormTile(NamedTuple):
    """How a norm kernel covers rows of one width: ``rows`` x ``columns`` elements at a time."""

    rows: int
    columns: int
    warps: int
    programs_per_sm: int

    def programs(self, device: torch.device) -> int:
        """Programs in the grid, each looping over its share of the rows."""
        return sm_count(device) * self.programs_per_sm


@triton.jit
def by_fours(column):
    """``column``, of which the compiler knows no more than that fours are neighbours.

    A store of 16-bit elements there is laid out as one of float32 is. It would else take eight to
    a thread, and what is stored in both dtypes be moved between threads through shared memory.
    """
    return column // 4 * 4 + column % 4


def max_norm_width(sums: int) -> int:
    """Widest row whose elements and ``sums`` running sums of it fit in registers."""
    return 16384 // sums


def norm_tile(width: int, sums: int) -> NormTile:
    """The tile for rows of ``width`` elements.

    Found on an H200, where what counts is how many loads are in flight. Narrow rows do best
    with 8 elements a thread and 32 warps a multiprocessor, wide ones with up to 32 elements a
    thread, whose loads are all issued before the first is used, and 16 warps. With two sums in
    registers, wide rows get half as many elements a thread; narrow ones twice as many, to make
    up for the fewer warps that fit, and the narrowest 2 warps a program, which wait less for one
    another.

    Args:
        width: elements in a row, H.
        sums: parameter gradients accumulated beside dx: 1 (RMSNorm) or 2 (LayerNorm).

    Raises:
        UnsupportedError: ``width`` is not in [1, max_norm_width(sums)].
    """
    widest = max_norm_width(sums)
    if not 0 < width <= widest:
        raise UnsupportedError(
            f"norm width: expected 1 to {widest} (a row is held in registers), got {width}"
        )
    columns = next_power_of_2(width)
    if columns <= 512 and sums == 2:
        return NormTile(1024 // columns, columns, 2, 8)
    if columns <= 2048:
        warps = max(4, columns // 256)
        return NormTile(sums * max(1, 1024 // columns), columns, warps, 32 // warps)
    warps = min(16, max(8, sums * columns // 1024))
    return NormTile(1, columns, warps, 16 // warps)


def unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` itself if neighbours in its last dim are neighbours in memory, else a copy."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def row_stride(matrix: torch.Tensor | None) -> int:
    """Elements from one row to the next; 0 for an absent operand, which is never read."""
    return 0 if matrix is None else matrix.stride(0)


def check_shapes(shape: Sequence, **operands: torch.Tensor | None) -> None:
    """Holds a fused op's operands to ``shape``, in its fake: kernels read without bounds of
    their own. Absent operands pass.

    Raises:
        RuntimeError: an operand has another shape; sizes that are open become a guard.
    """
    for name, operand in operands.items():
        if operand is None:
            continue
        found = operand.shape
        message = f"{name}: expected shape {list(shape)}, got {list(found)}"
        torch._check(len(found) == len(shape), lambda m=message: m)
        for size, expected in zip(found, shape, strict=True):
            torch._check(size == expected, lambda m=message: m)


def check_norm_shapes(grad, x, weight, residual, **statistics: torch.Tensor | None) -> None:
    """:func:`check_shapes` for a norm of ``x`` [T, H]: ``statistics`` are [T, 1] or [T]."""
    tokens, width = x.shape
    check_shapes((tokens, width), grad=grad, residual=residual)
    check_shapes((width,), weight=weight)
    for name, statistic in statistics.items():
        if statistic is not None:
            check_shapes((tokens, 1)[: statistic.dim()], **{name: statistic})


def accumulation_dtype(*operands: torch.Tensor) -> torch.dtype:
    """float64 if an operand is float64, else float32: what references compute in."""
    double = any(t.dtype == torch.float64 for t in operands)
    return torch.float64 if double else torch.float32
