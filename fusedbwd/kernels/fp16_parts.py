"""float32 tensors as one or two float16 parts under a power-of-two scale of each tensor.

The scale takes the largest magnitude below 2^15, and that of a sample of the tensor to 2^12 at
least, so that 25 powers of two below it are normal numbers of float16, which has the 10 mantissa
bits of TF32. The first part is the scaled tensor rounded; the second is what that left over, times
2^11 so that it is as far from float16's denormals as the first. Ootomo and Yokota, "Recovering
single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance",
2022, split float32 in this way.

A sample, every 16th block of a large tensor, finds the scale, so that the tensor is read once; its
maximum is found on the way. Where that is too large for the scale, which takes 4 to 8 times the
sample's, the tensor is split again.

Elements further below the largest lose bits: up to 2^-25 of the scaled tensor in one part, 2^-36
in two. That is harmless where a much larger element stands near them, which TF32, or float32,
may change by more. A tensor is *unsafe*, and must be multiplied as it is, where some segment of a
row or column, of up to 64 elements, has an element that loses bits and none whose scaled magnitude
is 2^-7 or more: elsewhere a loss is at most 2^-7 (in two parts 2^-5) of what rounding to TF32
(float32) may change an element of the same segment by. A tensor that is not finite is unsafe too.
The one case that this does not see is a sum in which the other operand is smaller by many powers of
two, just at each such larger element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._op import define_op, launch, next_power_of_2, sm_count

MAX_SPLIT = 4
PART_SCALE = 2048.0
"""What the second part is multiplied with."""

SAMPLE_TOP = 12
"""The sample's largest magnitude is scaled into [2^12, 2^13), ..."""

TOP = 14
"""... or the tensor's into [2^14, 2^15), whichever scale is smaller."""

_ZERO_EXPONENT = 150  # for a maximum of zero: more than any other number above denormals needs
_SAMPLED = 16  # one in so many blocks is in the sample
_BLOCK = 4096
_SEGMENT = 64
_LEAST = {1: 2.0**-14, 2: 2.0**-13}  # by parts: the least magnitude that keeps all its bits
_LARGE = 2.0**-7  # a magnitude beside which lost bits do not count


def programs(device: torch.device) -> int:
    """Programs a tensor, as many as run at a time; each leaves two maxima and a flag."""
    return 2 * sm_count(device)


def results_per_tensor(parts: int) -> int:
    """Parts, maxima of the sample and of all, and flags."""
    return parts + 3


def fp16_parts_reference(xs: Sequence[torch.Tensor], parts: int) -> list[torch.Tensor]:
    """Splits each tensor, and says whether the parts may stand for it.

    Args:
        xs: one to four float32 tensors of any shapes and layouts.
        parts: 1 or 2.

    Returns:
        For each tensor in turn: its parts, contiguous float16 tensors of its shape; maxima of a
        sample (here the whole tensor) and of all of it, float32 [P] each, whence the scale; flags,
        int32 [P], any of which is 1 where the tensor is unsafe.
    """
    return [result for x in xs for result in _split(x, parts)]


def scale_exponent(sample: torch.Tensor, maxima: torch.Tensor) -> int:
    """e, where the tensor was multiplied with 2^e."""
    return min(_exponent(sample.max(), SAMPLE_TOP), _exponent(maxima.max(), TOP))


def _exponent(peak: torch.Tensor, top: int) -> int:
    if peak == 0:
        return _ZERO_EXPONENT
    return top + 1 - int(torch.frexp(peak.double()).exponent) if peak.isfinite() else 0


