"""Sums ``x + a @ b`` that cuBLAS adds up in the memory of x.

Runs behind :mod:`fusedbwd.launch` over a post-grad graph. As Inductor compiles ``x + a @ b``, the
matmul and the addition are two kernels, and ``addmm(x, a, b)`` copies x into a fresh result before
it adds. Where x is a tensor that this graph has made, and everything else that reads it can be
done before, the matmul adds to x itself, which then is the result.

To the graph that is one node, whose target is its own lowering, as in Inductor's pattern matcher:
the C++ wrapper calls ATen's ``addmm_out`` with x as both input and output, as the Python wrapper
does. ATen copies nothing then.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from fusedbwd.graph import depends_on, same_size, value
from fusedbwd.kernels._op import LAUNCHERS

log = logging.getLogger("fusedbwd")

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class _AddMatmul(ir.ExternKernelOut):
    """``total += a @ b``, in Inductor's IR."""

    def __init__(self, total: ir.IRNode, a: ir.IRNode, b: ir.IRNode):
        V.graph.mark_buffer_mutated(total.get_name())
        super().__init__(
            ir.NoneLayout(device=total.get_device()),
            [total, a, b],
            kwargs={"alpha": 1, "beta": 1},
            python_kernel_name="extern_kernels.addmm",
            cpp_kernel_name="at::addmm_out",
            ordered_kwargs_for_cpp_kernel=("beta", "alpha"),
            op_overload=aten.addmm.out,
        )

    def should_allocate(self) -> bool:
        return False

    def get_mutation_names(self) -> list[str]:
        return [self.input_name(0)]

    def codegen_reference(self, writer=None) -> str:
        return self.inputs[0].codegen_reference(writer)


def add_matmul(x, a, b):
    """``x + a @ b`` in the memory of x: called by Inductor with its IR of the operands.

    Args:
        x: [..., N], T rows in all.
        a: [T, K].
        b: [K, N].

    Returns:
        x.
    """
    a, b = (ir.ExternKernel.realize_input(t) for t in (a, b))
    x = ir.ExternKernel.require_contiguous(x)
    _AddMatmul(lowerings[aten.view.default](x, [a.get_size()[0], b.get_size()[1]]), a, b)
    return x


# What Inductor asks of a target that is not an op; the second, from 2.14 on, is where the
# result's metadata comes from.
add_matmul._inductor_lowering_function = True  # type: ignore[attr-defined]
add_matmul._inductor_lowering_output_metadata_is_input = 0  # type: ignore[attr-defined]


def accumulate_pass(graph: fx.Graph) -> None:
    """Replaces each sum of a tensor that may be overwritten and a matmul."""
    found = 0
    for node in list(graph.nodes):
        overwritten = next((t for t in _terms(node) if _may_overwrite(node, *t)), None)
        if overwritten is not None:
            _replace(node, *overwritten)
            found += 1
    if found:
        graph.eliminate_dead_code()
        log.debug("%d sums added up in place", found)
    graph.lint()


def _terms(node: fx.Node) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """The ways in which ``node`` is x + a @ b: triples x, a, b."""
    if node.target is aten.addmm.default and not node.kwargs:
        return [node.args]  # type: ignore[list-item]
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    found = []
    for x, term in (node.args, node.args[::-1]):
        while isinstance(term, fx.Node) and term.target in _VIEWS and len(term.users) == 1:
            term = term.args[0]
        if isinstance(x, fx.Node) and isinstance(term, fx.Node):
            if term.target is aten.mm.default and len(term.users) == 1:
                found.append((x, *term.args))
    return found


def _may_overwrite(total: fx.Node, x: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    """Whether ``total`` = x + a @ b may lie where x does."""
    made = _made_as(x)
    if made is None or not _alike(x, total, a, b):
        return False
    same = _aliases(made)
    readers = _readers(same, total)
    if a in same or b in same or any(n.op == "output" or _writes(n) for n in readers):
        return False
    return not depends_on(readers, [total])


def _alike(x: fx.Node, total: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    v = value(x)
    return (
        v.is_contiguous()
        and v.is_floating_point()
        and v.dtype == value(a).dtype == value(b).dtype == value(total).dtype
        and same_size(v.shape, value(total).shape)
        and same_size(v.shape[-1:], value(b).shape[-1:])
    )


def _made_as(x: fx.Node) -> fx.Node | None:
    """What ``x`` is all of, if that is memory which this graph allocates."""
    while x.target in _VIEWS:
        x = x.args[0]  # type: ignore[assignment]
    source = x.args[0] if x.target is operator.getitem else x
    if not isinstance(source, fx.Node):
        return None
    fresh = (*_MATMULS, *LAUNCHERS, triton_kernel_wrapper_functional, add_matmul)
    return x if source.target in fresh else None


def _aliases(node: fx.Node) -> set[fx.Node]:
    """``node`` and what may share its memory: all but what matmuls and kernels compute from it.

    Inductor's own ops may return what they are given (a cast to the same dtype, a clone), so
    they count as views.
    """
    todo = [node]
    if node.target is operator.getitem:
        todo = [n for n in node.args[0].users if n.args[1] == node.args[1]]  # type: ignore[union-attr]
    found = set(todo)
    computed = (*_MATMULS, *LAUNCHERS, triton_kernel_wrapper_functional, aten.add.Tensor)
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and user.target not in computed and user not in found:
                found.add(user)
                todo.append(user)
    return found


def _readers(nodes: Iterable[fx.Node], but: fx.Node) -> list[fx.Node]:
    return [user for n in nodes for user in n.users if user is not but]


def _writes(node: fx.Node) -> bool:
    """Whether ``node`` writes to an operand: it has to stay where it is."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _replace(total: fx.Node, x: fx.Node, a: fx.Node, b: fx.Node) -> None:
    """Puts the addition in place of ``total``, behind everything else that reads ``x``."""
    graph, made = total.graph, _made_as(x)
    assert made is not None
    late = set(_readers(_aliases(made), total))
    following = list(graph.nodes)
    following = following[following.index(total) + 1 :]
    for node in reversed(following):
        if node in late:
            late.update(node.all_input_nodes)
    for node in following:
        if node in late:
            total.prepend(node)
    with graph.inserting_before(total):
        new = graph.call_function(add_matmul, (x, a, b))
    new.meta.update(total.meta, val=value(x))
    total.replace_all_uses_with(new)
