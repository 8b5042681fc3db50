"""GeGLU: linear * gelu(act)."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, WIDTH, arguments_of, joint_graph, wide

from fusedbwd import Config
from fusedbwd.fuse import fuse

PATTERN = "geglu_backward"


def tanh(x):
    return F.gelu(x, approximate="tanh")


def by_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


SPELLINGS = {
    "tanh": lambda g, u: tanh(g) * u,
    "exact": lambda g, u: u * F.gelu(g),
    "in fp32, cast": lambda g, u: u * tanh(wide(g)).to(g.dtype),
    "projected": lambda g, u, m: (tanh(g) * u) @ m,
    "from one input": lambda x, m1, m2, m3: x + (tanh(x @ m1) * (x @ m2)) @ m3,
    "by tanh": lambda g, u, m: (by_tanh(g) * u) @ m,
    "by erf, from one input": lambda x, m1, m2: by_erf(x @ m1) * (x @ m2),
    "squared": lambda g: F.gelu(g) * F.gelu(g),
    "clones": lambda g, u: tanh(g.clone()) * u.contiguous(),
}


@KINDS
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check, name, dtype, dynamic):
    fn = SPELLINGS[name]
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


@pytest.mark.parametrize("act_first", [True, False], ids=["act first", "linear first"])
def test_packed_projection(check, act_first):
    """Both factors of one matmul: the fused op writes that matmul's gradient itself."""

    def fn(x, m):
        a, b = (x @ m).chunk(2, -1)
        return tanh(a) * b if act_first else a * tanh(b)

    shapes = arguments_of(fn, m=(WIDTH, 2 * WIDTH))
    check(fn, shapes, dynamic=True, fires=1)
    gm, _ = joint_graph(fn, shapes, torch.bfloat16, dynamic=True)
    fuse(gm.graph, Config())
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)


def test_two_in_one_graph(check):
    def fn(x, m1, m2):
        for gelu in (tanh, F.gelu):
            x = x + gelu(x @ m1) * (x @ m2)
        return x

    check(fn, arguments_of(fn), fires=2)


def test_bias_before_it(check):
    """The gate's bias gradient is summed from what the fused op gives."""

    def fn(x, m1, m2, b):
        return tanh(x @ m1 + b) * (x @ m2)

    check(fn, arguments_of(fn), fires=1)


def test_frozen(check):
    """With only one factor's gradient wanted there is nothing to fuse."""
    fn = SPELLINGS["tanh"]
    report = check(fn, arguments_of(fn), frozen=("u",), fires=0)
    assert "no product" in report.near_misses()[PATTERN][0].reason
    check(fn, arguments_of(fn), frozen=("g",), fires=0)


@pytest.mark.parametrize(("used", "fires"), [("gelu", 0), ("product", 1)])
def test_intermediate_used_elsewhere(check, used, fires):
    def fn(g, u, m):
        s = tanh(g)
        a = s * u
        return torch.cat([a @ m, s if used == "gelu" else a], -1)

    check(fn, arguments_of(fn), fires=fires)


def test_gelu_that_gates_nothing(check):
    """No near miss either: there is a fusion for that."""

    def fn(x, b, m):
        return tanh(x + b) @ m

    report = check(fn, arguments_of(fn), fires={"gelu_backward": 1})
    assert PATTERN not in report.near_misses()


LOOK_ALIKES = {
    "silu": (lambda g, u: F.silu(g) * u, {"swiglu_backward": 1}),
    "relu": (lambda g, u: F.relu(g) * u, 0),
    "gelu alone": (lambda g: tanh(g), 0),
    "gelu detached": (lambda g, u: tanh(g).detach() * u + tanh(g), 0),
    "broadcast factor": (lambda g, w: tanh(g) * w, 0),
    "scalar factor": (lambda g: tanh(g) * 3.0, 0),
    "gelu of the product": (lambda g, u: tanh(g * u), 0),
    "x * sigmoid(1.702 x)": (lambda g, u: g * torch.sigmoid(1.702 * g) * u, 0),
    "tanh": (lambda g, u: torch.tanh(g) * u, 0),
    "softcap": (lambda g, u: 30 * torch.tanh(g / 30) * u, 0),
    "another cubic": (lambda g, u: g * (1 + torch.tanh(0.79 * (g + 0.04 * g**3))) * u, 0),
    "twice by_tanh": (lambda g, u: 2 * by_tanh(g) * u, 0),
    "tanh detached": (
        lambda g, u: 0.5 * g * (1 + torch.tanh(0.7978845608 * (g + 0.044715 * g**3)).detach()) * u,
        0,
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check, name):
    fn, fires = LOOK_ALIKES[name]
    check(fn, arguments_of(fn), fires=fires)


ODD_BACKWARDS = {
    "gradient of the linear factor doubled": lambda dy, g, u: (dy * u, g, 2 * dy * tanh(g)),
    "the other GELU": lambda dy, g, u: (dy * u, g, dy * F.gelu(g)),
    "of rows that were swapped": lambda dy, g, u: (dy * u, g, dy.flip(0) * tanh(g)),
    "gelu of another tensor": lambda dy, g, u: (dy * u, g, dy * tanh(u)),
    "a sum, not a product": lambda dy, g, u: (dy + u, g, dy * tanh(g)),
    "at another point": lambda dy, g, u: (dy * u, g + 1, dy * tanh(g)),
}


@pytest.mark.parametrize("name", ODD_BACKWARDS)
def test_backwards_that_are_not_geglus(check, name):
    backward_of = ODD_BACKWARDS[name]

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, u):
            ctx.save_for_backward(g, u)
            return tanh(g) * u

        @staticmethod
        def backward(ctx, dy):
            d_gelu, at, d_linear = backward_of(dy, *ctx.saved_tensors)
            return torch.ops.aten.gelu_backward(d_gelu, at, approximate="tanh"), d_linear

    def fn(g, u):
        return Odd.apply(g, u)

    check(fn, arguments_of(fn), fires=0)
