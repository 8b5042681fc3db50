"""GeGLU backward: both factors' gradients in one pass, written into one packed buffer.

Forward ``y = linear * gelu(act)``, tanh or exact, by the composite op or written out; the rest as
in :mod:`~fusedbwd.patterns.swiglu_backward`. A GELU that gates nothing is left to
:mod:`~fusedbwd.patterns.gelu_backward`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, CallFunctionVarArgs, Match

from fusedbwd.graph import gradient_nodes
from fusedbwd.kernels import geglu_backward
from fusedbwd.patterns import gated, gelu_backward
from fusedbwd.patterns.algebra import monomial, strip
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite, require

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if node.target is aten.gelu_backward.default:
        return _from_composite(node)
    act = None if node in gradient_nodes(node.graph) else gelu_backward.input_of(node)
    if act is None:
        return None
    gelu, slope = gelu_backward.value_and_slope(node, act)
    found = gated.spelled_out(node, act, gelu, slope)
    if found is None:
        return None
    dy, linear, d_act = found
    d_linear = gated.linear_gradients(dy, act, linear, gelu)
    require(d_linear, f"no product of {dy.name} with the GELU of {act.name} beside {d_act.name}")
    op = _op("tanh" if node.target is aten.tanh.default else "none")
    return gated.rewrite(dy, act, linear, d_act, d_linear[0], op)


def _from_composite(node: fx.Node) -> Rewrite | None:
    factors = gated.factors_of_gradient(node.args[0])
    if factors is None:
        return None
    (dy, linear), act = factors, strip(node.args[1])
    approximate = node.kwargs.get("approximate", "none")
    for gelu in node.graph.find_nodes(op="call_function", target=aten.gelu.default):
        if strip(gelu.args[0]) is act and gelu.kwargs.get("approximate", "none") == approximate:
            for d_linear in gated.linear_gradients(dy, act, linear, monomial(gelu)):
                return gated.rewrite(dy, act, linear, node, d_linear, _op(approximate))
    raise Miss(f"no product of {dy.name} with gelu({act.name}) beside {node.name}")


def _op(approximate: str) -> Callable:
    def op(dy, act, linear, linear_first):
        return geglu_backward(dy, act, linear, approximate, linear_first)

    return op


PATTERN = Pattern(
    name="geglu_backward",
    anchors=[
        CallFunctionVarArgs(aten.gelu_backward.default),
        CallFunction(aten.tanh.default, Arg()),
        CallFunction(aten.erf.default, Arg()),
    ],
    prove=_prove,
)
