"""What people write: a table of spellings, and which of them fuse.

Names of models say whose way of writing it is, in words of our own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from harness import WIDTH, wide
from torch import nn

EPS = 1e-5
BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = {"x": ("b", "s", WIDTH)}
PACKED = {"m": (WIDTH, 2 * WIDTH)}

SWIGLU = {"swiglu_backward": 1}
GELU = {"gelu_backward": 1}
GEGLU = {"geglu_backward": 1}
RMS = {"rms_norm_backward": 1}
LAYER = {"layer_norm_backward": 1}
ATTENTION = {"attention_backward": 1}


@dataclass(frozen=True)
class Spelling:
    """A function or a module, and what fuses in it.

    Attributes:
        program: a function of tensors, or a module.
        fires: how often each fusion does.
        shapes: of the arguments: of all of a module's, of a function's where the harness's
            defaults do not fit.
        dtype, dynamic: of the run.
        frozen: arguments and parameters that want no gradient.
        reason: where nothing fuses, part of what the report says; None if it says nothing,
            because what the fusion is anchored on is not in the graph.
    """

    program: Callable | nn.Module
    fires: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    dynamic: bool = False
    frozen: tuple[str, ...] = ()
    reason: str | None = None


class SwiGLU(nn.Module):
    """Llama's feed-forward layer."""

    def __init__(self, *, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 48, bias)
        self.up_proj = nn.Linear(WIDTH, 48, bias)
        self.down_proj = nn.Linear(48, WIDTH, bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def chunked(x, m):
    gate, up = (x @ m).chunk(2, dim=-1)
    return F.silu(gate) * up


def chunked_up_first(x, m):
    up, gate = (x @ m).chunk(2, dim=-1)
    return up * F.silu(gate)


def sliced(x, m):
    both = x @ m
    return F.silu(both[..., :WIDTH]) * both[..., WIDTH:]


def sliced_up_first(x, m):
    both = x @ m
    return both[..., :WIDTH] * F.silu(both[..., WIDTH:])


def swish(x):
    return x * torch.sigmoid(x)


SWIGLUS = {
    "SwiGLU: silu(a) * b": Spelling(lambda g, u: F.silu(g) * u, SWIGLU),
    "SwiGLU: b * silu(a)": Spelling(lambda g, u: u * F.silu(g), SWIGLU, dynamic=True),
    "SwiGLU: a * sigmoid(a) * b": Spelling(lambda g, u: swish(g) * u, SWIGLU),
    "SwiGLU: b * (sigmoid(a) * a), projected": Spelling(
        lambda g, u, m: (u * (torch.sigmoid(g) * g)) @ m, SWIGLU, dtype=FP32, dynamic=True
    ),
    "SwiGLU: a * sigmoid(a) in float32": Spelling(
        lambda g, u, m: (u * swish(wide(g)).to(g.dtype)) @ m, SWIGLU
    ),
    "SwiGLU: silu in float32": Spelling(
        lambda g, u: F.silu(wide(g)).to(g.dtype) * u, SWIGLU, dynamic=True
    ),
    "SwiGLU: tokens 2-D": Spelling(
        lambda x, m1, m2, m3: (F.silu(x @ m1) * (x @ m2)) @ m3, SWIGLU, {"x": ("t", WIDTH)}
    ),
    "SwiGLU: Llama's module": Spelling(SwiGLU(), SWIGLU, TOKENS),
    "SwiGLU: Llama's module, biases": Spelling(
        SwiGLU(bias=True), SWIGLU, TOKENS, FP32, dynamic=True
    ),
    "SwiGLU: Llama's module, frozen weights": Spelling(
        SwiGLU(),
        SWIGLU,
        TOKENS,
        frozen=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    ),
    "SwiGLU: Llama's module, input without gradient": Spelling(
        SwiGLU(), SWIGLU, TOKENS, frozen=("x",)
    ),
    "SwiGLU: one projection, chunk": Spelling(chunked, SWIGLU, PACKED, dynamic=True),
    "SwiGLU: one projection, chunk, up first": Spelling(chunked_up_first, SWIGLU, PACKED),
    "SwiGLU: one projection, slices": Spelling(sliced, SWIGLU, PACKED, dynamic=True),
    "SwiGLU: one projection, slices, up first": Spelling(sliced_up_first, SWIGLU, PACKED),
    "SwiGLU: residual": Spelling(
        lambda x, m1, m2, m3: x + (F.silu(x @ m1) * (x @ m2)) @ m3, SWIGLU
    ),
    "SwiGLU: linear factor frozen": Spelling(
        lambda g, u: F.silu(g) * u, frozen=("u",), reason="no product of"
    ),
    "SwiGLU: activated factor frozen": Spelling(
        lambda g, u: F.silu(g) * u, frozen=("g",), reason=None
    ),
    "SwiGLU: a * (sigmoid(a) * b)": Spelling(lambda g, u: g * (torch.sigmoid(g) * u), reason=None),
}


def new_gelu(x):
    """As Hugging Face's NewGELU, of GPT-2."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


def fast_gelu(x):
    """As Hugging Face's FastGELU, of GPT-J."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def erf_gelu(x):
    return x / 2 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_ffn(act, *, bias: bool = True):
    return nn.Sequential(nn.Linear(WIDTH, 48, bias), act, nn.Linear(48, WIDTH, bias))


def gelu_of(gelu):
    return lambda x, m1, b1, m2: x + gelu(x @ m1 + b1) @ m2


GELUS = {
    "GELU: F.gelu": Spelling(gelu_of(F.gelu), GELU),
    "GELU: F.gelu, tanh": Spelling(
        gelu_of(lambda x: F.gelu(x, approximate="tanh")), GELU, dynamic=True
    ),
    "GELU: nn.GELU": Spelling(gelu_ffn(nn.GELU()), GELU, {"input": ("t", WIDTH)}),
    "GELU: nn.GELU, tanh": Spelling(
        gelu_ffn(nn.GELU("tanh")), GELU, {"input": ("b", "s", WIDTH)}, FP32, dynamic=True
    ),
    "GELU: NewGELU": Spelling(gelu_of(new_gelu), GELU),
    "GELU: NewGELU, float32": Spelling(gelu_of(new_gelu), GELU, dtype=FP32, dynamic=True),
    "GELU: FastGELU": Spelling(gelu_of(fast_gelu), GELU),
    "GELU: NewGELU in float32, cast": Spelling(
        gelu_of(lambda x: new_gelu(wide(x)).to(x.dtype)), GELU, dynamic=True
    ),
    "GELU: erf": Spelling(gelu_of(erf_gelu), GELU),
    "GELU: erf as a distribution function": Spelling(
        gelu_of(lambda x: x * (0.5 * (1 + torch.erf(x * 2**-0.5)))), GELU, dtype=FP32, dynamic=True
    ),
    "GELU: frozen weights, trained bias": Spelling(
        gelu_ffn(nn.GELU()),
        GELU,
        {"input": ("b", "s", WIDTH)},
        frozen=("0.weight", "2.weight", "2.bias"),
    ),
    "GELU: no biases": Spelling(
        gelu_ffn(nn.GELU(), bias=False),
        shapes={"input": ("b", "s", WIDTH)},
        reason="no bias gradient",
    ),
    "GELU: NewGELU, no bias": Spelling(
        lambda x, m: new_gelu(x @ m), reason="no bias gradient is summed"
    ),
    "GELU: GeGLU": Spelling(
        lambda x, m1, m2, b: F.gelu(x @ m1 + b) * (x @ m2), GEGLU, dynamic=True
    ),
    "GELU: GeGLU, no bias": Spelling(lambda x, m1, m2: F.gelu(x @ m1) * (x @ m2), GEGLU),
}


def normalized(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama_norm(x, w):
    """As Hugging Face's LlamaRMSNorm: rounded before the weight."""
    return w * normalized(wide(x)).to(x.dtype)


def torchtitan_norm(x, w):
    """As Llama's own and torchtitan's first one: x * x, and the weight last."""
    f = wide(x)
    return (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def gemma_norm(x, w):
    return (normalized(wide(x)) * (1.0 + wide(w))).type_as(x)


def over_root(x, w):
    return w * (x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)))


RMS_NORMS = {
    "RMSNorm: nn.RMSNorm": Spelling(nn.RMSNorm(WIDTH, EPS), RMS, TOKENS, FP32),
    "RMSNorm: F.rms_norm": Spelling(
        lambda x, w, m: F.rms_norm(x, (WIDTH,), w, EPS) @ m, RMS, dynamic=True
    ),
    "RMSNorm: Hugging Face's": Spelling(lambda x, w, m: x + llama_norm(x, w) @ m, RMS),
    "RMSNorm: residual last": Spelling(lambda x, w, m: llama_norm(x, w) @ m + x, RMS, dynamic=True),
    "RMSNorm: tokens 2-D": Spelling(
        lambda x, w, m: x + llama_norm(x, w) @ m, RMS, {"x": ("t", WIDTH)}
    ),
    "RMSNorm: torchtitan's": Spelling(lambda x, w, m: x + torchtitan_norm(x, w) @ m, RMS),
    "RMSNorm: Gemma's 1 + w": Spelling(lambda x, w, m: x + gemma_norm(x, w) @ m, RMS, dynamic=True),
    "RMSNorm: Gemma's, the 1 a tensor": Spelling(
        lambda x, w, offset: (normalized(wide(x)) * (offset + wide(w))).type_as(x),
        RMS,
        {"offset": ()},
        frozen=("offset",),
    ),
    "RMSNorm: eps a tensor": Spelling(
        lambda x, w, eps: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps.abs())),
        RMS,
        {"eps": ()},
        dtype=FP32,
        dynamic=True,
        frozen=("eps",),
    ),
    "RMSNorm: 1 / sqrt, square": Spelling(over_root, RMS, dtype=FP32, dynamic=True),
    "RMSNorm: no weight": Spelling(lambda x: normalized(wide(x)).to(x.dtype), RMS),
    "RMSNorm: scaled weight": Spelling(lambda x, w: normalized(x) * (w * 0.5), RMS, dtype=FP32),
    "RMSNorm: frozen weight": Spelling(
        lambda x, w, m: x + llama_norm(x, w) @ m, RMS, frozen=("w",), dynamic=True
    ),
    "RMSNorm: sandwich": Spelling(lambda x, w, m: x + llama_norm(x @ m, w), RMS),
    "RMSNorm: input without gradient": Spelling(
        lambda x, w, m: llama_norm(x, w) @ m, frozen=("x",), reason=None
    ),
}


