"""Input gradients that are added up: two or three matmuls, and a residual, in one.

Projections that share their input (q, k and v; gate and up) each give a gradient for it::

    dx = dy_0 @ W_0 + dy_1 @ W_1 + ... (+ residual)

Replaces the matmuls and the additions by one kernel that walks all the sums' steps, so that
only the total is rounded and no partial result goes through memory. A single matmul and a
residual are taken where the matmul's result is wider than its operands; the library's addmm
does as well where it is not. A matmul on float16 parts takes in one other tensor.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.pattern_matcher import Arg, CallFunction, Match

from fusedbwd.graph import gradient_nodes, same_size, value
from fusedbwd.kernels import fp16_matmul, sum_matmul
from fusedbwd.kernels._routes import pays
from fusedbwd.kernels.matmul_sum import MAX_PAIRS, sum_matmul_shape
from fusedbwd.patterns.matmuls import fp16_product_of, pairs_of, product_of, require_operands
from fusedbwd.patterns.pattern import Pattern, Rewrite, only_user, require
from fusedbwd.patterns.walk import VIEWS

aten = torch.ops.aten


def _prove(match: Match) -> Rewrite | None:
    node = match.output_node()
    if not _is_sum(node) or _is_inner(node):
        return None
    terms = _terms(node)
    if len(terms) == 2 and (rewrite := _into_fp16_matmul(node, *terms)) is not None:
        return rewrite
    products = {t: p for t in terms if (p := product_of(t, alone=True)) is not None}
    rest = [t for t in terms if t not in products]
    if not products or (len(products) == 1 and not (rest and _widens(*products.values()))):
        return None  # an addition like any other
    if node not in gradient_nodes(node.graph):  # last: it goes through the whole graph
        return None

    names = ", ".join(t.name for t in terms)
    require(len({*terms}) == len(terms), f"{node.name} adds a tensor more than once: {names}")
    require(len(products) <= MAX_PAIRS, f"{node.name} adds up {len(products)} matmuls: {names}")
    require(len(rest) <= 1, f"{node.name} adds {len(rest)} tensors to its matmuls: {names}")
    out, dtype = value(node), value(node).dtype
    for term in terms:
        v = value(term)
        require(
            v.dtype == dtype and same_size(v.shape, out.shape),
            f"{term.name} is {v.dtype} {list(v.shape)}, the sum {node.name} {dtype} "
            f"{list(out.shape)}",
        )
    pairs = [p for matmul in products.values() for p in pairs_of(matmul)]
    require(len(pairs) <= MAX_PAIRS, f"{node.name} adds up {len(pairs)} matmuls: {names}")
    require_operands(*(n for pair in pairs for n in pair))
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    sizes_of_first = value(a[0]).shape[0], value(b[0]).shape[1]
    for x, y in zip(a, b, strict=True):
        # Results of other shapes can look alike behind their views.
        rows_and_width = value(x).shape[0], value(y).shape[1]
        require(
            same_size(rows_and_width, sizes_of_first),
            f"{x.name} @ {y.name} is {list(rows_and_width)}, {a[0].name} @ {b[0].name} "
            f"{list(sizes_of_first)}",
        )
    shape = sum_matmul_shape([*map(value, a)], [*map(value, b)], rest or None, dtype)
    require(pays(shape, out.device), f"as measured, cuBLAS is faster on {shape}")

    # A view's own sizes, so that the result has the sum's shape in the graph's own symbols.
    viewed = next((t for t in products if t.target in VIEWS), None)
    require(viewed is not None or out.dim() == 2, f"{node.name} is not a view of its matmuls")
    sizes = viewed.args[1] if viewed is not None else ()
    count, width = len(pairs), value(b[0]).shape[1]

    def replacement(*operands):
        a, b = operands[:count], operands[count : 2 * count]
        residual, *sizes = operands[2 * count :]
        residual = None if residual is None else residual.reshape(-1, width)
        dx = sum_matmul(a, b, residual, dtype)
        return (dx.reshape(sizes) if sizes else dx,)

    return Rewrite((node,), (*a, *b, rest[0] if rest else None, *sizes), replacement)


def _into_fp16_matmul(node: fx.Node, left: fx.Node, right: fx.Node) -> Rewrite | None:
    """The rewrite of ``left + right`` where one is a view of a matmul on float16 parts."""
    term, added = (left, right) if fp16_product_of(left) is not None else (right, left)
    product = fp16_product_of(term)
    if product is None or left is right:
        return None
    for v in (value(term), value(added)):
        same = v.dtype == value(node).dtype and same_size(v.shape, value(node).shape)
        require(same, f"{term.name} is {value(term).dtype} {list(value(term).shape)}, what is "
                      f"added {value(added).dtype} {list(value(added).shape)}")  # fmt: skip
    a, b, a_parts, b_parts, _ = product.args
    count, width = len(a_parts), value(product).shape[1]
    sizes = term.args[1] if term.target in VIEWS else ()

    def replacement(a, b, added, *rest):
        parts, sizes = rest[: 2 * count], rest[2 * count :]
        added = added.reshape(-1, width)
        out = fp16_matmul(a, b, parts[:count], parts[count:], added)
        return (out.reshape(sizes) if sizes else out,)

    return Rewrite((node,), (a, b, added, *a_parts, *b_parts, *sizes), replacement)


def _is_inner(node: fx.Node) -> bool:
    """Whether ``node``'s value only goes into another addition, which then is the anchor."""
    user = only_user(node)
    return user is not None and _is_sum(user)


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(a, fx.Node) and isinstance(value(a), torch.Tensor) for a in node.args)
    )


def _terms(node: fx.Node) -> list[fx.Node]:
    """What ``node`` adds up; a partial sum that is used elsewhere too is a term."""
    terms, todo = [], list(node.args[::-1])
    while todo:
        term = todo.pop()
        if _is_sum(term) and len(term.users) == 1:
            todo.extend(term.args[::-1])
        else:
            terms.append(term)
    return terms


def _widens(matmul: fx.Node) -> bool:
    return value(matmul).dtype != value(pairs_of(matmul)[0][0]).dtype


PATTERN = Pattern(
    name="sum_matmul",
    anchors=[CallFunction(aten.add.Tensor, Arg(), Arg())],
    prove=_prove,
)
