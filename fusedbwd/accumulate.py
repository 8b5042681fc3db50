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

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from fusedbwd.graph import same_size, value
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
            ir.NoneLayout(device=total.get_device()),  # type: ignore[arg-type]
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
        return self.inputs[0].codegen_reference(writer)  # type: ignore[union-attr]


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
    if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
        return  # Inductor then has kernels other than cuBLAS's to choose from
    if inductor_config.aten_distributed_optimizations.enable_overlap_scheduling:
        return  # nodes are put in another order then, which no edge keeps a reader of x out of
    found = 0
    for node in list(graph.nodes):
        for x, product in _terms(node):
            early = _to_run_before(node, x, product)
            if early is not None:
                _replace(node, x, product, early)
                found += 1
                break
    graph.eliminate_dead_code()
    graph.lint()
    log.debug("%d sums added up in place", found)


def _terms(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The ways in which ``node`` is x + a @ b: pairs of x and what multiplies, its last operands
    a and b."""
    if node.target is aten.addmm.default and not node.kwargs:
        return [(node.args[0], node)]
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    found = []
    for x, term in (node.args, node.args[::-1]):
        while isinstance(term, fx.Node) and term.target in _VIEWS and len(term.users) == 1:
            term = term.args[0]
        is_matmul = isinstance(term, fx.Node) and term.target is aten.mm.default
        if isinstance(x, fx.Node) and is_matmul and len(term.users) == 1:
            found.append((x, term))
    return found


def _to_run_before(total: fx.Node, x: fx.Node, product: fx.Node) -> list[fx.Node] | None:
    """What comes after ``total`` = x + a @ b and has to come before it if x is overwritten, in
    order: what reads x, and what that needs. None if x may not be overwritten.
    """
    a, b = product.args[-2:]
    made = _made_as(x)
    if made is None or not _alike(x, total, a, b):
        return None
    same = _aliases(made)
    nodes = list(total.graph.nodes)
    place = nodes.index(total)
    # The factors are read where the total is, no longer where the product was.
    between = nodes[nodes.index(product) : place]
    overwritten = (_aliases(_made_as(n.args[0])) for n in between if n.target is add_matmul)
    if any(a in memory or b in memory for memory in (same, *overwritten)):
        return None
    early = {user for n in same for user in n.users} - {total}
    following = nodes[place + 1 :]
    for node in reversed(following):
        if node in early:
            early.update(node.all_input_nodes)
    moved = [node for node in following if node in early]
    return None if total in early or any(map(_stays, moved)) else moved


def _stays(node: fx.Node) -> bool:
    """Whether ``node``'s place in the graph matters: what it does is not all in its result."""
    if node.op == "output" or node.target is add_matmul:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _alike(x: fx.Node, total: fx.Node, a: fx.Node, b: fx.Node) -> bool:
    v = value(x)
    return (
        v.is_contiguous()
        and v.is_floating_point()
        and v.dtype == value(a).dtype == value(b).dtype == value(total).dtype
        and same_size(v.shape, value(total).shape)
    )


def _made_as(x: fx.Node) -> fx.Node | None:
    """The node that ``x`` is all of, if its memory is of this graph's own."""
    while x.target in _VIEWS:
        x = x.args[0]
    source = x.args[0] if x.target is operator.getitem else x
    if not isinstance(source, fx.Node):
        return None
    return x if source.target in (*_computing(), add_matmul) else None


def _aliases(node: fx.Node) -> set[fx.Node]:
    """``node`` and what may share its memory: all but what matmuls and kernels compute from it.

    Inductor may make other ops return what they are given, a cast to the same dtype for example.
    """
    todo = [node]
    if node.target is operator.getitem:
        todo = [n for n in node.args[0].users if n.args[1] == node.args[1]]
    found, computing = set(todo), (*_computing(), aten.add.Tensor)
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and user.target not in computing and user not in found:
                found.add(user)
                todo.append(user)
    return found


def _computing() -> tuple:
    """Targets whose results are new memory, also to Inductor."""
    return (*_MATMULS, *LAUNCHERS, triton_kernel_wrapper_functional)


def _replace(total: fx.Node, x: fx.Node, product: fx.Node, early: list[fx.Node]) -> None:
    """Puts the addition in place of ``total``, and ``early`` before it."""
    for node in early:
        total.prepend(node)
    with total.graph.inserting_before(total):
        new = total.graph.call_function(add_matmul, (x, *product.args[-2:]))
    new.meta.update(total.meta, val=value(x))
    total.replace_all_uses_with(new)
