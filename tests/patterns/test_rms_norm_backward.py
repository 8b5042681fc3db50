"""RMSNorm: x / sqrt(mean(x^2) + eps) * w, in the spellings that models have."""

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, WIDTH, arguments_of, assert_right, draw, joint_graph, wide
from torch import nn

from fusedbwd import Config
from fusedbwd.fuse import fuse

PATTERN = "rms_norm_backward"
EPS = 1e-5

STATIC_AND_DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True)


def normalized(x):
    return x * torch.rsqrt(mean_square(x) + EPS)


def hf_norm(x, w):
    """Llama's, as in transformers: cast, then the weight."""
    return w * normalized(wide(x)).to(x.dtype)


def wide_norm(x, w):
    """The weight before the cast, as in torchtitan and nn.RMSNorm."""
    return (normalized(wide(x)) * wide(w)).to(x.dtype)


def gemma_norm(x, w):
    return (normalized(wide(x)) * (1.0 + wide(w))).to(x.dtype)


SPELLINGS = {
    "hf": hf_norm,
    "hf, weight last": lambda x, w: normalized(wide(x)).to(x.dtype) * w,
    "weight before the cast": wide_norm,
    "gemma": gemma_norm,
    "gemma, 1 last": lambda x, w: (normalized(wide(x)) * (wide(w) + 1)).to(x.dtype),
    "no weight": lambda x: normalized(wide(x)).to(x.dtype),
    "F.rms_norm": lambda x, w: F.rms_norm(x, (WIDTH,), w, EPS),
    "F.rms_norm, no weight": lambda x: F.rms_norm(x, (WIDTH,), None, EPS),
}

FORMULAS = {
    "x * x": lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w,
    "square": lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w,
    "1 / sqrt": lambda x, w: x * (1 / torch.sqrt(mean_square(x) + EPS)) * w,
    "over sqrt": lambda x, w: x / torch.sqrt(mean_square(x) + EPS) * w,
    "reciprocal": lambda x, w: x * torch.sqrt(mean_square(x) + EPS).reciprocal() * w,
    "pow -0.5": lambda x, w: x * (mean_square(x) + EPS).pow(-0.5) * w,
    "over pow 0.5": lambda x, w: x / (mean_square(x) + EPS) ** 0.5 * w,
    "sum / N": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, True) / WIDTH + EPS) * w,
    "unsqueezed": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + EPS) * w,
    "eps first": lambda x, w: x * torch.rsqrt(EPS + mean_square(x)) * w,
    "weight first": lambda x, w: w * x * torch.rsqrt(mean_square(x) + EPS),
    "weight on rstd": lambda x, w: x * (torch.rsqrt(mean_square(x) + EPS) * w),
    "clones": lambda x, w: normalized(x.clone()).contiguous() * w,
    "expanded weight": lambda x, w: normalized(x) * w.expand_as(x),
    "scaled weight": lambda x, w: normalized(x) * (3 * w),
    "two weights": lambda x, w1, w2: normalized(x) * (w1 * w2),
    "exponential weight": lambda x, w: normalized(x) * w.exp(),
    "offset that is a tensor": lambda x, w, w2: normalized(x) * (w2[0] + w),
    "gemma, distributed": lambda x, w: normalized(x) + normalized(x) * w,
}


def heads(x):
    """Its gradient lies otherwise than the fused op's result."""
    return x.unflatten(-1, (3, 11)).transpose(1, 2)


IN_A_LAYER = {
    "projected": lambda x, w, m: hf_norm(x, w) @ m,
    "x + residual": lambda x, w, m: x + hf_norm(x, w) @ m,
    "residual + x": lambda x, w, m: hf_norm(x, w) @ m + x,
    "weight before the cast": lambda x, w, m: x + wide_norm(x, w) @ m,
    "gemma": lambda x, w, m: x + gemma_norm(x, w) @ m,
    "residual of the norm's input": lambda x, w, m, y: (x + y) + hf_norm(x + y, w) @ m,
    "post-norm": lambda x, w, m: x + hf_norm(x @ m, w),
    "sandwich": lambda x, w: x + hf_norm(x, w),
    "norm of a difference": lambda x, y, w, m: hf_norm(x - y, w) @ m,
    "flattened": lambda x, w, m: (hf_norm(x.flatten(0, 1), w) @ m).view_as(x),
    "heads": lambda x, w, m: hf_norm((x @ m).unflatten(1, (1, -1)).transpose(1, 2), w),
    "norms of heads": lambda x, w, m: hf_norm(heads(x @ m), w[:11]).transpose(1, 2).flatten(2),
}


