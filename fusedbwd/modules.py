"""The forward modules of the two reference problems, with their intermediates named.

Both are ordinary modules: fixed parameters, plain PyTorch operations. ``fusedbwd.tag`` gives
the intermediates the names under which a backward may be handed them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedbwd.errors import UnsupportedError
from fusedbwd.numerics import statistics_dtype
from fusedbwd.tagging import tag


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer: causal grouped-query attention with RoPE, then SwiGLU.

    RMSNorm, softmax and SiLU run in fp32 (fp64 for fp64 parameters) and are cast back. SiLU is
    applied to ``up`` and ``gate`` is the plain factor: Llama's names the other way round.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size: the dimensions.
            ``num_kv_heads`` divides ``num_heads``; ``head_dim`` is even.
        eps: added to the variance in both norms.

    Raises:
        UnsupportedError: the head counts or ``head_dim`` do not fit together.
    """

    def __init__(
        self,
        hidden_size: int = 5120,
        num_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 160,
        intermediate_size: int = 14336,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise UnsupportedError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim % 2:
            raise UnsupportedError(f"head_dim must be even for RoPE by halves, got {head_dim}")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.eps = eps

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.input_ln_weight = parameter(hidden_size)
        self.q_weight = parameter(num_heads * head_dim, hidden_size)
        self.k_weight = parameter(num_kv_heads * head_dim, hidden_size)
        self.v_weight = parameter(num_kv_heads * head_dim, hidden_size)
        self.o_weight = parameter(hidden_size, num_heads * head_dim)
        self.post_attn_ln_weight = parameter(hidden_size)
        self.gate_weight = parameter(intermediate_size, hidden_size)
        self.up_weight = parameter(intermediate_size, hidden_size)
        self.down_weight = parameter(hidden_size, intermediate_size)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Linear weights N(0, 2/fan_in), norm weights N(1, 0.02²)."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                _init_normal(parameter, 0.0, math.sqrt(2 / parameter.shape[1]), generator)
            else:
                _init_normal(parameter, 1.0, 0.02, generator)

    def forward(self, residual: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``residual`` [B, S, hidden], ``cos`` and ``sin`` [B, S, head_dim] -> [B, S, hidden]."""
        attn_input = tag(self._rms_norm(residual, self.input_ln_weight, "1"), "attn_input")
        attn_output = self._attention(attn_input, cos, sin)
        residual2 = tag(residual + F.linear(attn_output, self.o_weight), "residual2")
        ffn_input = tag(self._rms_norm(residual2, self.post_attn_ln_weight, "2"), "ffn_input")
        return residual2 + F.linear(self._swiglu(ffn_input), self.down_weight)

    def _rms_norm(self, x: Tensor, weight: Tensor, index: str) -> Tensor:
        wide = _widen(x)
        variance = tag(wide.pow(2).mean(-1, keepdim=True), f"variance{index}")
        normalized = wide * torch.rsqrt(variance + self.eps)
        normalized = tag(normalized, f"hidden_states_normalized{index}")
        return (normalized * _widen(weight)).to(x.dtype)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention over ``x`` [B, S, hidden] -> heads merged, [B, S, N·D]."""
        query = tag(self._heads(F.linear(x, self.q_weight), self.num_heads), "query_states")
        key = tag(self._heads(F.linear(x, self.k_weight), self.num_kv_heads), "key_states")
        value = tag(self._heads(F.linear(x, self.v_weight), self.num_kv_heads), "value_states")
        query = tag(_rope(query, cos, sin), "query_states_rotated")
        key = tag(_rope(key, cos, sin), "key_states_rotated")
        key = tag(self._repeat_heads(key), "key_states_repeated")
        value = tag(self._repeat_heads(value), "value_states_repeated")

        scores = _widen(query @ key.transpose(-2, -1)) / math.sqrt(self.head_dim)
        # Added, not filled in: the derivative of a sum does not know the mask, so the backward
        # works on the probabilities it is given, whatever made them.
        probabilities = F.softmax(scores + _causal_mask(scores), dim=-1)
        attn_weights = tag(probabilities.to(x.dtype), "attn_weights")
        return tag((attn_weights @ value).transpose(1, 2).flatten(2), "attn_output")

    def _swiglu(self, x: Tensor) -> Tensor:
        gate = tag(F.linear(x, self.gate_weight), "gate")
        up = tag(F.linear(x, self.up_weight), "up")
        silu_up = tag(F.silu(_widen(up)).to(up.dtype), "silu_up")
        return tag(gate * silu_up, "swiglu_output")

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        """[B, S, N·D] -> [B, N, S, D], a view."""
        return projected.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """[B, num_kv_heads, S, D] -> [B, num_heads, S, D], each head repeated in place."""
        batch, kv_heads, seq, head_dim = x.shape
        group = self.num_heads // self.num_kv_heads
        repeated = x.unsqueeze(2).expand(batch, kv_heads, group, seq, head_dim)
        return repeated.reshape(batch, self.num_heads, seq, head_dim)


class GeluFFN(nn.Module):
    """A post-norm feed-forward block: ``LayerNorm(x + fc2(gelu_tanh(fc1(x))))``.

    Args:
        hidden_size, intermediate_size: the dimensions.
        eps: added to the variance in the norm.
    """

    def __init__(
        self,
        hidden_size: int = 512,
        intermediate_size: int = 2048,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.eps = eps

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.fc1_weight = parameter(intermediate_size, hidden_size)
        self.fc1_bias = parameter(intermediate_size)
        self.fc2_weight = parameter(hidden_size, intermediate_size)
        self.fc2_bias = parameter(hidden_size)
        self.ln_weight = parameter(hidden_size)
        self.ln_bias = parameter(hidden_size)
        self.reset_parameters()

    def reset_parameters(
        self, generator: torch.Generator | None = None, *, random_norm: bool = False
    ) -> None:
        """Linear weights N(0, 2/fan_in), biases zero, ``ln_weight`` ones.

        ``random_norm`` draws ``ln_weight`` from N(1, 0.2²) instead: ones hide a missing or a
        doubled factor.
        """
        for weight in (self.fc1_weight, self.fc2_weight):
            _init_normal(weight, 0.0, math.sqrt(2 / weight.shape[1]), generator)
        for bias in (self.fc1_bias, self.fc2_bias, self.ln_bias):
            nn.init.zeros_(bias)
        if random_norm:
            _init_normal(self.ln_weight, 1.0, 0.2, generator)
        else:
            nn.init.ones_(self.ln_weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``hidden_states`` [B, S, hidden] -> [B, S, hidden]."""
        fc1_output = tag(F.linear(hidden_states, self.fc1_weight, self.fc1_bias), "fc1_output")
        gelu_output = tag(F.gelu(fc1_output, approximate="tanh"), "gelu_output")
        fc2_output = F.linear(gelu_output, self.fc2_weight, self.fc2_bias)
        residual_output = tag(hidden_states + fc2_output, "residual_output")

        wide = _widen(residual_output)
        mean = wide.mean(-1, keepdim=True)
        var = tag(torch.var(wide, -1, unbiased=False, keepdim=True), "var")
        normalized = tag((wide - mean) / torch.sqrt(var + self.eps), "normalized")
        output = normalized * _widen(self.ln_weight) + _widen(self.ln_bias)
        return output.to(hidden_states.dtype)


def rope_tables(
    batch: int,
    seq: int,
    head_dim: int,
    *,
    base: float = 1e6,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for rotary embeddings by halves, each [batch, seq, head_dim].

    Position p turns the pair (i, i + head_dim/2) by ``p · base^(-2i/head_dim)`` (Su et al.,
    RoFormer, 2021); the half-dim table is written twice along ``head_dim``. Angles are taken
    in at least fp32, then cast to ``dtype``.
    """
    wide = statistics_dtype(dtype)
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=wide) / head_dim
    angles = torch.outer(torch.arange(seq, device=device, dtype=wide), base**-exponents)
    angles = torch.cat((angles, angles), dim=-1).expand(batch, seq, head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of ``x`` [B, N, S, D] by the tables [B, S, D]."""
    first, second = x.chunk(2, dim=-1)
    rotated_half = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(1) + rotated_half * sin.unsqueeze(1)


def _causal_mask(scores: Tensor) -> Tensor:
    """[S, S]: 0 on and below the diagonal, -inf above."""
    seq = scores.shape[-1]
    return torch.full((seq, seq), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)


def _widen(x: Tensor) -> Tensor:
    return x.to(statistics_dtype(x.dtype))


def _init_normal(
    parameter: Tensor, mean: float, std: float, generator: torch.Generator | None
) -> None:
    # Drawn wide and then cast: the CPU's own 16-bit sampler is coarse.
    with torch.no_grad():
        draw = torch.randn(
            parameter.shape,
            generator=generator,
            device=parameter.device,
            dtype=statistics_dtype(parameter.dtype),
        )
        parameter.copy_(draw.mul_(std).add_(mean))
