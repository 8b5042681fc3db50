"""Fused joint graph → backward graph over the schema's tensors.

The extracted graph has one placeholder per schema input, in order, and gives the gradients
in order. Three rules hold:

- What the schema saves is what the backward reads: where a saved tensor is a view of another
  intermediate, or its rounded form (``attn_weights`` of the fp32 softmax), the backward reads
  the saved one in its place. Whatever else it needs is computed from its inputs.
- A gradient that is declared in a wider dtype than the parameter's is returned before
  autograd's final cast.
- No output shares storage with an input or with another output.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import fx

from fusedbwd.errors import SchemaError
from fusedbwd.graph import Extraction, Leak, extract, value
from fusedbwd.schema import SAVED, Schema
from fusedbwd.trace import JointGraph

aten = torch.ops.aten
prims = torch.ops.prims

_CAST = prims.convert_element_type.default
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.as_strided.default,
}

_INVERTIBLE = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
}


def backward_graph(joint: JointGraph) -> fx.GraphModule:
    """The backward of ``joint`` as a function of the schema's inputs.

    Raises:
        SchemaError: a gradient depends on a tensor that the schema does not have, or has
            another dtype or shape than the schema says.
    """
    schema, nodes = joint.schema, joint.inputs
    outputs = [
        _output(node, o, schema) for node, o in zip(joint.gradients, schema.outputs, strict=True)
    ]
    stand_ins: dict[fx.Node, list[fx.Node]] = {}
    for i, node in zip(schema.inputs, nodes, strict=True):
        if i.kind == SAVED and i.read:
            for path in _invertible_paths(node):
                stand_ins.setdefault(path[-1].args[0], path)

    def read_saved(new: Extraction, node: fx.Node) -> fx.Node | None:
        path = stand_ins.get(node)
        if path is None:
            return None
        made = new.copied[path[0]]
        for step in path:
            made = _inverse(new, step, made)
            with joint.fake_mode:
                made.meta["val"] = made.target(*fx.map_arg(made.args, value))
        return made

    try:
        graph = extract(outputs, nodes, [i.name for i in schema.inputs], substitute=read_saved)
    except Leak as leak:
        raise SchemaError(
            f"{schema.name}: the backward needs {leak.node.name} "
            f"({value(leak.node)}), which is not among the inputs"
        ) from None
    _lay_out(graph, joint)
    for node in graph.nodes:
        if _draws(node):
            raise SchemaError(
                f"{schema.name}: the backward would draw random numbers again ({node.target}): "
                f"tag and save what the forward drew, or put the module in eval mode"
            )
    _own_storage(graph)
    graph.lint()
    return fx.GraphModule(joint.gm, graph)


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers: attention ops are tagged so, but do for dropout only."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for argument, given in zip_longest(node.target._schema.arguments, node.args):
        if argument.name == "dropout_p":
            p = node.kwargs.get("dropout_p", argument.default_value if given is None else given)
            return p != 0.0
    return True


def unread(graph: fx.Graph) -> set[str]:
    """The names of the inputs that the backward does not read."""
    return {
        str(n.target)
        for n in graph.find_nodes(op="placeholder")
        if all(user.target is aten.sym_size.int for user in n.users)
    }


def _is_rounding(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is _CAST
        and value(node).dtype.itemsize < value(node.args[0]).dtype.itemsize
    )


def _invertible_paths(node: fx.Node) -> Iterator[list[fx.Node]]:
    """The views, permutations and roundings that lead to ``node``: all paths that end in it."""
    path: list[fx.Node] = []
    while node.op == "call_function" and (node.target in _INVERTIBLE or _is_rounding(node)):
        path.append(node)
        yield list(path)
        node = node.args[0]


def _inverse(new: Extraction, step: fx.Node, result: fx.Node) -> fx.Node:
    """What ``step`` was applied to, from its result."""
    source = value(step.args[0])
    if step.target is _CAST:
        return new.graph.call_function(_CAST, (result, source.dtype))
    if step.target is aten.permute.default:
        inverse = [0] * len(step.args[1])
        for i, dim in enumerate(step.args[1]):
            inverse[dim] = i
        return new.graph.call_function(aten.permute.default, (result, inverse))
    if step.target is aten.transpose.int:
        return new.graph.call_function(aten.transpose.int, (result, *step.args[1:]))
    if step.target is aten.clone.default:
        return new.graph.call_function(aten.alias.default, (result,))
    sizes = [new.size(s) for s in source.shape]
    return new.graph.call_function(aten.reshape.default, (result, sizes))


def _output(node: fx.Node, declared, schema: Schema) -> fx.Node:
    if value(node).dtype != declared.dtype and _is_rounding(node):
        node = node.args[0]
    if value(node).dtype != declared.dtype:
        raise SchemaError(
            f"{schema.name}: {declared.name!r} is declared {declared.dtype}, but the backward "
            f"computes it in {value(node).dtype}"
        )
    return node


def _lay_out(graph: fx.Graph, joint: JointGraph) -> None:
    """Gives the placeholders the schema's layouts, in which they are passed: the module's own
    tensor may be laid out otherwise (one half of a packed projection)."""
    for i, node in zip(joint.schema.inputs, graph.find_nodes(op="placeholder"), strict=True):
        val = value(node)
        with joint.fake_mode:
            node.meta["val"] = torch.empty_strided(
                val.shape, i.strides(val.shape), dtype=val.dtype, device=val.device
            )


def _own_storage(graph: fx.Graph) -> None:
    """Copies every output that is a view of an input or of what another output shows, or that
    is not contiguous."""
    output = graph.output_node()
    seen: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
    owned = []
    for node in output.args[0]:
        base = node
        while base.op == "call_function" and base.target in _VIEWS:
            base = base.args[0]
        if base in seen or not value(node).is_contiguous():
            with graph.inserting_before(output):
                copy = graph.call_function(
                    aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            with value(node).fake_mode:
                copy.meta["val"] = torch.empty_like(
                    value(node), memory_format=torch.contiguous_format
                )
            node = copy
        seen.add(base)
        owned.append(node)
    output.args = (owned,)
