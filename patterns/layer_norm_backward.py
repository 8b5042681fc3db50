"""LayerNorm backward: dx, a residual gradient added to it, weight and bias gradients in one pass.

The bias gradient of a layer whose output the norm took, a sum of dx over rows, joins too.
Takes LayerNorm written in primitives and ``native_layer_norm_backward``. Where the schema
saves the normalized tensor, the kernel reads that; else the input and its mean.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, CallFunctionVarArgs, Match

from fusedbwd.graph import value
from fusedbwd.kernels import layer_norm_backward, layer_norm_backward_dx
from fusedbwd.kernels.layer_norm import supported
from fusedbwd.patterns import norms
from fusedbwd.patterns.pattern import Pattern, Rewrite, require
from fusedbwd.patterns.walk import shaped_like, sum_over_rows

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if node.target is aten.native_layer_norm_backward.default:
        return _from_composite(node)
    found = norms.prove(node, centered=True)
    if found is None:
        return None
    stat = found.statistic
    rstd_from, eps, to_rstd = norms.statistic_operands(stat)
    x_hat = norms.saved_normalized(stat, centered=True)
    mean = None if x_hat is not None else norms.mean_of(stat)
    return _rewrite(
        width=stat.width,
        grad=found.grad,
        x=stat.x if x_hat is None else x_hat,
        mean=mean,
        weight=found.weight,
        stat=rstd_from,
        eps=eps,
        to_rstd=to_rstd,
        residual=found.residual,
        dx=found.dx,
        dw=found.dw,
        db=found.db,
        sources=(stat.x,),
    )


def _from_composite(node: fx.Node) -> Rewrite:
    grad, x, normalized_shape, mean, rstd, weight, bias, mask = node.args
    require(mask[0], f"{node.name} computes parameter gradients alone")
    results = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    require(0 in results, f"the input gradient of {node.name} has no user")
    dx, residual = norms.with_residual(results[0])
    width = math.prod(normalized_shape)
    require(isinstance(width, int), f"the width of {x.name} is not static")
    return _rewrite(
        width=width,
        grad=grad,
        x=x,
        mean=mean,
        weight=weight,
        stat=rstd,
        eps=None,
        to_rstd=False,
        residual=residual,
        dx=dx,
        dw=results.get(1) if mask[1] else None,
        db=results.get(2) if mask[2] else None,
        sources=() if bias is None else (bias,),
    )


def _rewrite(
    *, width, grad, x, mean, weight, stat, eps, to_rstd, residual, dx, dw, db, sources=()
) -> Rewrite:
    """The rewrite for operands found either way; ``to_rstd``: ``stat`` is var + eps."""
    require(supported(width), f"rows of {width} are wider than the kernel takes")
    dtype = value(dx).dtype
    # Over several dimensions, rows of the norm are not rows of the layer before it.
    summable = value(dx).shape[-1] == width and supported(width, sum_dx=True)
    dx_sum = sum_over_rows(dx) if summable else None
    sums = [n for n in (dw, db, dx_sum) if n is not None]

    def replacement(like, grad, x, mean, weight, stat, eps, residual):
        g, x2 = grad.reshape(-1, width), x.reshape(-1, width)
        res = None if residual is None else residual.reshape(-1, width)
        stat = (torch.rsqrt(stat) if to_rstd else stat).reshape(-1, 1)
        m = None if mean is None else mean.reshape(-1, 1)
        w = None if weight is None else weight.reshape(-1)
        if not sums:
            d = layer_norm_backward_dx(g, x2, m, w, stat, eps, res, dtype)
            return (d.reshape(like.shape),)
        d, *totals = layer_norm_backward(g, x2, m, w, stat, eps, res, dtype, dx_sum is not None)
        given = [d.reshape(like.shape)]
        for node, t in zip((dw, db, dx_sum), totals, strict=True):
            if node is not None:
                given.append(t.reshape(value(node).shape).to(value(node).dtype))
        return tuple(given)

    operands = (shaped_like(dx, (grad, x)), grad, x, mean, weight, stat, eps, residual)
    return Rewrite((dx, *sums), operands, replacement, sources, width)


PATTERN = Pattern(
    name="layer_norm_backward",
    anchors=[
        CallFunction(aten.sum.dim_IntList, Arg(), Arg(), True),
        CallFunction(aten.mean.dim, Arg(), Arg(), True),
        CallFunctionVarArgs(aten.native_layer_norm_backward.default),
    ],
    prove=_prove,
)