def by_hand(x, w, b):
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + EPS) * w + b


def layer_norm(x, w, b):
    return F.layer_norm(x, (WIDTH,), w, b, EPS)


LAYER_NORMS = {
    "LayerNorm: nn.LayerNorm": Spelling(nn.LayerNorm(WIDTH), LAYER, {"input": TOKENS["x"]}),
    "LayerNorm: nn.LayerNorm, no bias": Spelling(
        nn.LayerNorm(WIDTH, bias=False), LAYER, {"input": ("t", WIDTH)}, FP32, dynamic=True
    ),
    "LayerNorm: pre-norm": Spelling(
        lambda x, w, b, m: x + layer_norm(x, w, b) @ m, LAYER, dynamic=True
    ),
    "LayerNorm: post-norm behind a bias": Spelling(
        lambda x, w, b, m, b2: layer_norm(x + (x @ m + b2), w, b), LAYER
    ),
    "LayerNorm: by hand": Spelling(by_hand, LAYER, dtype=FP32, dynamic=True),
    "LayerNorm: var(unbiased=False)": Spelling(
        lambda x, w, b: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, False, True) + EPS) * w + b,
        LAYER,
        dtype=FP32,
    ),
    "LayerNorm: 1 + w": Spelling(lambda x, w, b: layer_norm(x, 1 + w, b), LAYER),
    "LayerNorm: 1 + w by hand": Spelling(
        lambda x, w, b: by_hand(x, 1 + w, b), LAYER, dtype=FP32, dynamic=True
    ),
    "LayerNorm: frozen weights": Spelling(
        lambda x, w, b, m: x + layer_norm(x, w, b) @ m, LAYER, frozen=("w", "b")
    ),
    "LayerNorm: input without gradient": Spelling(
        layer_norm, frozen=("x",), reason="computes parameter gradients alone"
    ),
}

