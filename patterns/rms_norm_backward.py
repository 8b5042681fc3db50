"""RMSNorm backward: dx, a residual gradient added to it and the weight gradient in one pass.

Takes RMSNorm written in primitives (Llama's, Gemma's ``1 + w``, any spelling that
:mod:`fusedbwd.patterns.norms` can prove) and ``_fused_rms_norm_backward``, which ``nn.RMSNorm``
leaves in the graph on a GPU.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, CallFunctionVarArgs, Match

from fusedbwd.graph import value
from fusedbwd.kernels import rms_norm_backward, rms_norm_backward_dx
from fusedbwd.kernels.rms_norm import supported
from fusedbwd.patterns import norms
from fusedbwd.patterns.pattern import Pattern, Rewrite, require
from fusedbwd.patterns.walk import shaped_like

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if node.target is aten._fused_rms_norm_backward.default:
        return _from_composite(node)
    found = norms.prove(node, centered=False)
    if found is None:
        return None
    stat = found.statistic
    require(supported(stat.width), f"rows of {stat.width} are wider than the kernel takes")
    rstd_from, eps, to_rstd = norms.statistic_operands(stat)
    x_hat = norms.saved_normalized(stat, centered=False)
    dtype, offset, width = value(found.dx).dtype, found.weight_offset, stat.width
    dw = None if found.dw is None else value(found.dw)

    def replacement(like, grad, x, weight, rstd_from, eps, x_hat, residual):
        g, x2, res, hat = (_rows(t, width) for t in (grad, x, residual, x_hat))
        stat = (torch.rsqrt(rstd_from) if to_rstd else rstd_from).reshape(-1, 1)
        w = None if weight is None else weight.reshape(-1)
        if dw is None:
            dx = rms_norm_backward_dx(g, x2, w, stat, eps, res, offset, dtype)
            return (dx.reshape(like.shape),)
        dx, d_weight = rms_norm_backward(g, x2, w, stat, eps, hat, res, offset, dtype)
        return dx.reshape(like.shape), d_weight.reshape(dw.shape).to(dw.dtype)

    outputs = (found.dx,) if found.dw is None else (found.dx, found.dw)
    like = shaped_like(found.dx, (found.grad, stat.x))
    operands = (like, found.grad, stat.x, found.weight, rstd_from, eps, x_hat, found.residual)
    return Rewrite(outputs, operands, replacement)


def _from_composite(node: fx.Node) -> Rewrite:
    grad, x, normalized_shape, rstd, weight, mask = node.args
    require(mask[0], f"{node.name} computes the weight gradient alone")
    width = value(x).shape[-1]
    require(
        list(normalized_shape) == [width],
        f"{node.name} normalizes over {list(normalized_shape)}, not over the last dimension",
    )
    require(isinstance(width, int), f"the width of {x.name} is not static")
    require(supported(width), f"rows of {width} are wider than the kernel takes")
    results = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    require(0 in results, f"the input gradient of {node.name} has no user")
    dx, residual = norms.with_residual(results[0])
    dw = results.get(1) if mask[1] and weight is not None else None
    dtype = value(dx).dtype

    def replacement(grad, x, weight, rstd, residual):
        g, x2, res = (_rows(t, width) for t in (grad, x, residual))
        stat = rstd.reshape(-1, 1)
        if dw is None:
            dx = rms_norm_backward_dx(g, x2, weight, stat, None, res, 0.0, dtype)
            return (dx.reshape(x.shape),)
        dx, d_weight = rms_norm_backward(g, x2, weight, stat, None, None, res, 0.0, dtype)
        return dx.reshape(x.shape), d_weight.to(value(dw).dtype)

    outputs = (dx,) if dw is None else (dx, dw)
    return Rewrite(outputs, (grad, x, weight, rstd, residual), replacement)


def _rows(t: torch.Tensor | None, width: int) -> torch.Tensor | None:
    return None if t is None else t.reshape(-1, width)


PATTERN = Pattern(
    name="rms_norm_backward",
    anchors=[
        CallFunction(aten.sum.dim_IntList, Arg(), Arg(), True),
        CallFunction(aten.mean.dim, Arg(), Arg(), True),
        CallFunctionVarArgs(aten._fused_rms_norm_backward.default),
    ],
    prove=_prove,
)
