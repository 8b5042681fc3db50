"""SwiGLU: linear * silu(act)."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, WIDTH, arguments_of, joint_graph, wide

import fusedbwd.fuse as fuse_module
from fusedbwd import Config
from fusedbwd.fuse import fuse
from fusedbwd.patterns import PATTERNS

PATTERN = "swiglu_backward"


def silu_wide(g):
    return F.silu(wide(g)).to(g.dtype)


def swish(g):
    return g * torch.sigmoid(g)


SPELLINGS = {
    "silu(g) * u": lambda g, u: F.silu(g) * u,
    "u * silu(g)": lambda g, u: u * F.silu(g),
    "in fp32, cast": lambda g, u: u * silu_wide(g),
    "cast after the product": lambda g, u: (F.silu(wide(g)) * wide(u)).to(g.dtype),
    "projected": lambda g, u, m: (F.silu(g) * u) @ m,
    "swish, from one input": lambda x, m1, m2: swish(x @ m1) * (x @ m2),
    "from one input": lambda x, m1, m2, m3: (F.silu(x @ m1) * (x @ m2)) @ m3,
    "residual": lambda x, m1, m2, m3: x + (F.silu(x @ m1) * (x @ m2)) @ m3,
    "x * sigmoid(x)": lambda g, u: g * torch.sigmoid(g) * u,
    "sigmoid(x) * x, projected": lambda g, u, m: (u * (torch.sigmoid(g) * g)) @ m,
    "three factors": lambda g, u, x: F.silu(g) * u * x,
    "squared": lambda g: F.silu(g) * F.silu(g),
    "clones": lambda g, u: F.silu(g.clone()) * u.contiguous(),
    "flattened": lambda g, u: (F.silu(g.flatten(0, 1)) * u.flatten(0, 1)).view_as(g),
}


@KINDS
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check, name, dtype, dynamic):
    fn = SPELLINGS[name]
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_more_dtypes(check, dtype):
    fn = SPELLINGS["projected"]
    check(fn, arguments_of(fn), dtype, fires=1)


@pytest.mark.parametrize("tokens", [("t",), ("b", "s"), ("b", 2, "s"), (1,), (1, 1)], ids=str)
def test_ranks(check, tokens):
    fn = SPELLINGS["projected"]
    shapes = dict.fromkeys("gu", (*tokens, WIDTH)) | {"m": (WIDTH, WIDTH)}
    check(fn, shapes, dynamic=any(isinstance(s, str) for s in tokens), fires=1)


def by_slices(y):
    return y[..., :WIDTH], y[..., WIDTH:]


@pytest.mark.parametrize("act_first", [True, False], ids=["act first", "linear first"])
@pytest.mark.parametrize("halves", [lambda y: y.chunk(2, -1), by_slices], ids=["chunk", "slices"])
def test_packed_projection(check, halves, act_first):
    """Both factors of one matmul: the fused op writes that matmul's gradient itself."""

    def fn(x, m):
        a, b = halves(x @ m)
        return F.silu(a) * b if act_first else a * F.silu(b)

    shapes = arguments_of(fn, m=(WIDTH, 2 * WIDTH))
    check(fn, shapes, dynamic=True, fires=1)
    gm, _ = joint_graph(fn, shapes, torch.bfloat16, dynamic=True)
    fuse(gm.graph, Config())
    left = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
    assert not left & {"aten.cat.default", "aten.slice_scatter.default", "aten.full.default"}


def of(y, *starts, width=WIDTH):
    return (y[..., start : start + width] for start in starts)


