"""Steps from the heads of an attention to the matrices that projections read."""

from __future__ import annotations

import torch
from torch import fx

from fusedbwd.graph import same_size, value
from fusedbwd.patterns.pattern import only_user
from fusedbwd.patterns.walk import VIEWS, concatenation

aten = torch.ops.aten


def flattened(node: fx.Node) -> fx.Node | None:
    """The matrix [B·S, N·D] that ``node`` [B, N, S, D] is used as alone; or [B, S, N·D], where
    that goes more than one way from there."""
    permuted = only_user(node)
    if permuted is None or permuted.target is not aten.permute.default:
        return None
    if list(permuted.args[1]) != [0, 2, 1, 3]:
        return None
    batch, heads, seq, head_dim = value(node).shape
    width = heads * head_dim
    inner, found = permuted, None
    while (user := only_user(inner)) is not None and user.target in (*VIEWS, aten.clone.default):
        inner = user
        if same_size(value(inner).shape, (batch * seq, width)):
            return inner
        if same_size(value(inner).shape, (batch, seq, width)):
            found = inner
    return found


def joined(parts: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The concatenation of columns that alone uses ``parts``, as where one projection makes q,
    k and v together; ``parts`` themselves where there is none."""
    whole = concatenation(*parts)
    return parts if whole is None else (whole,)


def columns(
    packed: torch.Tensor, outputs: tuple[fx.Node, ...], like: torch.Tensor
) -> list[torch.Tensor]:
    """``packed`` [B·S, Σ N·D] as ``outputs``, each a run of its columns: [B·S, N·D] or
    [B, S, N·D] as they are, with the B and S of ``like`` [B, N, S, D]."""
    parts = packed.split([value(n).shape[-1] for n in outputs], dim=1)
    tokens = (like.shape[0], like.shape[2])
    return [
        part if value(n).dim() == 2 else part.unflatten(0, tokens)
        for n, part in zip(outputs, parts, strict=True)
    ]


def group_sum(node: fx.Node) -> tuple[fx.Node, int]:
    """From the gradient of repeated heads [B, K·G, S, D] to that of the K heads themselves.

    Returns:
        The sum [B, K, S, D] over each G consecutive heads that alone uses ``node``, and G;
        ``node`` itself and 1 where it is not summed like that.
    """
    batch, heads, seq, head_dim = value(node).shape
    user = only_user(node)
    split = user is not None and user.target in VIEWS and value(user).dim() == 5
    grouped = user if split else node  # a single head that was expanded is summed as it is
    axis = value(grouped).dim() - 3
    group = value(grouped).shape[axis]
    total = only_user(grouped)
    if (
        not isinstance(group, int)
        or (
            split
            and not same_size(value(grouped).shape, (batch, heads // group, group, seq, head_dim))
        )
        or total is None
        or total.target is not aten.sum.dim_IntList
        or [d % (axis + 3) for d in total.args[1] or ()] != [axis]
    ):
        return node, 1
    summed = (batch, heads // group, seq, head_dim)
    if not same_size(value(total).shape, summed):  # the dimension is kept
        total = only_user(total)
        if total is None or total.target not in (*VIEWS, aten.squeeze.dim):
            return node, 1
    return (total, group) if same_size(value(total).shape, summed) else (node, 1)
