"""Float32 matmuls of the backward as three products of float16 parts, as exact as float32's.

Each operand is the sum of two float16 tensors under a power-of-two scale, which carry 22 bits; the
product of the two small parts is below float32's rounding. An opt-in, which every precision of
float32 matmuls allows. Where an operand's range is too wide the kernel multiplies in float32.
"""

from __future__ import annotations

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.kernels import fp16_parts
from fusedbwd.patterns.matmuls import on_fp16_parts
from fusedbwd.patterns.pattern import Pattern, Rewrite
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM
from fusedbwd.roundings import place_roundings

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    return on_fp16_parts(match.output_node(), 2, allowed=(HIGHEST, HIGH, MEDIUM))


PATTERN = Pattern(
    name="fp16x3",
    anchors=[CallFunctionVarArgs(aten.mm.default), CallFunctionVarArgs(aten.addmm.default)],
    prove=_prove,
    finish=lambda graph: place_roundings(graph, fp16_parts, 2),
)
