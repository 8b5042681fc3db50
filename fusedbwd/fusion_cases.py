"""What is measured of each fusion: a small function whose backward is that fusion and no more.

What a training step saves is tagged: a norm's statistics, the attention's probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedbwd.errors import FusedBwdError
from fusedbwd.numerics import statistics_dtype
from fusedbwd.tagging import tag

TOKENS = (128, 1024, 8192)
HEADS, KV_HEADS = 32, 8
_MAX_SEQ = 256

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One comparison; ``dtype`` is that of every argument."""

    fusion: str
    width: int
    dtype: torch.dtype
    tokens: int


@dataclass(frozen=True)
class Subject:
    """What is measured of one fusion.

    Attributes:
        build: from a width and a token count, a function of tensors and its arguments' shapes.
        sizes: (width, dtypes), the reference problems' first.
        small: a tiny width and its dtype, which run on a CPU in no time.
        frozen: arguments of which no gradient is wanted.
    """

    build: Callable[[int, int], tuple[Callable[..., Tensor], Shapes]]
    sizes: tuple[tuple[int, tuple[torch.dtype, ...]], ...]
    small: tuple[int, torch.dtype] = (16, torch.float32)
    frozen: tuple[str, ...] = ()


def _swiglu(width: int, tokens: int) -> tuple[Callable, Shapes]:
    def fn(linear: Tensor, act: Tensor) -> Tensor:
        return linear * F.silu(act)

    return fn, dict.fromkeys(("linear", "act"), (tokens, width))


def _geglu(width: int, tokens: int) -> tuple[Callable, Shapes]:
    def fn(linear: Tensor, act: Tensor) -> Tensor:
        return linear * F.gelu(act, approximate="tanh")

    return fn, dict.fromkeys(("linear", "act"), (tokens, width))


def _gelu(width: int, tokens: int) -> tuple[Callable, Shapes]:
    def fn(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(tag(x + bias, "pre_activation"), approximate="tanh")

    return fn, {"x": (tokens, width), "bias": (width,)}


def _rms_norm(width: int, tokens: int) -> tuple[Callable, Shapes]:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(statistics_dtype(x.dtype))
        variance = tag(wide.pow(2).mean(-1, keepdim=True), "variance")
        normalized = wide * torch.rsqrt(variance + 1e-6)
        return _beside(x, (normalized * weight).to(x.dtype))

    return fn, {"x": _rows(width, tokens), "weight": (width,)}


def _layer_norm(width: int, tokens: int) -> tuple[Callable, Shapes]:
    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, (width,), weight, bias, 1e-5)
        tag(mean, "mean")
        tag(rstd, "rstd")
        return _beside(x, out)

    return fn, {"x": _rows(width, tokens), "weight": (width,), "bias": (width,)}


