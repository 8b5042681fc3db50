"""A small decoder layer that is written as people write theirs."""

import torch
import torch.nn.functional as F
from torch import nn
from trained import HEAD_DIM, HIDDEN, SdpaLayer

INNER = 80


class RMSNorm(nn.Module):
    def __init__(self, width=HIDDEN):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalized.to(x.dtype)


class Decoder(SdpaLayer):
    """Grouped-query attention with RoPE, its softmax written out, and SwiGLU."""

    def __init__(self, *, bias=False, masked=True, residual=True):
        super().__init__()
        self.masked, self.residual = masked, residual
        kv = 2 * HEAD_DIM
        self.input_norm, self.post_norm = RMSNorm(), RMSNorm()
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN, bias), nn.Linear(HIDDEN, kv, bias)
        self.v, self.o = nn.Linear(HIDDEN, kv, bias), nn.Linear(HIDDEN, HIDDEN, bias)
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias), nn.Linear(HIDDEN, INNER, bias)
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x, cos, sin):
        attended = self.attention(self.input_norm(x), cos, sin)
        x = x + attended if self.residual else attended
        y = self.post_norm(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + y if self.residual else y

    def attention(self, x, cos, sin):
        def heads(z):
            return z.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        def rope(z):
            first, second = z.chunk(2, -1)
            return z * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

        q, k, v = rope(heads(self.q(x))), rope(heads(self.k(x))), heads(self.v(x))
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        if self.masked:
            scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
        return self.o((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


class LoRA(nn.Module):
    """A frozen linear layer beside a trained product of rank 4."""

    def __init__(self, linear: nn.Linear, rank: int = 4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + 2 * self.b(self.a(x))
