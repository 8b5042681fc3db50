"""What a pattern is: anchors, a proof, and the rewrite that the proof yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, PatternExpr


class Miss(Exception):
    """Raised by a proof that fails; the text says why, in the graph's own terms."""


@dataclass(frozen=True)
class Rewrite:
    """A proven replacement.

    Attributes:
        outputs: the nodes whose values the replacement gives, in its order. All their users
            are redirected; what then has no user disappears.
        operands: nodes and constants that the replacement reads.
        replacement: traced on the operands' fake values; returns one tensor per output node,
            of its shape and dtype.
        sources: tensors that the operands are computed from and the replacement does not
            read (a norm's input, where it reads the normalized tensor): verification starts
            from these.
        width: elements of a row as :mod:`fusedbwd.gate` counts them, where that is not the
            last dimension of the first output.
        rounds_to: what the replacement rounds its operands to, on purpose; verification gives
            it operands that are exact in that dtype.
    """

    outputs: tuple[fx.Node, ...]
    operands: tuple
    replacement: Callable
    sources: tuple[fx.Node, ...] = ()
    width: int | None = None
    rounds_to: torch.dtype | None = None


@dataclass(frozen=True)
class Pattern:
    """One fusion.

    Attributes:
        name: also the name of its switch in :class:`fusedbwd.Config`.
        anchors: what the pattern matcher looks for, usually a single backward op.
        prove: gets the match; returns the rewrite, raises :class:`Miss` where it nearly is
            one, or returns None where the anchor is something else altogether. It may walk
            further through the graph from the matched node.
        finish: run on the graph once all matches are rewritten.
    """

    name: str
    anchors: Sequence[PatternExpr]
    prove: Callable[[Match], Rewrite | None]
    finish: Callable[[fx.Graph], None] = lambda graph: None


def only_user(node: fx.Node) -> fx.Node | None:
    """The single user of ``node``, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def users(node: fx.Node) -> str:
    """The users of ``node`` as a miss tells them: how many, and which."""
    names = [user.name for user in node.users]
    return f"{len(names)} user{'s' * (len(names) != 1)}: {', '.join(names) or 'none'}"


def require(condition: object, reason: str) -> None:
    """Raises :class:`Miss` with ``reason`` unless ``condition`` holds."""
    if not condition:
        raise Miss(reason)