@KINDS
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check, name, dtype, dynamic):
    fn = SPELLINGS[name]
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, fires=1)


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(check, name):
    fn = FORMULAS[name]
    check(fn, arguments_of(fn), dynamic=True, fires=1)


@DTYPES
@pytest.mark.parametrize("name", IN_A_LAYER)
def test_in_a_layer(check, name, dtype):
    fn = IN_A_LAYER[name]
    check(fn, arguments_of(fn), dtype, dynamic=True, fires=1)


@STATIC_AND_DYNAMIC
def test_module(check, dynamic):
    check(nn.RMSNorm(WIDTH, EPS), {"x": ("b", "s", WIDTH)}, dynamic=dynamic, fires=1)


@pytest.mark.parametrize("eps", [None, 1e-12, 1e-2, 3])
def test_eps(check, eps):
    def fn(x, w):
        return F.rms_norm(x, (WIDTH,), w, eps)

    check(fn, arguments_of(fn), fires=1)


@pytest.mark.parametrize("shape", [(), (1,), ("b", 1, 1), ("s", 1)], ids=str)
def test_eps_that_is_a_tensor(check, shape):
    """Of one number, or one for each row: the row's own statistic has it added."""

    def fn(x, w, eps):
        return x * torch.rsqrt(mean_square(x) + eps.abs()) * w

    check(fn, arguments_of(fn, eps=shape), dynamic=True, frozen=("eps",), fires=1)


def test_sums_of_tensors_without_dimensions(check):
    def fn(x, e):
        y = e.sum(0, keepdim=True) + torch.sqrt(e.pow(2).mean(0) + EPS)
        return normalized(x) * y

    check(fn, arguments_of(fn, e=()), fires=1)


@pytest.mark.parametrize(
    "tokens", [("t",), ("b", "s"), ("b", 2, "s"), (1,), (1, 1), (127,)], ids=str
)
@pytest.mark.parametrize("width", [48, 160])
def test_shapes(check, tokens, width):
    dynamic = any(isinstance(s, str) for s in tokens)
    shapes = {"x": (*tokens, width), "w": (width,), "m": (width, width)}
    check(IN_A_LAYER["x + residual"], shapes, dynamic=dynamic, fires=1)


def test_single_row_without_leading_dimensions(check):
    check(hf_norm, {"x": (WIDTH,), "w": (WIDTH,)}, fires=1)


@KINDS
@pytest.mark.parametrize("name", ["projected", "x + residual", "gemma"])
def test_frozen_weight(check, name, dtype, dynamic):
    fn = IN_A_LAYER[name]
    check(fn, arguments_of(fn), dtype, dynamic=dynamic, frozen=("w",), fires=1)


def test_frozen_input(check):
    """The weight gradient alone is left to the compiler."""
    fn = IN_A_LAYER["projected"]
    check(fn, arguments_of(fn), frozen=("x",), fires=0)


def test_float64(check):
    fn = IN_A_LAYER["x + residual"]
    check(fn, arguments_of(fn), torch.float64, fires=1)


def test_mixed_dtypes(check):
    """bf16 activations under an fp32 weight."""
    fn = IN_A_LAYER["weight before the cast"]
    dtypes = {"x": torch.bfloat16, "m": torch.bfloat16, "w": torch.float32}
    check(fn, arguments_of(fn), dtypes, fires=1)


def test_two_norms(check):
    def fn(x, w1, w2, m1, m2):
        x = x + hf_norm(x, w1) @ m1
        return x + hf_norm(x, w2) @ m2

    check(fn, arguments_of(fn), torch.bfloat16, dynamic=True, fires=2)