def _split(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    count = programs(x.device)
    peak = x.abs().max() if x.numel() else x.new_zeros(())
    maxima = peak.expand(count).clone()
    exponent = scale_exponent(maxima, maxima)
    scaled = torch.ldexp(x.double(), x.new_tensor(exponent, dtype=torch.float64))
    scaled = scaled.float().contiguous()
    first = scaled.half()
    second = ((scaled - first.float()) * PART_SCALE).half()
    flags = maxima.new_full((count,), int(_is_unsafe(x, scaled, parts)), dtype=torch.int32)
    return [*(first, second)[:parts], maxima, maxima.clone(), flags]


def _is_unsafe(x: torch.Tensor, scaled: torch.Tensor, parts: int) -> bool:
    if not x.numel():
        return False
    if not x.isfinite().all():
        return True
    size = scaled.abs().reshape(-1, x.shape[-1] if x.dim() else 1)
    loses = (x != 0).reshape(size.shape) & (size < _LEAST[parts])
    if not loses.any():
        return False
    return _has_small_segment(size, loses) or _has_small_segment(size.t(), loses.t())


def _has_small_segment(size: torch.Tensor, loses: torch.Tensor) -> bool:
    """Whether a segment of a row loses bits and has no large element."""
    columns = size.shape[1]
    length = min(columns, _SEGMENT)
    starts = torch.arange(0, columns, _SEGMENT, device=size.device).clamp(max=columns - length)
    segment = starts[:, None] + torch.arange(length, device=size.device)
    return bool((loses[:, segment].any(-1) & (size[:, segment].amax(-1) < _LARGE)).any())


@triton.jit
def times_power_of_2(x, exponent):
    """``x * 2^exponent`` for exponents in [-370, 370], in steps that are themselves float32."""
    third = exponent // 3
    rest = exponent - 2 * third
    step = ((third + 127) << 23).to(tl.float32, bitcast=True)
    return x * step * step * ((rest + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent_of(maxima_ptr, TOP: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The exponent that takes the largest of the maxima into [2^TOP, 2^(TOP + 1))."""
    index = tl.arange(0, PADDED)
    peak = tl.max(tl.load(maxima_ptr + index, index < COUNT, 0.0), 0)
    # Denormal numbers have no exponent of their own to read.
    tiny = peak < 7.888609052210118e-31  # 2^-100
    bits = tl.where(tiny, peak * 18446744073709551616.0, peak).to(tl.int32, bitcast=True)
    exponent = TOP + 127 - (bits >> 23) + tl.where(tiny, 64, 0)
    exponent = tl.where(peak < float("inf"), exponent, 0)
    return tl.where(peak == 0, 150, exponent)  # _ZERO_EXPONENT


@triton.jit
def exponent_of_scale(sample_ptr, maxima_ptr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The exponent by whose power of two a tensor with these maxima was multiplied."""
    of_sample = _exponent_of(sample_ptr, 12, COUNT, PADDED)  # SAMPLE_TOP
    return tl.minimum(of_sample, _exponent_of(maxima_ptr, 14, COUNT, PADDED))  # TOP


@triton.jit
def _sample_maximum(which, x_ptr, sample_ptr, elements, BLOCK: tl.constexpr, SAMPLED: tl.constexpr):
    if which == 0:
        program = tl.program_id(0)
        peak = tl.zeros([BLOCK], tl.float32)
        blocks = tl.cdiv(elements, BLOCK)
        # A small tensor's blocks are all read.
        step = tl.maximum(tl.minimum(blocks // tl.num_programs(0), SAMPLED), 1)
        for start in tl.range(program * step, blocks, tl.num_programs(0) * step):
            index = (start + tl.zeros([1], tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            peak = tl.maximum(peak, tl.abs(tl.load(x_ptr + index, index < elements, 0.0)))
        tl.store(sample_ptr + program, tl.max(peak, 0))


@triton.jit
def _sample_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    sample0_ptr,
    sample1_ptr,
    sample2_ptr,
    sample3_ptr,
    elements0,
    elements1,
    elements2,
    elements3,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    # Programs of the second dimension are one tensor's each.
    which = tl.program_id(1)
    _sample_maximum(which, x0_ptr, sample0_ptr, elements0, BLOCK, SAMPLED)
    if COUNT > 1:
        _sample_maximum(which - 1, x1_ptr, sample1_ptr, elements1, BLOCK, SAMPLED)
    if COUNT > 2:
        _sample_maximum(which - 2, x2_ptr, sample2_ptr, elements2, BLOCK, SAMPLED)
    if COUNT > 3:
        _sample_maximum(which - 3, x3_ptr, sample3_ptr, elements3, BLOCK, SAMPLED)


@triton.jit
def _split_matrix(
    which,
    x_ptr,
    first_ptr,
    second_ptr,
    sample_ptr,
    maxima_ptr,
    flags_ptr,
    rows,
    columns,
    AGAIN: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    LARGE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    if which == 0:
        program = tl.program_id(0)
        exponent = _exponent_of(sample_ptr, 12, PROGRAMS, PADDED)  # SAMPLE_TOP
        across = tl.cdiv(columns, SEGMENT)
        blocks = tl.cdiv(rows, SEGMENT) * across
        if AGAIN:
            right = exponent_of_scale(sample_ptr, maxima_ptr, PROGRAMS, PADDED)
            was_wrong = right < exponent
            blocks = tl.where(was_wrong, blocks, 0)
            exponent = right
        unsafe = 0
        peak = tl.zeros([SEGMENT, SEGMENT], tl.float32)
        for block in tl.range(program, blocks, PROGRAMS, num_stages=3):
            # The last block of a row or column lies on the one before it, and writes the same
            # there: a short segment would seldom have a large element.
            row = tl.maximum(tl.minimum(block // across * SEGMENT, rows - SEGMENT), 0)
            column = tl.maximum(tl.minimum(block % across * SEGMENT, columns - SEGMENT), 0)
            r = (row + tl.arange(0, SEGMENT))[:, None]
            c = (column + tl.arange(0, SEGMENT))[None, :]
            inside = (r < rows) & (c < columns)
            offset = r.to(tl.int64) * columns + c
            x = tl.load(x_ptr + offset, inside, 0.0)
            scaled = times_power_of_2(x, exponent)
            first = scaled.to(tl.float16)
            tl.store(first_ptr + offset, first, inside)
            if PARTS > 1:
                second = (scaled - first.to(tl.float32)) * 2048.0
                tl.store(second_ptr + offset, second.to(tl.float16), inside)
            size = tl.abs(scaled)
            loses = (x != 0) & (size < LEAST)
            finite = tl.abs(x) < float("inf")  # false for a NaN
            if tl.max(tl.max((loses | (finite == 0)).to(tl.int32), 1), 0) > 0:
                in_row, in_column = tl.max(size, 1, keep_dims=True), tl.max(size, 0, keep_dims=True)
                found = (loses & ((in_row < LARGE) | (in_column < LARGE))) | (finite == 0)
                unsafe = tl.maximum(unsafe, tl.max(tl.max(found.to(tl.int32), 1), 0))
            if AGAIN == 0:
                peak = tl.maximum(peak, tl.abs(x))
        if AGAIN:
            if was_wrong:
                tl.store(flags_ptr + program, unsafe)
        else:
            tl.store(flags_ptr + program, unsafe)
            tl.store(maxima_ptr + program, tl.max(tl.max(peak, 1), 0))


@triton.jit
def _split_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    first0_ptr,
    first1_ptr,
    first2_ptr,
    first3_ptr,
    second0_ptr,
    second1_ptr,
    second2_ptr,
    second3_ptr,
    sample0_ptr,
    sample1_ptr,
    sample2_ptr,
    sample3_ptr,
    maxima0_ptr,
    maxima1_ptr,
    maxima2_ptr,
    maxima3_ptr,
    flags0_ptr,
    flags1_ptr,
    flags2_ptr,
    flags3_ptr,
    rows0,
    rows1,
    rows2,
    rows3,
    columns0,
    columns1,
    columns2,
    columns3,
    COUNT: tl.constexpr,
    AGAIN: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    LARGE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    which = tl.program_id(1)
    _split_matrix(
        which, x0_ptr, first0_ptr, second0_ptr, sample0_ptr, maxima0_ptr, flags0_ptr,
        rows0, columns0, AGAIN, PARTS, LEAST, LARGE, PROGRAMS, PADDED, SEGMENT,
    )  # fmt: skip
    if COUNT > 1:
        _split_matrix(
            which - 1, x1_ptr, first1_ptr, second1_ptr, sample1_ptr, maxima1_ptr, flags1_ptr,
            rows1, columns1, AGAIN, PARTS, LEAST, LARGE, PROGRAMS, PADDED, SEGMENT,
        )  # fmt: skip
    if COUNT > 2:
        _split_matrix(
            which - 2, x2_ptr, first2_ptr, second2_ptr, sample2_ptr, maxima2_ptr, flags2_ptr,
            rows2, columns2, AGAIN, PARTS, LEAST, LARGE, PROGRAMS, PADDED, SEGMENT,
        )  # fmt: skip
    if COUNT > 3:
        _split_matrix(
            which - 3, x3_ptr, first3_ptr, second3_ptr, sample3_ptr, maxima3_ptr, flags3_ptr,
            rows3, columns3, AGAIN, PARTS, LEAST, LARGE, PROGRAMS, PADDED, SEGMENT,
        )  # fmt: skip


def fp16_parts_launch(xs: Sequence[torch.Tensor], parts: int) -> list[torch.Tensor]:
    """Three launches, for all tensors together: the samples' maxima; parts, flags and maxima;
    both of the former again, for a tensor whose maximum its sample did not foretell."""
    if not 0 < len(xs) <= MAX_SPLIT:
        raise UnsupportedError(f"fp16_parts: expected 1 to {MAX_SPLIT} tensors, got {len(xs)}")
    xs = [x.contiguous() for x in xs]
    results = [_empty(x, parts) for x in xs]
    first = [r[0] for r in results]
    second = [r[parts - 1] for r in results]  # the first again, if it is alone
    sample, maxima, flags = ([r[parts + i] for r in results] for i in range(3))
    columns = [x.shape[-1] if x.dim() else 1 for x in xs]
    rows = [x.numel() // max(c, 1) for x, c in zip(xs, columns, strict=True)]
    count = programs(xs[0].device)
    # An absent tensor's pointer is never followed: any tensor stands in for it.
    absent = MAX_SPLIT - len(xs)

    def filled(tensors: list) -> list:
        return tensors + tensors[:1] * absent

    launch(_sample_kernel, (count, len(xs)))(
        *filled(xs),
        *filled(sample),
        *filled([x.numel() for x in xs]),
        COUNT=len(xs),
        BLOCK=_BLOCK,
        SAMPLED=_SAMPLED,
        num_warps=4,
    )
    for again in (False, True):
        launch(_split_kernel, (count, len(xs)))(
            *filled(xs),
            *filled(first),
            *filled(second),
            *filled(sample),
            *filled(maxima),
            *filled(flags),
            *filled(rows),
            *filled(columns),
            COUNT=len(xs),
            AGAIN=again,
            PARTS=parts,
            LEAST=_LEAST[parts],
            LARGE=_LARGE,
            PROGRAMS=count,
            PADDED=next_power_of_2(count),
            SEGMENT=_SEGMENT,
            num_warps=8,
        )
    return [result for r in results for result in r]


def _empty(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    count = programs(x.device)
    return [
        *(x.new_empty(x.shape, dtype=torch.float16) for _ in range(parts)),
        x.new_empty((count,)),
        x.new_empty((count,)),
        x.new_empty((count,), dtype=torch.int32),
    ]


fp16_parts = define_op(
    "fp16_parts(Tensor[] xs, int parts) -> Tensor[]",
    reference=fp16_parts_reference,
    launcher=fp16_parts_launch,
    fake=lambda xs, parts: [result for x in xs for result in _empty(x, parts)],
)
