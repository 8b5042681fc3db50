"""Fused ops → Triton kernels that the compiler launches itself.

Runs as Inductor's last custom pass over a post-grad graph. Each fused op on a GPU is replaced
by its own launcher, traced: allocations, the launches as Inductor's kernel-wrapper node, and
any reduction after them. The generated wrapper, Python or C++, then launches the kernels
directly, instead of calling back into a Python op. On a CPU the ops stay as they are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
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
        check_written(graph, str(node.target))
        if isinstance(value(node), torch.Tensor):
            node.replace_all_uses_with(new[0])
        else:
            for item in list(node.users):
                item.replace_all_uses_with(new[item.args[1]])
                graph.erase_node(item)
        graph.erase_node(node)
    graph.lint()


def check_written(graph: fx.Graph, op: str) -> None:
    """What torch's analysis of the kernels found is what they do: each writes fresh tensors, and
    none through two of its arguments, of which only one would be taken for the result.

    Raises:
        RuntimeError: it found otherwise.
    """
    if graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        raise RuntimeError(f"torch's analysis takes the kernel of {op} to write to its operands")
    for launch in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        names, tensors = launch.kwargs["tensors_to_clone"], launch.kwargs["kwargs"]
        written = [tensors[name] for name in names]
        if len(set(written)) < len(written):
            raise RuntimeError(
                f"torch's analysis takes the kernel of {op} to write one tensor through several "
                f"of {list(names)}"
            )
