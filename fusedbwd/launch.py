"""Fused ops → Triton kernels that the compiler launches itself.

Runs as Inductor's last custom pass over a post-grad graph. Each fused op on a GPU is replaced
by its own launcher, traced: allocations, the launches as Inductor's kernel-wrapper node, and
any reduction after them. The generated wrapper, Python or C++, then launches the kernels
directly, instead of calling back into a Python op. On a CPU the ops stay as they are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table

from fusedbwd.graph import inline, value
from fusedbwd.kernels._op import LAUNCHERS
from fusedbwd.roundings import sink_roundings


def launch_pass(graph: fx.Graph) -> None:
    """Replaces the fused ops of a GPU graph by their kernels' launches."""
    sink_roundings(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in LAUNCHERS:
            continue
        if not any(
            isinstance(value(a), torch.Tensor) and value(a).device.type == "cuda"
            for a in node.all_input_nodes
        ):
            continue
        new = inline(
            graph,
            torch.func.functionalize(LAUNCHERS[node.target]),
            node.args,
            before=node,
            decompositions=select_decomp_table(),
        )
        written = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if written:
            raise RuntimeError(
                f"torch's analysis takes the kernel of {node.target} to write to its operands"
            )
        if isinstance(value(node), torch.Tensor):
            node.replace_all_uses_with(new[0])
        else:
            for item in list(node.users):
                item.replace_all_uses_with(new[item.args[1]])
                graph.erase_node(item)
        graph.erase_node(node)
    graph.lint()
