"""Small operations on FX graphs that fusion, partitioning and verification share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._library.utils import get_layout_constraint_tag
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

SAVED_KEY = "fusedbwd_saved"
"""Key in a node's metadata: the schema saves this node for the backward to read, under the
name that is its value."""

INHERITED = ("partitioner_tag", "stack_trace", "seq_nr", "recompute", "ac_graph_id", "custom")
"""Keys that the partitioner, activation checkpointing and debuggers read, which nodes put in
another's place take over from it."""


class Leak(Exception):
    """An extracted subgraph needs a placeholder that is not among its inputs."""

    def __init__(self, node: fx.Node):
        super().__init__(node.name)
        self.node = node


def value(node):
    """The fake value of a node; anything else as it is."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def gradient_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The incoming gradients of a joint graph, and everything computed from them."""
    tangents = [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
    return set().union(*map(reachable, tangents))


def fake_mode_of(graph: fx.Graph):
    """The fake mode of the graph's metadata."""
    return torch._guards.detect_fake_mode([value(n) for n in graph.nodes if "val" in n.meta])


def same_size(a, b) -> bool:
    """Whether two shapes are provably equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def inline(
    graph: fx.Graph, fn: Callable, args: Sequence, *, before: fx.Node, decompositions=None
) -> list:
    """Traces ``fn`` on the fake values of ``args`` and puts its graph before ``before``.

    Args:
        args: nodes, constants and lists of them.
        decompositions: as for ``make_fx``.

    Returns:
        What ``fn`` returns, flattened, as nodes.
    """
    flat, spec = pytree.tree_flatten(list(args), is_leaf=lambda x: isinstance(x, fx.Node))
    holes = [i for i, a in enumerate(flat) if isinstance(a, fx.Node)]

    def call(*values):
        filled = list(flat)
        for i, v in zip(holes, values, strict=True):
            filled[i] = v
        return pytree.tree_leaves(fn(*pytree.tree_unflatten(filled, spec)))

    with fake_mode_of(graph), enable_python_dispatcher():
        traced = make_fx(call, decomposition_table=decompositions)(*(value(flat[i]) for i in holes))
    traced.graph.eliminate_dead_code()

    placed: dict[fx.Node, fx.Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), (flat[i] for i in holes), strict=True)
    )
    inherited = {key: before.meta[key] for key in INHERITED if key in before.meta}
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copied = graph.node_copy(node, placed.__getitem__)
            copied.meta.update(inherited)
            placed[node] = copied
    return [placed[n] if isinstance(n, fx.Node) else n for n in traced.graph.output_node().args[0]]


class ReadsLayout(Exception):
    """A node reads how an operand lies, and would get one that lies otherwise."""

    def __init__(self, node: fx.Node):
        super().__init__(node.name)
        self.node = node


def relaid(graph: fx.Graph, changed: Mapping[fx.Node, torch.Tensor]) -> list[Relaid]:
    """What follows where nodes get values that lie otherwise than theirs.

    Args:
        changed: the nodes, with their new fake values.

    Raises:
        ReadsLayout: for a node that would then read something else, or could not be run.
    """
    now: dict[fx.Node, Any] = dict(changed)
    found = []
    with fake_mode_of(graph), enable_python_dispatcher():
        for node in graph.nodes:
            if (
                node in changed
                or node.op == "output"
                or now.keys().isdisjoint(node.all_input_nodes)
            ):
                continue
            target, as_traced = node.target, _is_given_strides(node.target)
            if not (as_traced or _by_elements(target)):
                raise ReadsLayout(node)
            if not _gives_tensors(node):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: now.get(n, value(n)))
            try:
                new = target(*args, **kwargs)
            except Exception as error:
                if target is not torch.ops.aten.view.default:
                    raise ReadsLayout(node) from error
                target = torch.ops.aten.reshape.default
                new = target(*args, **kwargs)
            if target is not node.target or not (as_traced or _same_strides(value(node), new)):
                now[node] = new
                found.append(Relaid(node, target, new))
    return found


@dataclass
class Relaid:
    """A node whose operands lie otherwise than before, and its value then.

    Attributes:
        target: what it has to call: a view that the new strides rule out is a reshape, which
            copies.
    """

    node: fx.Node
    target: Callable
    value: Any

    def apply(self) -> None:
        self.node.target, self.node.meta["val"] = self.target, self.value


def results(graph: fx.Graph) -> list:
    """What the graph returns, flat: the fake values of its nodes, anything else as it is."""
    return [value(n) for n in pytree.tree_leaves(graph.output_node().args)]


def lay_as_before(graph: fx.Graph, before: Sequence) -> None:
    """Copies results that were contiguous and no longer are: whoever gets one, a hook or another
    backward, may have reason to rely on it.

    Args:
        before: the :func:`results` of then.
    """
    output = graph.output_node()
    flat, spec = pytree.tree_flatten(output.args)
    copies: dict[fx.Node, fx.Node] = {}
    for node, was in zip(flat, before, strict=True):
        now = value(node)
        if not isinstance(node, fx.Node) or not isinstance(now, torch.Tensor) or node in copies:
            continue
        if same_size(was.stride(), now.stride()) or not was.is_contiguous():
            continue
        with graph.inserting_before(output), fake_mode_of(graph):
            layout = {"memory_format": torch.contiguous_format}
            copy = graph.call_function(torch.ops.aten.clone.default, (node,), layout)
            copy.meta = dict(node.meta) | {"val": now.clone(**layout)}
        copies[node] = copy
    output.args = pytree.tree_unflatten([copies.get(n, n) for n in flat], spec)


def _gives_tensors(node: fx.Node) -> bool:
    return all(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def _is_given_strides(target: object) -> bool:
    """Whether ``target`` is a custom op that gets its operands from Inductor as it was traced with
    them; its fake is run on them as they are."""
    exact = torch.Tag.needs_exact_strides
    is_custom = isinstance(target, torch._ops.OpOverload) and not _is_known(target)
    return is_custom and get_layout_constraint_tag(target) is exact


def _by_elements(target: object) -> bool:
    """Whether what ``target`` computes does not depend on how its operands lie. Of others' kernels
    that is not known: strides may have been written into the graph."""
    if target is operator.getitem:
        return True
    is_known = isinstance(target, torch._ops.OpOverload) and _is_known(target)
    return is_known and not any(word in str(target) for word in _LAYOUT_WORDS)


def _is_known(op: torch._ops.OpOverload) -> bool:
    return op.namespace in ("aten", "prims", "fusedbwd")


_LAYOUT_WORDS = ("strid", "storage_offset", "contiguous")


def _same_strides(was, now) -> bool:
    pairs = zip(pytree.tree_leaves(was), pytree.tree_leaves(now), strict=True)
    return all(same_size(a.stride(), b.stride()) for a, b in pairs)


def depends_on(nodes: Iterable[fx.Node], targets: Iterable[fx.Node]) -> bool:
    """Whether any of ``nodes`` is, or is computed from, any of ``targets``."""
    targets, seen, todo = set(targets), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node in targets:
            return True
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return False


def reachable(node: fx.Node) -> set[fx.Node]:
    """``node`` and everything computed from it."""
    seen, todo = set(), [node]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo.extend(n.users)
    return seen


@dataclass
class Extraction:
    """A graph under construction by :func:`extract`.

    Attributes:
        graph: the new graph.
        copied: what stands for each node of the old graph.
        sizes: where each open size can be read: a placeholder of the new graph, and a dimension.
    """

    graph: fx.Graph
    copied: dict[fx.Node, fx.Node | int]
    sizes: dict[object, tuple[fx.Node, int]]

    def size(self, size: int | torch.SymInt) -> fx.Node | int:
        """``size`` in the new graph; -1 where it is not the size of an input."""
        if isinstance(size, int):
            return size
        if size.node.expr not in self.sizes:
            return -1
        node = self.graph.call_function(torch.ops.aten.sym_size.int, self.sizes[size.node.expr])
        node.meta["val"] = size
        return node


def extract(
    outputs: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    names: Sequence[str] | None = None,
    *,
    substitute: Callable[[Extraction, fx.Node], fx.Node | int | None] = lambda *_: None,
) -> fx.Graph:
    """The graph that computes ``outputs`` from ``inputs``, a placeholder for each in order.

    Size nodes are rebuilt from the inputs' own sizes where those have them.

    Args:
        names: the placeholders' names.
        substitute: asked for each node before it is copied; what it returns, unless None,
            stands for the node.

    Raises:
        Leak: the outputs depend on a placeholder that is not an input.
    """
    new = Extraction(fx.Graph(), {}, {})
    for i, node in enumerate(inputs):
        placeholder = new.graph.placeholder(names[i] if names else node.name)
        placeholder.meta = dict(node.meta)
        new.copied.setdefault(node, placeholder)
        if isinstance(value(node), torch.Tensor):
            for dim, size in enumerate(value(node).shape):
                if isinstance(size, torch.SymInt):
                    new.sizes.setdefault(size.node.expr, (placeholder, dim))

    def without_operands(node: fx.Node) -> fx.Node | int | None:
        """``node``'s stand-in, where it needs nothing that the old graph computes for it."""
        made = substitute(new, node)
        val = node.meta.get("val")
        if made is None and isinstance(val, torch.SymInt) and val.node.expr in new.sizes:
            made = new.size(val)
        if made is None and node.op == "placeholder":
            raise Leak(node)
        return made

    # Depth first, without recursion: joint graphs are deep.
    todo = [n for n in reversed(outputs) if isinstance(n, fx.Node)]
    while todo:
        node = todo[-1]
        if node in new.copied:
            todo.pop()
        elif (made := without_operands(node)) is not None:
            new.copied[node] = made
        elif missing := [n for n in node.all_input_nodes if n not in new.copied]:
            todo.extend(missing)
        else:
            new.copied[node] = new.graph.node_copy(node, new.copied.__getitem__)
    new.graph.output([new.copied[n] if isinstance(n, fx.Node) else n for n in outputs])
    return new.graph


__all__ = [
    "SAVED_KEY",
    "Extraction",
    "Leak",
    "ReadsLayout",
    "depends_on",
    "extract",
    "fake_mode_of",
    "gradient_nodes",
    "inline",
    "lay_as_before",
    "reachable",
    "relaid",
    "results",
    "same_size",
    "stable_topological_sort",
    "value",
]
