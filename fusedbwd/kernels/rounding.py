"""Rounding several tensors to another dtype in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._op import define_op, launch

MAX_ROUNDED = 4
_BLOCK = 4096  # elements a program: 16-byte stores by 4 warps, four times each


def round_to_reference(xs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each tensor in ``dtype``, rounded to nearest, ties to even.

    Args:
        xs: one to four tensors of any shapes, layouts and float dtypes.
        dtype: of the results.

    Returns:
        Fresh contiguous tensors.
    """
    return [x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in xs]


@triton.jit
def _round_block(x_ptr, out_ptr, elements, block, BLOCK: tl.constexpr):
    if (block >= 0) & (block * BLOCK < elements):
        index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, index < elements)
        tl.store(out_ptr + index, x.to(out_ptr.dtype.element_ty), index < elements)


@triton.jit
def _round_to_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    out0_ptr,
    out1_ptr,
    out2_ptr,
    out3_ptr,
    elements0,
    elements1,
    elements2,
    elements3,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Programs are numbered through the tensors, one after another.
    block = tl.program_id(0)
    _round_block(x0_ptr, out0_ptr, elements0, block, BLOCK)
    if COUNT > 1:
        block -= tl.cdiv(elements0, BLOCK)
        _round_block(x1_ptr, out1_ptr, elements1, block, BLOCK)
    if COUNT > 2:
        block -= tl.cdiv(elements1, BLOCK)
        _round_block(x2_ptr, out2_ptr, elements2, block, BLOCK)
    if COUNT > 3:
        block -= tl.cdiv(elements2, BLOCK)
        _round_block(x3_ptr, out3_ptr, elements3, block, BLOCK)


def round_to_launch(xs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Launches the kernel: one program a block of 4096 elements."""
    if not 0 < len(xs) <= MAX_ROUNDED:
        raise UnsupportedError(f"round_to: expected 1 to {MAX_ROUNDED} tensors, got {len(xs)}")
    xs = [x.contiguous() for x in xs]
    outs = [x.new_empty(x.shape, dtype=dtype) for x in xs]
    elements = [x.numel() for x in xs]
    blocks = sum((n + _BLOCK - 1) // _BLOCK for n in elements)
    # An absent tensor's pointer is never followed: any tensor stands in for it.
    absent = MAX_ROUNDED - len(xs)
    launch(_round_to_kernel, (blocks,))(
        *xs,
        *xs[:1] * absent,
        *outs,
        *outs[:1] * absent,
        *elements,
        *[0] * absent,
        COUNT=len(xs),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return outs


round_to = define_op(
    "round_to(Tensor[] xs, ScalarType dtype) -> Tensor[]",
    reference=round_to_reference,
    launcher=round_to_launch,
    fake=lambda xs, dtype: [x.new_empty(x.shape, dtype=dtype) for x in xs],
)