@dataclass(frozen=True)
class _Heads:
    """Grouped heads with RoPE by halves; sequences of at most ``_MAX_SEQ`` tokens."""

    width: int
    tokens: int

    @property
    def seq(self) -> int:
        return min(self.tokens, _MAX_SEQ)

    @property
    def batch(self) -> int:
        return self.tokens // self.seq

    def split(self, x: Tensor) -> Tensor:
        return x.view(self.batch, self.seq, -1, self.width).transpose(1, 2)

    def merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(self.tokens, -1)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    def repeated(self, x: Tensor) -> Tensor:
        sizes = (self.batch, KV_HEADS, HEADS // KV_HEADS, self.seq, self.width)
        return x.unsqueeze(2).expand(sizes).reshape(self.batch, HEADS, self.seq, self.width)

    def shapes(self) -> Shapes:
        kv = (self.tokens, KV_HEADS * self.width)
        table = (self.batch, self.seq, self.width)
        q = (self.tokens, HEADS * self.width)
        return {"q": q, "k": kv, "v": kv, "cos": table, "sin": table}


def _attention(width: int, tokens: int) -> tuple[Callable, Shapes]:
    """Causal, by hand, on saved probabilities."""
    h = _Heads(width, tokens)

    def fn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = tag(h.rotated(h.split(q), cos, sin), "query")
        key = tag(h.rotated(h.split(k), cos, sin), "key")
        scores = query @ h.repeated(key).transpose(-2, -1) * width**-0.5
        mask = torch.full((h.seq, h.seq), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        probabilities = tag(F.softmax(scores + mask, dim=-1), "probabilities")
        return h.merged(probabilities @ h.repeated(h.split(v)))

    return fn, h.shapes()


def _sdpa(width: int, tokens: int) -> tuple[Callable, Shapes]:
    """Causal SDPA. Its forward and backward are in the figures: what it saves has no name."""
    h = _Heads(width, tokens)

    def fn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = tag(h.rotated(h.split(q), cos, sin), "query")
        key = tag(h.rotated(h.split(k), cos, sin), "key")
        value = h.repeated(h.split(v))
        return h.merged(
            F.scaled_dot_product_attention(query, h.repeated(key), value, is_causal=True)
        )

    return fn, h.shapes()


def _rows(width: int, tokens: int) -> tuple[int, ...]:
    """A norm over something as narrow as a head is one over each of a token's heads."""
    return (tokens, HEADS, width) if width <= 256 else (tokens, width)


def _beside(x: Tensor, normalized: Tensor) -> Tensor:
    """Norm and residual stream as one tensor, so that each has a gradient of its own."""
    return torch.stack((x, normalized))


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

SUBJECTS: dict[str, Subject] = {
    "attention_backward": Subject(
        _attention,
        ((160, (_BF16,)), (64, (_BF16,)), (128, (_BF16, _FP16))),
        small=(8, _BF16),
        frozen=("cos", "sin"),
    ),
    "rope_backward": Subject(
        _sdpa,
        ((160, (_BF16,)), (64, (_BF16,)), (128, (_BF16,))),
        small=(8, _FP32),
        frozen=("cos", "sin"),
    ),
    "swiglu_backward": Subject(
        _swiglu,
        (
            (14336, (_BF16,)),
            (2048, (_BF16, _FP32)),
            (4096, (_BF16, _FP16)),
            (8192, (_BF16,)),
            (28672, (_BF16,)),
        ),
    ),
    "geglu_backward": Subject(
        _geglu,
        (
            (14336, (_BF16,)),
            (2048, (_BF16, _FP32)),
            (9216, (_BF16, _FP16)),
        ),
    ),
    "gelu_backward": Subject(
        _gelu,
        (
            (2048, (_FP32, _BF16)),
            (4096, (_BF16, _FP16)),
            (8192, (_BF16, _FP32)),
        ),
    ),
    "rms_norm_backward": Subject(
        _rms_norm,
        (
            (5120, (_BF16,)),
            (128, (_BF16,)),
            (2048, (_BF16, _FP32)),
            (4096, (_BF16, _FP16, _FP32)),
            (8192, (_BF16,)),
        ),
    ),
    "layer_norm_backward": Subject(
        _layer_norm,
        (
            (512, (_FP32, _BF16)),
            (128, (_BF16,)),
            (2048, (_BF16, _FP32)),
            (4096, (_BF16, _FP16)),
            (8192, (_BF16,)),
        ),
    ),
}
"""What is measured of each fusion. A new fusion needs an entry here."""


def cases(fusions: Sequence[str], *, quick: bool = False, small: bool = False) -> list[Case]:
    """What to measure, the reference problems' sizes of every fusion first.

    Args:
        fusions: names; all when empty.
        quick: the reference problems' sizes alone.
        small: one tiny size of each.

    Raises:
        FusedBwdError: there is no such fusion.
    """
    if unknown := set(fusions) - SUBJECTS.keys():
        raise FusedBwdError(f"no fusion is called {sorted(unknown)}; there are: {list(SUBJECTS)}")
    problems, others = [], []
    for name in fusions or SUBJECTS:
        subject = SUBJECTS[name]
        if small:
            problems.append(Case(name, *subject.small, tokens=8))
            continue
        first, *rest = [(w, d) for w, dtypes in subject.sizes for d in dtypes]
        problems += [Case(name, *first, tokens) for tokens in TOKENS]
        others += [Case(name, *size, tokens) for size in rest for tokens in TOKENS]
    return problems if quick or small else problems + others
