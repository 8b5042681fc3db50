"""Float32 matmuls of the backward on float16 operands, each under a power-of-two scale of its own.

Float16 has TF32's 10 mantissa bits, which ``torch.set_float32_matmul_precision("high")`` allows,
and multiplies at twice its rate; the scale makes up for its smaller range. An opt-in: nothing
matches under "highest". Where an operand's range is too wide the kernel multiplies in float32.
"""

from __future__ import annotations

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.kernels import fp16_parts
from fusedbwd.patterns.matmuls import on_fp16_parts
from fusedbwd.patterns.pattern import Pattern, Rewrite
from fusedbwd.precision import HIGH, MEDIUM
from fusedbwd.roundings import place_roundings

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    return on_fp16_parts(match.output_node(), 1, allowed=(HIGH, MEDIUM))


PATTERN = Pattern(
    name="fp16_scaled",
    anchors=[CallFunctionVarArgs(aten.mm.default), CallFunctionVarArgs(aten.addmm.default)],
    prove=_prove,
    finish=lambda graph: place_roundings(graph, fp16_parts, 1),
)