def test_shared_weight(check):
    def fn(x, w, m):
        x = x + hf_norm(x, w) @ m
        return x + hf_norm(x, w) @ m

    check(fn, arguments_of(fn), fires=2)


def test_two_norms_of_one_input(check):
    """Two gradients meet in x: each norm is fused for itself."""

    def fn(x, w1, w2, m):
        return hf_norm(x, w1) @ m + gemma_norm(x, w2)

    check(fn, arguments_of(fn), dynamic=True, fires=2)


def test_a_stack_of_layers(check):
    def fn(x, w, m):
        for _ in range(12):
            x = x + hf_norm(x, w) @ m * 0.1
        return x

    check(fn, arguments_of(fn, x=(3, WIDTH)), fires=12)


@pytest.mark.parametrize("name", ["normalized", "output", "rstd"])
def test_intermediate_used_elsewhere(check, name):
    def fn(x, w, m):
        r = torch.rsqrt(mean_square(x) + EPS)
        n = x * r
        y = n * w
        more = {"normalized": n, "output": y, "rstd": r}[name]
        return torch.cat([y @ m, more], -1)

    report = check(fn, arguments_of(fn), fires=0 if name == "rstd" else 1)
    assert report.fired or report.missed


def test_dropout_between(check):
    """A mask on the normalized tensor is part of neither gradient."""

    def fn(x, w, m):
        return ((normalized(x) * w) * (x.detach() > 0)) @ m

    check(fn, arguments_of(fn), fires=1)


LOOK_ALIKES = {
    "eps outside the root": lambda x, w: x / (torch.sqrt(mean_square(x)) + EPS) * w,
    "no eps": lambda x, w: x * torch.rsqrt(mean_square(x)) * w,
    "another axis": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * w,
    "two axes": lambda x, w: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS) * w,
    "sum, not mean": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * w,
    "mean of |x|": lambda x, w: x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS) * w,
    "fourth powers": lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS) * w,
    "x cubed": lambda x, w: x.pow(3) * torch.rsqrt(mean_square(x) + EPS) * w,
    "fourth root": lambda x, w: x * (mean_square(x) + EPS).pow(-0.25) * w,
    "statistics detached": lambda x, w: x * torch.rsqrt(mean_square(x) + EPS).detach() * w,
    "statistics of a detached x": lambda x, w: x * torch.rsqrt(mean_square(x.detach()) + EPS) * w,
    "numerator detached": lambda x, w: x.detach() * torch.rsqrt(mean_square(x) + EPS) * w,
    "weight inside": lambda x, w: normalized(x * w),
    "weight inside the statistics": lambda x, w: x * torch.rsqrt(mean_square(x * w) + EPS),
    "statistics of another": lambda x, w, y: x * torch.rsqrt(mean_square(y) + EPS) * w,
    "half of the statistics": lambda x, w: x * torch.rsqrt(0.5 * mean_square(x) + EPS) * w,
    "rows swapped": lambda x, w: x * torch.rsqrt(mean_square(x) + EPS).flip(0) * w,
    "rstd of other rows": lambda s: s * torch.rsqrt(s.pow(2).mean(-1) + EPS),
    "partial": lambda x, w: x * torch.rsqrt(mean_square(x[..., :8]) + EPS) * w,
    "learned eps per element": lambda x, w: x * torch.rsqrt(mean_square(x) + w * w) * w,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check, name):
    fn = LOOK_ALIKES[name]
    check(fn, arguments_of(fn, s=(WIDTH, WIDTH)), fires=0)


TERMS = {
    "doubled": lambda dx, dw: (2 * dx, dw),
    "weight gradient doubled": lambda dx, dw: (dx, 2 * dw),
    "negative": lambda dx, dw: (-dx, -dw),
}


