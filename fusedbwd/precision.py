"""The precision of float32 matmuls that the user has allowed, and which of our graphs it concerns.

"highest" is float32, "high" allows TF32 and "medium" bfloat16, as
``torch.set_float32_matmul_precision`` documents; torch itself runs TF32 for "medium" on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fusedbwd.graph import value

aten = torch.ops.aten

HIGHEST, HIGH, MEDIUM = "highest", "high", "medium"

_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def in_force() -> str:
    """The precision that float32 matmuls on a GPU may have now: one of the three.

    ``torch.backends.cuda.matmul.fp32_precision`` has no value for bfloat16. Where it has been
    set to "ieee" that counts, whatever was set before; where it and its siblings for other
    backends contradict one another, "tf32" is the most that it allows.
    """
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return HIGHEST
    try:
        return MEDIUM if torch.get_float32_matmul_precision() == MEDIUM else HIGH
    except RuntimeError:  # the backends' settings differ: no one word describes them
        return HIGH


class RoundedMatmuls(TorchDispatchMode):
    """Inside, ``mm`` and ``addmm`` of float32 matrices round these as ``precision`` allows, to
    bfloat16 ("medium") or TF32 ("high"), and multiply in float32, as eager PyTorch would."""

    def __init__(self, precision: str = MEDIUM):
        super().__init__()
        self.rounded = {HIGHEST: lambda t: t, HIGH: to_tf32, MEDIUM: _to_bfloat16}[precision]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.addmm.default):
            *added, a, b = args
            args = (*added, *(self.rounded(t) if t.dtype == torch.float32 else t for t in (a, b)))
        return func(*args, **(kwargs or {}))


def _to_bfloat16(t: torch.Tensor) -> torch.Tensor:
    return t.bfloat16().float()


def to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Float32 values rounded to TF32's 10 mantissa bits, to nearest, ties to even."""
    bits = t.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(t.isfinite(), rounded.view(torch.float32), t)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """``torch.set_float32_matmul_precision(precision)`` inside the block only."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def concerns(graph: fx.Graph) -> bool:
    """Whether ``graph`` has a float32 matmul, so that the precision makes a difference."""
    return any(
        value(node).dtype == torch.float32
        for op in _MATMULS
        for node in graph.find_nodes(op="call_function", target=op)
    )
