"""The second half of a deterministic column sum: adding up what each program summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedbwd.kernels._op import launch

MAX_SUMS = 3


@triton.jit
def _sum_partials_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    programs,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    which = tl.program_id(1)
    in_width = column < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < programs) & in_width
        total += tl.load(partial_ptr + (row * SUMS + which) * WIDTH + column, mask, 0.0)
    total = tl.sum(total, 0, keep_dims=True)
    if which == 0:
        tl.store(first_ptr + column, total, in_width)
    # No store at all to a sum that is not there: torch would take it for a write to what stands
    # in for it, and copy that first.
    if SUMS > 1:  # noqa: SIM102
        if which == 1:
            tl.store(second_ptr + column, total, in_width)
    if SUMS > 2:  # noqa: SIM102
        if which == 2:
            tl.store(third_ptr + column, total, in_width)


def sum_partials(partial: torch.Tensor) -> list[torch.Tensor]:
    """The column sums of ``partial`` [programs, sums, width], float32, sums at most three.

    Returns:
        One [width] tensor per sum, each with storage of its own; always summed in one order.
    """
    programs, sums, width = partial.shape
    totals = [partial.new_empty((width,)) for _ in range(sums)]
    # What a sum that is not there would be written to: never followed.
    spare = [partial] * (MAX_SUMS - sums)
    columns = 32
    launch(_sum_partials_kernel, (-(-width // columns), sums))(
        partial,
        *totals,
        *spare,
        programs,
        WIDTH=width,
        SUMS=sums,
        ROWS=64,
        COLUMNS=columns,
        num_warps=8,
    )
    return totals
