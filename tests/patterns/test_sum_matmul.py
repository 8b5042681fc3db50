"""Input gradients of projections of one input, added up."""

import re

import pytest
import torch
import torch.nn.functional as F
from harness import WIDTH, joint_graph

from fusedbwd import Config
from fusedbwd.fuse import fuse
from fusedbwd.kernels import sum_matmul

PATTERN = "sum_matmul"

KINDS = pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["bfloat16, static", "float16, dynamic"],
)


def two(x, v1, v2):
    return F.linear(x, v1) * F.linear(x, v2)


def three(x, v1, v2, v3):
    return F.linear(x, v1) * F.linear(x, v2) + F.linear(x, v3)


def residual(x, v1, v2):
    return x + two(x, v1, v2)


def residual_last(x, v1, v2):
    return two(x, v1, v2) + x


def with_biases(x, v1, v2, w1, w2):
    return F.linear(x, v1, w1) * F.linear(x, v2, w2)


def by_matmul(x, v1, v2):
    return (x @ v1.t()) * (x @ v2.t())


def shapes_of(fn, **given):
    tokens = ("b", "s", WIDTH)
    default = {"x": tokens, "y": tokens, "v": (WIDTH, WIDTH), "w": (WIDTH,)}
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return {n: given.get(n, default[n[0]]) for n in names}


@KINDS
@pytest.mark.parametrize("fn", [two, three, residual, residual_last, with_biases, by_matmul])
def test_spellings(check, fn, dtype, dynamic):
    check(fn, shapes_of(fn), dtype, dynamic=dynamic, fires=1)


@pytest.mark.parametrize("tokens", [("t",), ("b", 2, "s"), (1,), (1, 1)], ids=str)
def test_ranks(check, tokens):
    shapes = shapes_of(three, x=(*tokens, WIDTH))
    dynamic = any(isinstance(s, str) for s in tokens)
    check(three, shapes, torch.bfloat16, dynamic=dynamic, fires=1)


def test_widths_differ(check):
    """As those of q, k and v do."""

    def fn(x, v1, v2, v3):
        q, k, v = F.linear(x, v1), F.linear(x, v2), F.linear(x, v3)
        return q * torch.cat([k, v], -1)

    shapes = shapes_of(fn, v1=(48, WIDTH), v2=(16, WIDTH), v3=(32, WIDTH))
    check(fn, shapes, torch.bfloat16, fires=1)


def test_one_rounding(check):
    """The op's result is the sum: no addition and no matmul of its operands is left."""
    gm, _ = joint_graph(residual, shapes_of(residual), torch.bfloat16)
    fuse(gm.graph, Config())
    (op,) = gm.graph.find_nodes(op="call_function", target=sum_matmul)
    assert op.args[2] is not None
    left = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(left) == 4  # two of the forward, two weight gradients


def test_frozen_weights(check):
    check(three, shapes_of(three), torch.bfloat16, frozen=("v1", "v2", "v3"), fires=1)


def test_frozen_input(check):
    """Weight gradients alone: nothing is added up."""
    check(two, shapes_of(two), torch.bfloat16, frozen=("x",), fires=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes(check, dtype):
    report = check(two, shapes_of(two), dtype, fires=0)
    assert [m for m in report.missed if "left to the library's matmuls" in m.reason]


def test_one_matmul(check):
    """A residual alone is the library's addmm."""

    def fn(x, v):
        return x + F.linear(x, v)

    report = check(fn, shapes_of(fn), torch.bfloat16, fires=0)
    assert not report.missed


def test_four_matmuls(check):
    def fn(x, v1, v2, v3, v4):
        return two(x, v1, v2) + two(x, v3, v4)

    report = check(fn, shapes_of(fn), torch.bfloat16, fires=0)
    assert "adds up 4 matmuls" in report.missed[0].reason


def test_a_partial_sum_used_elsewhere(check):
    """It is a term like any other; what it adds up fuses by itself."""

    def fn(x, y, v1, v2, v3):
        return two(x + y, v1, v2) + F.linear(x, v3)

    check(fn, shapes_of(fn), torch.bfloat16, fires=1)


def test_a_product_used_elsewhere(check):
    """A gradient that is an output too has to be there by itself."""

    def fn(x, y, v1, v2):
        return F.linear(x + y, v1) + F.linear(x, v2)

    check(fn, shapes_of(fn), torch.bfloat16, fires=0)


def test_transposed_weights(check):
    """x @ v: the input gradient reads v's columns, which the kernel does not."""

    def fn(x, v1, v2):
        return (x @ v1) * (x @ v2)

    report = check(fn, shapes_of(fn), torch.bfloat16, fires=0)
    assert "has strides" in report.missed[0].reason


def test_forward_sums_are_left(check):
    """The same arithmetic in a forward is not a backward."""

    def fn(x, y, v1, v2):
        return F.linear(x, v1) + F.linear(y, v2)

    check(fn, shapes_of(fn), torch.bfloat16, fires=0)


def test_other_sums(check):
    """Differences and scaled sums are not sums."""

    def fn(x, v1, v2):
        return torch.sub(F.linear(x, v1), F.linear(x, v2), alpha=2.0) * 3

    check(fn, shapes_of(fn), torch.bfloat16, fires=1)  # the gradients are added all the same


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, v1, v2: two(x + x, v1, v2),
        lambda x, v1, v2: F.linear(x + x, v1) + F.linear(x, v2),
    ],
)
def test_a_term_added_twice(check, fn):
    """x + x: autograd adds one node to itself."""
    check(fn, shapes_of(fn), torch.bfloat16, fires=0)


def test_results_split_another_way(check):
    """[15, 64] and [30, 32] look alike behind their views."""

    def fn(x, v1, v2):
        return F.linear(x, v1) + F.linear(x.view(3, 5, 2, 32), v2).view(3, 5, 48)

    shapes = {"x": (3, 5, 64), "v1": (48, 64), "v2": (24, 32)}
    report = check(fn, shapes, torch.bfloat16, fires=0)
    assert re.search(r"is \[(30, 32|15, 64)\], \w+ @ \w+ \[(15, 64|30, 32)\]", str(report))


def test_inner_sum_behind_a_view(check):
    """It fuses by itself: the sum around it adds something else."""

    def fn(x, y, v1, v2):
        z = x.flatten()
        return two(z.view(x.shape), v1, v2).sum() + (z * y.flatten()).sum()

    check(fn, shapes_of(fn), torch.bfloat16, fires=1)
