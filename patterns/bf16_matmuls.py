"""Float32 matmuls of the backward on bfloat16 operands, where the user has allowed that.

``torch.set_float32_matmul_precision("medium")`` allows bfloat16 for a float32 matmul's operands.
The products are exact in float32 and added up in float32, and so is what is added to them.
Without that setting nothing matches. Matmuls of the forward stay as they are.
"""

from __future__ import annotations

import torch
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.kernels import round_to, sum_matmul
from fusedbwd.patterns.matmuls import float32_of_backward
from fusedbwd.patterns.pattern import Pattern, Rewrite
from fusedbwd.precision import MEDIUM, in_force
from fusedbwd.roundings import place_roundings

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if in_force() != MEDIUM or (operands := float32_of_backward(node)) is None:
        return None

    def replacement(a, b, added):
        residual = None if added is None else added.expand(a.shape[0], b.shape[1])
        a, b = round_to([a, b], torch.bfloat16)
        return (sum_matmul([a], [b], residual, torch.float32),)

    return Rewrite((node,), operands, replacement, rounds_to=torch.bfloat16)


PATTERN = Pattern(
    name="bf16_matmuls",
    anchors=[CallFunctionVarArgs(aten.mm.default), CallFunctionVarArgs(aten.addmm.default)],
    prove=_prove,
    finish=lambda graph: place_roundings(graph, round_to, torch.bfloat16),
)
