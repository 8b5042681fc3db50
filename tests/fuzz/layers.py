"""A grammar of transformer layers: every way of writing each part, in any combination."""

from __future__ import annotations

import math
from dataclasses import dataclass

import spellings
import torch
import torch.nn.functional as F
from harness import wide
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH, INNER, HEADS, DIM = 24, 40, 4, 6
EPS = 1e-5

NORMS = {
    "none": lambda x, w, b: x,
    "F.rms_norm": lambda x, w, b: F.rms_norm(x, x.shape[-1:], w, EPS),
    "F.rms_norm, no weight": lambda x, w, b: F.rms_norm(x, x.shape[-1:], None, EPS),
    "Llama's": lambda x, w, b: spellings.llama_norm(x, w),
    "torchtitan's": lambda x, w, b: spellings.torchtitan_norm(x, w),
    "Gemma's": lambda x, w, b: spellings.gemma_norm(x, w),
    "over a root": lambda x, w, b: spellings.over_root(x, w),
    "no weight": lambda x, w, b: spellings.normalized(wide(x)).to(x.dtype),
    "F.layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
    "F.layer_norm, no bias": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, None, EPS),
    "F.layer_norm, no weight": lambda x, w, b: F.layer_norm(x, x.shape[-1:], None, None, EPS),
    "LayerNorm by hand": lambda x, w, b: spellings.by_hand(wide(x), wide(w), wide(b)).to(x.dtype),
    "LayerNorm, 1 + w": lambda x, w, b: F.layer_norm(x, x.shape[-1:], 1 + w, b, EPS),
}

PLACEMENTS = {
    "bare": lambda x, norms, f: f(norms[0](x)),
    "pre": lambda x, norms, f: x + f(norms[0](x)),
    "pre, residual last": lambda x, norms, f: f(norms[0](x)) + x,
    "post": lambda x, norms, f: norms[0](x + f(x)),
    "sandwich": lambda x, norms, f: x + norms[1](f(norms[0](x))),
    "residual of the norm": lambda x, norms, f: norms[0](x) + f(norms[0](x)),
    "one norm twice": lambda x, norms, f: x + norms[0](f(norms[0](x))),
}

ACTIVATIONS = {
    "silu": F.silu,
    "silu in float32": lambda x: F.silu(wide(x)).to(x.dtype),
    "swish": spellings.swish,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "NewGELU": spellings.new_gelu,
    "FastGELU": spellings.fast_gelu,
    "erf": spellings.erf_gelu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}

MASKS = {
    "none": lambda s: s,
    "-inf added": lambda s: s + torch.full_like(s[0, 0], -math.inf).triu(1),
    "least number added": lambda s: s + torch.full_like(s[0, 0], torch.finfo(s.dtype).min).triu(1),
    "filled": lambda s: s.masked_fill(torch.ones_like(s[0, 0]).triu(1) > 0, -math.inf),
}

ATTENTIONS = ("sdpa", "sdpa, causal", "softmax", "softmax in float32", "softmax on probabilities")


@dataclass(frozen=True)
class Part:
    """A feed-forward part, or an attention if ``attention`` is not empty."""

    norm: str
    placement: str
    biases: tuple[bool, bool, bool, bool]
    activation: str = ""
    gated: bool = False
    packed: bool = False
    swapped: bool = False
    tied: bool = False
    attention: str = ""
    mask: str = "none"
    kv_heads: int = 1
    rope: str = ""
    head_norms: bool = False
    contiguous: bool = False


