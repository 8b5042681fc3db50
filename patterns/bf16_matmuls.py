"""Float32 matmuls of the backward on bfloat16 operands, where the user has allowed that.

``torch.set_float32_matmul_precision("medium")`` allows bfloat16 for a float32 matmul's operands.
The products are exact in float32 and added up in float32, and so is what is added to them.
Without that setting nothing matches. Matmuls of the forward stay as they are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match

from fusedbwd.graph import gradient_nodes, value
from fusedbwd.kernels import round_to, sum_matmul
from fusedbwd.patterns.pattern import Pattern, Rewrite
from fusedbwd.precision import MEDIUM, in_force
from fusedbwd.roundings import place_roundings

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    *added, a, b = node.args
    is_float32 = all(value(t).dtype == torch.float32 for t in (node, a, b))
    if in_force() != MEDIUM or not is_float32 or not _is_plain(node):
        return None
    gradients = gradient_nodes(node.graph)
    if a not in gradients and b not in gradients:  # a product of the forward, if of a backward's
        return None

    def replacement(a, b, *added):
        residual = added[0].expand(a.shape[0], b.shape[1]) if added else None
        a, b = round_to([a, b], torch.bfloat16)
        return (sum_matmul([a], [b], residual, torch.float32),)

    return Rewrite((node,), (a, b, *added), replacement, rounds_to=torch.bfloat16)


def _is_plain(node: fx.Node) -> bool:
    """Whether an ``addmm`` scales neither of its terms; a ``mm`` cannot."""
    return all(node.kwargs.get(factor, 1) == 1 for factor in ("alpha", "beta"))


PATTERN = Pattern(
    name="bf16_matmuls",
    anchors=[CallFunctionVarArgs(aten.mm.default), CallFunctionVarArgs(aten.addmm.default)],
    prove=_prove,
    finish=place_roundings,
)