HEADS, KV_HEADS, DIM = 4, 2, 8
QKV = {"q": ("b", HEADS, "s", DIM)} | dict.fromkeys("kv", ("b", KV_HEADS, "s", DIM))
LAYER_SHAPES = {"x": ("b", "s", 24), "mq": (24, HEADS * DIM)} | dict.fromkeys(
    ("mk", "mv"), (24, KV_HEADS * DIM)
)
TABLES = dict.fromkeys(("cos", "sin"), ("b", "s", DIM))


def repeat_kv(x):
    b, n, s, d = x.shape
    return x[:, :, None].expand(b, n, HEADS // KV_HEADS, s, d).reshape(b, HEADS, s, d)


def causal(scores):
    size = scores.shape[-1]
    return torch.full((size, size), -math.inf, dtype=scores.dtype).triu(1)


def attention(q, k, v, softmax=lambda scores: F.softmax(scores, -1), scale=DIM**-0.5):
    scores = q @ repeat_kv(k).transpose(2, 3) * scale
    return (softmax(scores + causal(scores)) @ repeat_kv(v)).transpose(1, 2).flatten(2)


def rotate_half(x):
    """As in transformers."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), -1)


def rotate_by_chunk(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def with_rope(rotate):
    def fn(x, mq, mk, mv, cos, sin):
        q, k, v = ((x @ m).unflatten(-1, (-1, DIM)).transpose(1, 2) for m in (mq, mk, mv))
        q, k = (z * cos.unsqueeze(1) + rotate(z) * sin.unsqueeze(1) for z in (q, k))
        return attention(q, k, v)

    return fn


ATTENTIONS = {
    "attention: on q, k, v": Spelling(lambda q, k, v: attention(q, k, v), ATTENTION, QKV),
    "attention: rotate_half": Spelling(
        with_rope(rotate_half),
        ATTENTION,
        LAYER_SHAPES | TABLES,
        frozen=("cos", "sin"),
        dynamic=True,
    ),
    "attention: rotate_half by chunk": Spelling(
        with_rope(rotate_by_chunk), ATTENTION, LAYER_SHAPES | TABLES, frozen=("cos", "sin")
    ),
    "attention: softmax in float32": Spelling(
        lambda q, k, v: attention(q, k, v, lambda s: F.softmax(wide(s), -1).to(q.dtype)),
        ATTENTION,
        shapes=QKV,
    ),
    "attention: scale a tensor": Spelling(
        lambda q, k, v, scale: attention(q, k, v, scale=scale),
        shapes=QKV | {"scale": ()},
        frozen=("scale",),
        reason="does not give both",
    ),
    "attention: masked_fill": Spelling(
        lambda q, k, v: attention(
            q, k, v, lambda s: F.softmax(s.masked_fill(causal(s) < 0, -math.inf), -1)
        ),
        shapes=QKV,
        reason="does not give both",
    ),
}


class Block(nn.Module):
    """RMSNorm, SwiGLU, residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, EPS)
        self.mlp = SwiGLU()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


LAYERS = {
    "layer: RMSNorm, SwiGLU, residual": Spelling(Block(), RMS | SWIGLU, TOKENS, dynamic=True),
    "layer: GPT-2's feed-forward": Spelling(
        lambda x, w, b, m1, b1, m2, b2: x + new_gelu(layer_norm(x, w, b) @ m1 + b1) @ m2 + b2,
        LAYER | GELU,
    ),
}

SPELLINGS = SWIGLUS | GELUS | RMS_NORMS | LAYER_NORMS | ATTENTIONS | LAYERS