class Norm(nn.Module):
    def __init__(self, spelling: str, width: int = WIDTH):
        super().__init__()
        self.apply_norm = NORMS[spelling]
        has_weight = spelling != "none" and "no weight" not in spelling
        has_bias = (has_weight and "Layer" in spelling) or spelling == "F.layer_norm"
        self.weight = nn.Parameter(torch.empty(width)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_norm(x, self.weight, self.bias)


class FeedForward(nn.Module):
    def __init__(self, part: Part):
        super().__init__()
        self.part, self.activation = part, ACTIVATIONS[part.activation]
        inner = 2 * INNER if part.gated and part.packed else INNER
        self.first = nn.Linear(WIDTH, inner, part.biases[0])
        if part.gated and not part.packed:
            self.second = self.first if part.tied else nn.Linear(WIDTH, INNER, part.biases[1])
        self.last = nn.Linear(INNER, WIDTH, part.biases[3])

    def forward(self, x: Tensor) -> Tensor:
        part = self.part
        if not part.gated:
            return self.last(self.activation(self.first(x)))
        if part.packed:
            gate, up = self.first(x).chunk(2, -1)
        else:
            gate, up = self.first(x), self.second(x)
        gate, up = (up, gate) if part.swapped else (gate, up)
        activated = self.activation(gate)
        return self.last(up * activated if part.swapped else activated * up)


class Attention(nn.Module):
    def __init__(self, part: Part):
        super().__init__()
        self.part, kv = part, part.kv_heads * DIM
        # Without RoPE the gradient of k's bias is zero but for rounding: nothing to compare.
        biases = (part.biases[0], part.biases[1] and bool(part.rope), part.biases[2])
        widths = zip((HEADS * DIM, kv, kv), biases, strict=True)
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias) for width, bias in widths)
        self.o = nn.Linear(HEADS * DIM, WIDTH, part.biases[3])
        if part.head_norms:
            self.q_norm, self.k_norm = Norm("Llama's", DIM), Norm("Llama's", DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = self.part
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if part.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if part.rope:
            turn = {"slices": spellings.rotate_half, "chunk": spellings.rotate_by_chunk}[part.rope]
            q, k = (z * cos.unsqueeze(1) + turn(z) * sin.unsqueeze(1) for z in (q, k))
        k, v = (z.repeat_interleave(HEADS // part.kv_heads, 1) for z in (k, v))
        out = self.attend(q, k, v).transpose(1, 2)
        return self.o((out.contiguous() if part.contiguous else out).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = self.part.attention
        if kind.startswith("sdpa"):
            return F.scaled_dot_product_attention(q, k, v, is_causal="causal" in kind)
        scores = MASKS[self.part.mask](q @ k.transpose(-2, -1) * DIM**-0.5)
        if kind == "softmax in float32":
            return F.softmax(wide(scores), -1).to(q.dtype) @ v
        p = F.softmax(scores, -1)
        return (p + p.square() if "on probabilities" in kind else p) @ v


class Layer(nn.Module):
    """The parts, one after the other. Takes RoPE tables if a part is an attention."""

    def __init__(self, parts: tuple[Part, ...]):
        super().__init__()
        self.parts = parts
        self.norms = nn.ModuleList(
            nn.ModuleList(Norm(p.norm) for _ in range(1 + (p.placement == "sandwich")))
            for p in parts
        )
        self.bodies = nn.ModuleList(Attention(p) if p.attention else FeedForward(p) for p in parts)
        self.forward = self.with_tables if self.attends else self.without_tables

    @property
    def attends(self) -> bool:
        return any(part.attention for part in self.parts)

    def with_tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for part, norms, body in zip(self.parts, self.norms, self.bodies, strict=True):
            args = (cos, sin) if part.attention else ()
            x = PLACEMENTS[part.placement](x, norms, lambda y, f=body, a=args: f(y, *a))
        return x

    def without_tables(self, x: Tensor) -> Tensor:
        return self.with_tables(x, x, x)


biases = st.tuples(*[st.booleans()] * 4)
norms, placements = st.sampled_from(list(NORMS)), st.sampled_from(list(PLACEMENTS))

feed_forwards = st.builds(
    Part,
    norm=norms,
    placement=placements,
    biases=biases,
    activation=st.sampled_from(list(ACTIVATIONS)),
    gated=st.booleans(),
    packed=st.booleans(),
    swapped=st.booleans(),
    tied=st.sampled_from([False, False, True]),
)

attentions = st.builds(
    Part,
    norm=norms,
    placement=placements,
    biases=biases,
    attention=st.sampled_from(ATTENTIONS),
    mask=st.sampled_from(list(MASKS)),
    kv_heads=st.sampled_from([1, 2, HEADS]),
    rope=st.sampled_from(["", "slices", "chunk"]),
    head_norms=st.sampled_from([False, False, True]),
    contiguous=st.booleans(),
)

layers = st.lists(st.one_of(feed_forwards, attentions), min_size=1, max_size=2).map(tuple)