NOT_HALVES = {
    "a column is left": lambda y: (*of(y, 0, WIDTH), 0),
    "a column between": lambda y: (*of(y, 0, WIDTH + 1), 0),
    "overlapping": lambda y: (*of(y[..., :-2], 0, WIDTH - 1), 0),
    "along rows": lambda y: (*y.chunk(2, -2), 0),
    "three parts": lambda y: y[..., :-1].split(WIDTH * 2 // 3, -1),
    "one used elsewhere": lambda y: (*y[..., :-1].chunk(2, -1), y[..., :WIDTH]),
    "one turned": lambda y: (*(t.flip(1) for t in y[..., :-1].chunk(2, -1)), 0),
    "one negative": lambda y: (y[..., :WIDTH], -y[..., WIDTH:-1], 0),
}


@pytest.mark.parametrize("name", NOT_HALVES)
def test_what_is_not_halves(check, name):
    """Both gradients are written, and joined by the compiler."""

    def fn(y):
        g, u, more = NOT_HALVES[name](y)
        return F.silu(g) * u + more

    check(fn, {"y": ("b", 4, 2 * WIDTH + 1)}, dynamic=True, fires=1)


def test_two_in_one_graph(check):
    def fn(x, m1, m2):
        for _ in range(2):
            x = x + F.silu(x @ m1) * (x @ m2)
        return x

    check(fn, arguments_of(fn), fires=2)


def test_frozen(check):
    """With only one factor's gradient wanted there is nothing to fuse."""
    fn = SPELLINGS["silu(g) * u"]
    report = check(fn, arguments_of(fn), frozen=("u",), fires=0)
    assert report.missed and "no product" in report.missed[0].reason
    check(fn, arguments_of(fn), frozen=("g",), fires=0)


@pytest.mark.parametrize("name", ["silu", "product", "both"])
def test_intermediate_used_elsewhere(check, name):
    def fn(g, u, m):
        s = F.silu(g)
        a = s * u
        more = {"silu": [s], "product": [a], "both": [s, a]}[name]
        return torch.cat([a @ m, *more], -1)

    check(fn, arguments_of(fn), fires=0 if name in ("silu", "both") else 1)


LOOK_ALIKES = {
    "relu": lambda g, u: F.relu(g) * u,
    "silu alone": lambda g: F.silu(g),
    "silu detached": lambda g, u: F.silu(g).detach() * u + F.silu(g),
    "broadcast factor": lambda g, w: F.silu(g) * w,
    "scalar factor": lambda g: F.silu(g) * 3.0,
    "sigmoid": lambda g, u: torch.sigmoid(g) * u,
    "silu of the product": lambda g, u: F.silu(g * u),
    "sigmoid of another": lambda g, u, x: g * torch.sigmoid(x) * u,
    "x * sigmoid(2 x)": lambda g, u: g * torch.sigmoid(2 * g) * u,
    "x^2 * sigmoid(x)": lambda g, u: g * g * torch.sigmoid(g) * u,
    "sigmoid detached": lambda g, u: g * torch.sigmoid(g).detach() * u,
    "x detached": lambda g, u: g.detach() * torch.sigmoid(g) * u,
    "swish alone": lambda g: g * torch.sigmoid(g),
    "swish of a broadcast factor": lambda g, w: g * torch.sigmoid(g) * w,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check, name):
    fn = LOOK_ALIKES[name]
    check(fn, arguments_of(fn), fires=0)


ODD_BACKWARDS = {
    "gradient of the linear factor doubled": lambda dy, g, u: (dy * u, g, 2 * dy * F.silu(g)),
    "of rows that were swapped": lambda dy, g, u: (dy * u, g, dy.flip(0) * F.silu(g)),
    "silu of another tensor": lambda dy, g, u: (dy * u, g, dy * F.silu(u)),
    "silu of the activation's rows swapped": lambda dy, g, u: (dy * u, g, dy * F.silu(g.flip(1))),
    "sigmoid": lambda dy, g, u: (dy * u, g, dy * torch.sigmoid(g)),
    "a sum, not a product": lambda dy, g, u: (dy + u, g, dy * F.silu(g)),
    "other gradients": lambda dy, g, u: (dy.flip(0) * u, g, dy * F.silu(g)),
    "squared gradient": lambda dy, g, u: (dy * dy, g, dy * F.silu(g)),
    "at another point": lambda dy, g, u: (dy * u, g + 1, dy * F.silu(g)),
}


@pytest.mark.parametrize("name", ODD_BACKWARDS)
def test_backwards_that_are_not_swiglus(check, name):
    backward_of = ODD_BACKWARDS[name]

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, u):
            ctx.save_for_backward(g, u)
            return F.silu(g) * u

        @staticmethod
        def backward(ctx, dy):
            d_silu, at, d_linear = backward_of(dy, *ctx.saved_tensors)
            return torch.ops.aten.silu_backward(d_silu, at), d_linear

    def fn(g, u):
        return Odd.apply(g, u)

    assert check(fn, arguments_of(fn), fires=0).missed


def test_silu_elsewhere(check):
    """Another silu in the graph is left alone, and reported."""

    def fn(g, u, x):
        return F.silu(g) * u + F.silu(x)

    assert len(check(fn, arguments_of(fn), fires=1).missed) == 1


def test_beside_long_sums(check):
    """A product with a factor that has no normal form is passed over."""

    def fn(g, u, x, y):
        powers = sum(x**k for k in range(8))
        z = (powers - powers.mean(-1, keepdim=True)) ** 4
        return F.silu(g) * u + y * z.detach() + 0 * x

    check(fn, arguments_of(fn), fires=1)


def test_mixed_dtypes(check):
    """A factor in another dtype is reported, not fused."""

    def fn(g, u):
        return F.silu(g) * u

    report = check(fn, arguments_of(fn), {"g": torch.bfloat16, "u": torch.float32}, fires=0)
    assert "differ in dtype" in report.missed[0].reason


def test_a_proof_with_a_fault(monkeypatch, caplog):
    """A fault of ours costs the fusion, with a warning, and not the compilation."""
    pattern = next(p for p in fuse_module.PATTERNS if p.name == PATTERN)

    def faulty(match):
        raise KeyError("nothing there")

    faults = tuple(dataclasses.replace(p, prove=faulty) if p is pattern else p for p in PATTERNS)
    monkeypatch.setattr(fuse_module, "PATTERNS", faults)
    fn = SPELLINGS["silu(g) * u"]
    gm, _ = joint_graph(fn, arguments_of(fn))
    report = fuse_module.fuse(gm.graph, Config())
    (miss,) = report.missed
    assert miss.reason == "the proof broke off: KeyError: 'nothing there'"
    assert "please report this" in caplog.text and not report.fired
