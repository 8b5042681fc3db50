"""What the patterns of gated activations, ``y = linear * f(act)``, share.

From dy, act and linear::

    d_linear = dy * f(act)
    d_act    = dy * linear * f'(act)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusedbwd.graph import gradient_nodes, value
from fusedbwd.patterns.algebra import Poly, computes, is_arithmetic, monomial
from fusedbwd.patterns.pattern import Miss, Rewrite, require
from fusedbwd.patterns.walk import (
    cofactors,
    concatenation,
    final_cast,
    pointwise_users,
    product_factors,
    same_numel,
    shaped_like,
    sums_above,
)

aten = torch.ops.aten

_MAX_CLIMB = 12  # nodes from a sigmoid or tanh up to the activation that it is part of


def factors_of_gradient(d_activation: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """dy and linear of ``d_activation = dy * linear``: the backward factor and the forward one;
    None where it is no such product."""
    factors = product_factors(d_activation)
    gradients = gradient_nodes(d_activation.graph)
    backward = [f for f in factors if f in gradients]
    forward = [f for f in factors if f not in gradients]
    return (backward[0], forward[0]) if len(backward) == len(forward) == 1 else None


def linear_gradients(dy: fx.Node, act: fx.Node, linear: fx.Node, f: Poly) -> list[fx.Node]:
    """Products that are ``dy * f``, with ``f`` the activation of ``act``."""
    return [
        n
        for n in pointwise_users(dy)
        if n.target is aten.mul.Tensor and computes(n, monomial(dy) * f, (dy, act, linear))
    ]


def spelled_out(
    node: fx.Node, act: fx.Node, f: Poly, slope: Poly
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """dy, linear and d_act of an activation that is written out.

    Args:
        node: part of the activation: a sigmoid, tanh or erf in the forward.
        act: its input.
        f, slope: the activation of ``act``, and its derivative.

    Returns:
        None where no gated activation is there.

    Raises:
        Miss: there is one, but not its gradient.
    """
    gradients = gradient_nodes(node.graph)
    activations = [n for n in _users_above(node, gradients) if computes(n, f, (act,))]
    pairs = [
        (dy, linear)
        for activation in activations
        for dy in cofactors(activation)
        if dy in gradients
        for linear in cofactors(dy)
        if linear not in gradients
    ]
    for dy, linear in pairs:
        formula = monomial(dy) * monomial(linear) * slope
        for top in sums_above(dy):
            if computes(top, formula, (dy, act, linear)):
                return dy, linear, top
    if pairs:
        raise Miss(f"no sum is the gradient of the activation of {act.name} with {node.name}")
    return None


def _users_above(node: fx.Node, gradients: set[fx.Node]) -> list[fx.Node]:
    """What ``node`` flows into by arithmetic in the forward, the nearest first."""
    climbed = {node: None}
    for n in (todo := [node]):
        for user in n.users:
            is_near = len(climbed) < _MAX_CLIMB and user not in climbed
            if is_near and is_arithmetic(user) and user not in gradients:
                climbed[user] = None
                todo.append(user)
    return list(climbed)


def rewrite(
    dy: fx.Node, act: fx.Node, linear: fx.Node, d_act: fx.Node, d_linear: fx.Node, op: Callable
) -> Rewrite:
    """The rewrite for what was found.

    Args:
        op: gives the packed gradients [T, 2 * I] of dy, act and linear [T, I] and a flag, whether
            that of ``linear`` goes first.
    """
    d_act, d_linear = final_cast(d_act), final_cast(d_linear)
    for n in (linear, dy, d_act, d_linear):
        require(
            same_numel(n, act),
            f"{n.name} has shape {list(value(n).shape)}, {act.name} {list(value(act).shape)}",
        )
    dtypes = {value(n).dtype for n in (act, linear, d_act, d_linear)}
    require(len(dtypes) == 1, f"the operands of {d_act.name} differ in dtype: {dtypes}")
    width = value(act).shape[-1]
    require(isinstance(width, int), f"the width of {act.name} is not static")

    linear_first = False
    joined = concatenation(d_act, d_linear)
    if joined is None:
        joined = concatenation(d_linear, d_act)
        linear_first = joined is not None

    def replacement(like_act, like_linear, dy, act, linear):
        packed = op(*(t.reshape(-1, width) for t in (dy, act, linear)), linear_first)
        if joined is not None:
            return (packed.reshape(*like_act.shape[:-1], 2 * width),)
        d_act, d_linear = packed[:, :width], packed[:, width:]
        return d_act.reshape(like_act.shape), d_linear.reshape(like_linear.shape)

    shapes = (shaped_like(n, (act, linear, dy)) for n in (d_act, d_linear))
    outputs = (d_act, d_linear) if joined is None else (joined,)
    return Rewrite(outputs, (*shapes, dy, act, linear), replacement, width=width)
