"""What the kernel files share: operand layout, accumulation dtype, tiles of the norm kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._op import next_power_of_2, sm_count

MAX_NORM_WIDTH = 16384
"""Widest row that the norm kernels hold in registers."""


class NormTile(NamedTuple):
    """How a norm kernel covers rows of one width: ``rows`` x ``columns`` elements at a time."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs_per_sm: int

    def programs(self, device: torch.device) -> int:
        """Programs in the grid, each looping over its share of the rows."""
        return sm_count(device) * self.programs_per_sm


def supported(width: int) -> bool:
    """Whether the norm kernels take rows of ``width`` elements."""
    return 0 < width <= MAX_NORM_WIDTH


def norm_tile(width: int) -> NormTile:
    """The tile for rows of ``width`` elements.

    About 16 elements a thread: two to four 16-byte loads of each operand in flight, and room
    in registers for the weight and the parameter-gradient sums, which stay there all along.

    Raises:
        UnsupportedError: ``width`` is not in [1, 16384].
    """
    if not supported(width):
        raise UnsupportedError(
            f"norm width: expected 1 to {MAX_NORM_WIDTH} (a row is held in registers), got {width}"
        )
    columns = next_power_of_2(width)
    rows = max(1, 2048 // columns)
    warps = min(32, max(4, rows * columns // 512))
    return NormTile(rows, columns, warps, stages=1, programs_per_sm=max(1, 32 // warps))


def unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` itself if neighbours in its last dim are neighbours in memory, else a copy."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def row_stride(matrix: torch.Tensor | None) -> int:
    """Elements from one row to the next; 0 for an absent operand, which is never read."""
    return 0 if matrix is None else matrix.stride(0)


def accumulation_dtype(*operands: torch.Tensor) -> torch.dtype:
    """float64 if an operand is float64, else float32: what references compute in."""
    double = any(t.dtype == torch.float64 for t in operands)
    return torch.float64 if double else torch.float32
