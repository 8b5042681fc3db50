"""Everything that differs between torch releases (2.11 to 2.14), each with its release."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten

KEPT_WHOLE = (
    aten.silu.default,
    aten.silu_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
)
"""Composite ops that tracing keeps as single nodes, forward beside backward."""


class _Decompositions(dict):
    """A decomposition table that pickles as how it is made.

    From 2.13 on the table is part of Inductor's cache key, and a table of functions, which
    cannot be pickled, turns the cache off. What is in it, our passes' identities tell.
    """

    def __reduce__(self):
        return decompositions, ()


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Inductor's decomposition table without the ops of :data:`KEPT_WHOLE`."""
    table = select_decomp_table()
    return _Decompositions((op, fn) for op, fn in table.items() if op not in KEPT_WHOLE)


def size_source(name: str) -> ConstantSource:
    """A source that names an open size in error messages."""
    return ConstantSource(name)


def full_decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Inductor's own decomposition table."""
    return select_decomp_table()


def remove_noop_ops(graph: torch.fx.Graph) -> None:
    """Inductor's removal of clones, same-dtype casts and slices that do nothing."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops as remove

    remove(graph)


def drop_asserts(graph: torch.fx.Graph) -> None:
    """Removes metadata assertions, which tracing leaves behind ``Tensor.to`` and keep it alive."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def trace_structured(name: str, text: str) -> None:
    """Hands ``text`` to torch's structured trace, where tlparse shows it under ``name``."""
    from torch._logging import trace_structured as emit

    emit(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
    )