@pytest.mark.parametrize("name", TERMS)
def test_backwards_that_are_scaled(check, name):
    """What is computed from the gradients is not part of them."""

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return normalized(x) * w

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            r = torch.rsqrt(mean_square(x) + EPS)
            g = dy * w
            dx = g * r - x * r.pow(3) * (g * x).mean(-1, keepdim=True)
            return TERMS[name](dx, (dy * (x * r)).sum((0, 1)))

    def fn(x, w):
        return Odd.apply(x, w)

    check(fn, arguments_of(fn), fires=1)


ODD_BACKWARDS = {
    "rstd squared": lambda g, x, r: g * r - x * r.pow(2) * (g * x).mean(-1, keepdim=True),
    "sum for mean": lambda g, x, r: g * r - x * r.pow(3) * (g * x).sum(-1, keepdim=True),
    "plus": lambda g, x, r: g * r + x * r.pow(3) * (g * x).mean(-1, keepdim=True),
    "other rows": lambda g, x, r: g * r - x.flip(1) * r.pow(3) * (g * x).mean(-1, keepdim=True),
    "other gradient": lambda g, x, r: g.flip(1) * r - x * r.pow(3) * (g * x).mean(-1, keepdim=True),
    "x in place of g": lambda g, x, r: x * r - x * r.pow(3) * (g * x).mean(-1, keepdim=True),
    "factor": lambda g, x, r: g * r - 1.001 * x * r.pow(3) * (g * x).mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", ODD_BACKWARDS)
def test_backwards_that_are_not_the_norms(check, name):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return normalized(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return ODD_BACKWARDS[name](g, x, torch.rsqrt(mean_square(x) + EPS))

    def fn(x):
        return Odd.apply(x)

    assert check(fn, arguments_of(fn), fires=0).missed


def test_gradient_of_an_expanded_norm(check):
    """The column sum that counts each row three times is not the weight gradient."""

    def fn(x, w, y, w2):
        many = y * w2
        return (normalized(x) * w).expand(4, *x.shape) + many

    shapes = {"x": ("b", "s", WIDTH), "y": (4, "b", "s", WIDTH)}
    check(fn, arguments_of(fn, **shapes), dynamic=True, fires=1)


class AsOnAGPU(torch.autograd.Function):
    """F.rms_norm with the composite op that it leaves in a GPU's joint graph."""

    @staticmethod
    def forward(ctx, x, w):
        rstd = torch.rsqrt(mean_square(wide(x)) + EPS)
        ctx.save_for_backward(x, w, rstd)
        return F.rms_norm(x, (WIDTH,), w, EPS)

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad)
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [WIDTH], rstd, w, mask)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "expanded"])
@pytest.mark.parametrize("frozen", [(), ("w",)], ids=str)
@pytest.mark.parametrize("name", ["post-norm", "residual", "flattened"])
@DTYPES
def test_composite(dtype, name, frozen, fused):
    """There is no such op on a CPU, so the rewrite is not verified there, only the result."""

    def layer(norm):
        return {
            "post-norm": lambda x, w, m: x + norm(x @ m, w),
            "residual": lambda x, w, m: x + norm(x, w) @ m,
            "flattened": lambda x, w, m: norm(x.flatten(0, 1), w).view_as(x) @ m,
        }[name]

    shapes = arguments_of(layer(None))
    gm, wanted = joint_graph(layer(AsOnAGPU.apply), shapes, dtype, dynamic=True, frozen=frozen)
    report = fuse(gm.graph, Config(rms_norm_backward=fused))
    assert report.counts() == ({PATTERN: 1} if fused else {})
    if fused and name == "residual":
        assert report.fired[0].replaced[0].startswith("add")
    values = draw(shapes, dtype)
    assert_right(gm, layer(lambda x, w: F.rms_norm(x, (WIDTH,), w, EPS)), wanted, values)


def test_rows_of_one_element(check):
    check(IN_A_LAYER["x + residual"], {"x": ("t", 1), "w": (1,), "m": (1, 1)}, fires=0)


def test_too_wide(check):
    width = 16385
    report = check(hf_norm, {"x": (2, width), "w": (width,)}, fires=0)
    assert "wider than the kernel takes" in report.missed[0].reason
