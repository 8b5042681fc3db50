"""Attention on given probabilities: grouped heads, masks, scales, RoPE."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import joint_graph, wide

from fusedbwd import Config
from fusedbwd.fuse import fuse

PATTERN = "attention_backward"

HEADS, KV_HEADS, DIM = 4, 2, 8
Q = ("b", HEADS, "s", DIM)
KV = ("b", KV_HEADS, "s", DIM)
TABLE = ("b", "s", DIM)
SHAPES = {"q": Q, "k": KV, "v": KV}
FULL = dict.fromkeys("qkv", Q)


def repeat(x, group=HEADS // KV_HEADS):
    b, n, s, d = x.shape
    return x[:, :, None].expand(b, n, group, s, d).reshape(b, n * group, s, d)


def causal(scores):
    size = scores.shape[-1]
    return torch.full((size, size), -math.inf, dtype=scores.dtype).triu(1)


def attention(q, k, v, *, scale=DIM**-0.5, mask=causal, softmax=None):
    scores = q @ k.transpose(-2, -1) * scale
    scores = scores if mask is None else scores + mask(scores)
    probs = softmax(scores) if softmax else F.softmax(scores, -1)
    return probs.to(q.dtype) @ v


def grouped(**kwargs):
    return lambda q, k, v: attention(q, repeat(k), repeat(v), **kwargs)


def plain(**kwargs):
    return lambda q, k, v: attention(q, k, v, **kwargs)


def wide_softmax(scores):
    return F.softmax(wide(scores), -1)


def huggingface(q, k, v, p=0.0):
    k, v = repeat(k), repeat(v)
    weights = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5
    mask = torch.full((q.shape[2],) * 2, torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    weights = F.softmax(weights + mask, dim=-1, dtype=wide(q).dtype).to(q.dtype)
    weights = F.dropout(weights, p=p, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


SPELLINGS = {
    "grouped": (grouped(), SHAPES),
    "no groups": (plain(), FULL),
    "no mask": (grouped(mask=None), SHAPES),
    "Hugging Face": (huggingface, SHAPES),
    "softmax in float32": (grouped(softmax=wide_softmax), SHAPES),
    "divided scale": (lambda q, k, v: grouped(scale=1.0 / math.sqrt(DIM))(q, k, v), SHAPES),
    "no scale": (grouped(scale=1.0), SHAPES),
    "scaled query": (lambda q, k, v: grouped(scale=1.0)(q * 0.25, k, v), SHAPES),
    "multi-query": (
        lambda q, k, v: attention(q, repeat(k, HEADS), repeat(v, HEADS)),
        {"q": Q, "k": ("b", 1, "s", DIM), "v": ("b", 1, "s", DIM)},
    ),
    "heads split from tokens": (
        lambda q, k, v: grouped()(*(x.transpose(1, 2) for x in (q, k, v))),
        {"q": ("b", "s", HEADS, DIM)} | dict.fromkeys("kv", ("b", "s", KV_HEADS, DIM)),
    ),
    "split from one tensor": (
        lambda x: attention(*(z.unflatten(-1, (-1, DIM)).transpose(1, 2) for z in x.chunk(3, -1))),
        {"x": ("b", "s", 3 * HEADS * DIM)},
    ),
}


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["bfloat16, static", "float16, dynamic"],
)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check, name, dtype, dynamic):
    fn, shapes = SPELLINGS[name]
    check(fn, shapes, dtype, dynamic=dynamic, fires=1)


def rotate_chunk(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_slices(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@pytest.mark.parametrize(
    ("rotate", "softmax", "dynamic"),
    [
        (rotate_chunk, None, False),
        (rotate_slices, None, True),
        (rotate_slices, wide_softmax, False),
        (rotate_chunk, wide_softmax, True),
    ],
)
def test_rope_into_one_buffer(check, rotate, softmax, dynamic):
    """With RoPE and projections on both sides the gradients of all three are packed."""

    def fn(x, cos, sin, mq, mk, mv):
        def heads(m):
            return (x @ m).unflatten(-1, (-1, DIM)).transpose(1, 2)

        def rope(z):
            return z * cos.unsqueeze(1) + rotate(z) * sin.unsqueeze(1)

        out = grouped(softmax=softmax)(rope(heads(mq)), rope(heads(mk)), heads(mv))
        return out.transpose(1, 2).flatten(2)

    shapes = {
        "x": ("b", "s", 24),
        "cos": TABLE,
        "sin": TABLE,
        "mq": (24, HEADS * DIM),
        "mk": (24, KV_HEADS * DIM),
        "mv": (24, KV_HEADS * DIM),
    }
    report = check(fn, shapes, torch.bfloat16, dynamic=dynamic, frozen=("cos", "sin"), fires=1)
    assert all("view" in name for name in report.fired[0].replaced)


@pytest.mark.parametrize(
    "what", ["swapped tables", "negative rotation", "interleaved", "a table per head"]
)
def test_what_is_not_rope_stays(check, what):
    """The attention still fuses; what follows is left to the compiler, and is right."""

    def rope(z, cos, sin):
        if what == "swapped tables":
            return z * sin.unsqueeze(1) + rotate_chunk(z) * cos.unsqueeze(1)
        if what == "negative rotation":
            return z * cos.unsqueeze(1) - rotate_chunk(z) * sin.unsqueeze(1)
        if what == "a table per head":  # as many heads as batches would make it look like one
            return z * cos + rotate_chunk(z) * sin
        pairs = torch.stack((-z[..., 1::2], z[..., ::2]), -1).flatten(-2)
        return z * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)

    def fn(q, k, v, cos, sin):
        return plain()(rope(q, cos, sin), rope(k, cos, sin), v)

    heads = ("b", 4 * HEADS, "s", DIM)
    shapes = {"q": heads, "k": heads, "v": heads, "cos": TABLE, "sin": TABLE}
    if what == "a table per head":
        shapes |= dict.fromkeys(("cos", "sin"), (4 * HEADS, "s", DIM))
    check(fn, shapes, torch.bfloat16, frozen=("cos", "sin"), fires=1)


def filled(scores):
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)


MISSES = {
    "float32": (grouped(), SHAPES, torch.float32, "float32"),
    "masked_fill": (
        lambda q, k, v: grouped(mask=None, softmax=lambda s: F.softmax(filled(s), -1))(q, k, v),
        SHAPES,
        torch.bfloat16,
        "does not give both",
    ),
    "a bias that is trained": (
        lambda q, k, v, m: grouped(mask=lambda scores: m)(q, k, v),
        SHAPES | {"m": ("b", HEADS, "s", "s")},
        torch.bfloat16,
        "does not give both",
    ),
    "over queries": (
        lambda q, k, v: grouped(mask=None, softmax=lambda s: F.softmax(s, 2))(q, k, v),
        SHAPES,
        torch.bfloat16,
        "not the last",
    ),
    "dropout-like": (
        lambda q, k, v: grouped(softmax=lambda s: F.softmax(s, -1) * 0.5)(q, k, v),
        SHAPES,
        torch.bfloat16,
        "is not a batched matmul",
    ),
    "other keys": (
        plain(mask=None),
        {"q": ("b", 2, "s", DIM), "k": ("b", 2, "t", DIM), "v": ("b", 2, "t", DIM)},
        torch.bfloat16,
        "self-attention",
    ),
    "wider values": (
        plain(),
        {"q": ("b", 2, "s", DIM), "k": ("b", 2, "s", DIM), "v": ("b", 2, "s", 2 * DIM)},
        torch.bfloat16,
        "self-attention",
    ),
    "odd head_dim": (plain(), dict.fromkeys("qkv", ("b", 2, "s", 7)), torch.bfloat16, "head_dim 7"),
}


@pytest.mark.parametrize("name", MISSES)
def test_misses(check, name):
    fn, shapes, dtype, reason = MISSES[name]
    report = check(fn, shapes, dtype, fires=0)
    assert [reason in miss.reason for miss in report.missed] == [True], report


def test_frozen_values(check):
    """Without dv there is no group of three gradients to write."""
    report = check(grouped(), SHAPES, torch.bfloat16, frozen=("v",), fires=0)
    assert "no value gradient" in report.missed[0].reason


def test_probabilities_used_elsewhere(check):
    def fn(q, k, v):
        probs = F.softmax(q @ repeat(k).transpose(-2, -1), -1)
        return torch.cat([probs @ repeat(v), probs @ repeat(v) * 2], -1)

    check(fn, SHAPES, torch.bfloat16, fires=0)


def test_the_softmax_wanted_elsewhere(check):
    """A loss on the float32 softmax adds to its gradient."""

    def fn(q, k, v):
        probs = wide_softmax(q @ repeat(k).transpose(-2, -1))
        out = probs.to(q.dtype) @ repeat(v)
        return out + probs.square().sum(-1, keepdim=True).to(q.dtype)

    check(fn, SHAPES, torch.bfloat16, fires=0)


def test_dropout():
    gm, _ = joint_graph(lambda q, k, v: huggingface(q, k, v, 0.5), SHAPES, torch.bfloat16)
    report = fuse(gm.graph, Config())
    assert not report.fired
    assert "is not a batched matmul" in report.missed[0].reason
