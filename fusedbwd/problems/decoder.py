"""decoder_backward: a pre-norm decoder layer in bf16 with fp32 statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusedbwd.modules import DecoderLayer, rope_tables
from fusedbwd.numerics import statistics_dtype
from fusedbwd.problems.problem import Problem, random_normal, weight_gradient
from fusedbwd.schema import Gradient, Input, Schema, argument, grad_output, parameter, saved, scalar

# A [B, S, N, D] buffer seen as [B, N, S, D]: a projection's output with its heads split off.
_HEADS_INSIDE = (0, 2, 1, 3)


def build(
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **dims: Any,
) -> DecoderLayer:
    """A :class:`DecoderLayer` with weights drawn from ``seed``; ``dims`` are its arguments."""
    module = DecoderLayer(**dims, device=device, dtype=dtype)
    if seed is not None:
        module.reset_parameters(torch.Generator(module.q_weight.device).manual_seed(seed))
    return module


def schema(module: nn.Module) -> Schema:
    """The backward's contract for a :class:`DecoderLayer` of any dimensions and dtype."""
    assert isinstance(module, DecoderLayer)
    m, dtype = module, module.q_weight.dtype
    wide = statistics_dtype(dtype)
    tokens = ("batch_size", "seq_len")
    hidden = (*tokens, m.hidden_size)
    intermediate = (*tokens, m.intermediate_size)
    merged, merged_kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    heads = ("batch_size", m.num_heads, "seq_len", m.head_dim)
    table = (*tokens, m.head_dim)
    scores = ("batch_size", m.num_heads, "seq_len", "seq_len")
    q_shape, kv_shape = (merged, m.hidden_size), (merged_kv, m.hidden_size)
    o_shape = (m.hidden_size, merged)
    up_shape = (m.intermediate_size, m.hidden_size)
    down_shape = (m.hidden_size, m.intermediate_size)

    def split(name: str, heads: int, meaning: str, derived_from: str = "") -> Input:
        shape = ("batch_size", heads, "seq_len", m.head_dim)
        return saved(name, shape, dtype, meaning, order=_HEADS_INSIDE, derived_from=derived_from)

    # In 16-bit dtypes attention is fused, and reads each kv head once; wider ones are left to
    # the library's matmuls, which take the heads repeated.
    once = dtype.itemsize == 2
    k_follows, v_follows = ("", "") if once else ("key_states_repeated", "value_states_repeated")
    k_once, v_once = ("key_states_rotated", "value_states") if once else ("", "")
    inputs = (
        grad_output("grad_output", hidden, dtype, "gradient of the layer's output"),
        argument("residual", hidden, dtype, "the layer's input x"),
        saved("attn_input", hidden, dtype, "RMSNorm1(x), what q, k and v project"),
        split("query_states", m.num_heads, "q before RoPE", "query_states_rotated"),
        split("key_states", m.num_kv_heads, "k before RoPE", "key_states_rotated"),
        split("value_states", m.num_kv_heads, "v, one per kv head", v_follows),
        split("query_states_rotated", m.num_heads, "q after RoPE"),
        split("key_states_rotated", m.num_kv_heads, "k after RoPE", k_follows),
        saved(
            "key_states_repeated",
            heads,
            dtype,
            "rotated k, repeated for its query heads",
            derived_from=k_once,
        ),
        saved(
            "value_states_repeated",
            heads,
            dtype,
            "v, repeated for its query heads",
            derived_from=v_once,
        ),
        argument("cos", table, dtype, "RoPE cosines, the half-dim table written twice"),
        argument("sin", table, dtype, "RoPE sines, likewise"),
        saved("attn_weights", scores, dtype, "softmax probabilities, used as given"),
        saved("attn_output", (*tokens, merged), dtype, "attention output before o_weight"),
        saved("residual2", hidden, dtype, "x plus the projected attention output"),
        saved("ffn_input", hidden, dtype, "RMSNorm2(residual2)"),
        saved("gate", intermediate, dtype, "the factor that SiLU is not applied to"),
        saved("up", intermediate, dtype, "the factor that SiLU is applied to"),
        saved("silu_up", intermediate, dtype, "SiLU(up), in fp32, cast", derived_from="up"),
        saved("swiglu_output", intermediate, dtype, "gate * silu_up, what down_weight projects"),
        parameter("input_ln_weight", (m.hidden_size,), dtype, "weight of RMSNorm1"),
        parameter("q_weight", q_shape, dtype, "query projection"),
        parameter("k_weight", kv_shape, dtype, "key projection"),
        parameter("v_weight", kv_shape, dtype, "value projection"),
        parameter("o_weight", o_shape, dtype, "attention's output projection"),
        parameter("post_attn_ln_weight", (m.hidden_size,), dtype, "weight of RMSNorm2"),
        parameter("gate_weight", up_shape, dtype, "gate projection"),
        parameter("up_weight", up_shape, dtype, "up projection"),
        parameter("down_weight", down_shape, dtype, "down projection"),
        saved("variance1", (*tokens, 1), wide, "mean of x^2 over hidden, without eps"),
        saved("variance2", (*tokens, 1), wide, "mean of residual2^2 over hidden, without eps"),
        saved("hidden_states_normalized1", hidden, wide, "x * rsqrt(variance1 + eps)"),
        saved("hidden_states_normalized2", hidden, wide, "residual2 * rsqrt(variance2 + eps)"),
        scalar("eps", m.eps, "added to both variances"),
    )
    outputs = (
        Gradient("grad_input", "residual", hidden, dtype, "of the layer's input x"),
        Gradient("grad_input_ln_weight", "input_ln_weight", (m.hidden_size,), wide),
        Gradient("grad_q_weight", "q_weight", q_shape, dtype),
        Gradient("grad_k_weight", "k_weight", kv_shape, dtype),
        Gradient("grad_v_weight", "v_weight", kv_shape, dtype),
        Gradient("grad_o_weight", "o_weight", o_shape, dtype),
        Gradient("grad_post_attn_ln_weight", "post_attn_ln_weight", (m.hidden_size,), wide),
        Gradient("grad_gate_weight", "gate_weight", up_shape, dtype),
        Gradient("grad_up_weight", "up_weight", up_shape, dtype),
        Gradient("grad_down_weight", "down_weight", down_shape, dtype),
    )
    return Schema("decoder_backward", inputs, outputs)


def arguments(
    module: nn.Module, batch: int, seq: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The forward's arguments: x from N(0, 0.02²), and the RoPE tables."""
    assert isinstance(module, DecoderLayer)
    weight = module.q_weight
    cos, sin = rope_tables(batch, seq, module.head_dim, dtype=weight.dtype, device=weight.device)
    x = random_normal((batch, seq, module.hidden_size), 0.02, module, generator)
    return {"residual": x, "cos": cos, "sin": sin}


def reference(t: Mapping[str, Any]) -> dict[str, Tensor]:
    """The documented backward, formula by formula, on the tensors given.

    16-bit tensors: matmuls round to their dtype; norms, softmax and SiLU are in fp32.
    """
    dout = t["grad_output"]

    # Feed-forward half.
    dswiglu = dout @ t["down_weight"]
    dgate = dswiglu * t["silu_up"]
    dup = _silu_backward(dswiglu * t["gate"], t["up"])
    dffn_input = dgate @ t["gate_weight"] + dup @ t["up_weight"]
    dnorm2, dpost_attn_ln_weight = _rms_norm_backward(
        dffn_input, t["residual2"], t["hidden_states_normalized2"], t["variance2"],
        t["post_attn_ln_weight"], t["eps"],
    )  # fmt: skip
    dresidual2 = dout + dnorm2

    # Attention half.
    dq, dk, dv = _attention_backward(dresidual2 @ t["o_weight"], t)
    dattn_input = dq @ t["q_weight"] + dk @ t["k_weight"] + dv @ t["v_weight"]
    dnorm1, dinput_ln_weight = _rms_norm_backward(
        dattn_input, t["residual"], t["hidden_states_normalized1"], t["variance1"],
        t["input_ln_weight"], t["eps"],
    )  # fmt: skip

    return {
        "grad_input": dresidual2 + dnorm1,
        "grad_input_ln_weight": dinput_ln_weight,
        "grad_q_weight": weight_gradient(dq, t["attn_input"]),
        "grad_k_weight": weight_gradient(dk, t["attn_input"]),
        "grad_v_weight": weight_gradient(dv, t["attn_input"]),
        "grad_o_weight": weight_gradient(dresidual2, t["attn_output"]),
        "grad_post_attn_ln_weight": dpost_attn_ln_weight,
        "grad_gate_weight": weight_gradient(dgate, t["ffn_input"]),
        "grad_up_weight": weight_gradient(dup, t["ffn_input"]),
        "grad_down_weight": weight_gradient(dout, t["swiglu_output"]),
    }


def flops(module: nn.Module, batch: int, seq: int) -> int:
    """Two matmuls per projection, and four S×S ones per head, none skipped for the mask."""
    assert isinstance(module, DecoderLayer)
    projections = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    attention = module.num_heads * seq * seq * module.head_dim
    return 4 * batch * seq * projections + 8 * batch * attention


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = x.to(statistics_dtype(x.dtype))
    sigmoid = torch.sigmoid(wide)
    return (grad * (sigmoid + wide * sigmoid * (1 - sigmoid))).to(x.dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, normalized: Tensor, variance: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``dw = Σ g·n`` and ``dx = g·w·r - x·r³·mean(g·w·x)``, with ``r = rsqrt(variance + eps)``."""
    wide = grad.to(normalized.dtype)
    dweight = (wide * normalized).sum((0, 1))
    scaled = wide * weight
    rstd = torch.rsqrt(variance + eps)
    dx = scaled * rstd - x * rstd.pow(3) * (scaled * x).mean(-1, keepdim=True)
    return dx.to(x.dtype), dweight


def _attention_backward(
    dattn_output: Tensor, t: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the q, k and v projections' outputs, each [B, S, N·D]."""
    query, kv_heads = t["query_states_rotated"], t["key_states"].shape[1]
    heads, head_dim = query.shape[1], query.shape[3]
    grad = dattn_output.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    dprobabilities = grad @ t["value_states_repeated"].transpose(-2, -1)
    dvalue = t["attn_weights"].transpose(-2, -1) @ grad
    # dS = P·(dP - rowsum(dP·P))/sqrt(D)
    wide = statistics_dtype(grad.dtype)
    p, dp = t["attn_weights"].to(wide), dprobabilities.to(wide)
    dscores = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(head_dim)
    dscores = dscores.to(grad.dtype)

    dquery = _rope_backward(dscores @ t["key_states_repeated"], t["cos"], t["sin"])
    dkey = dscores.transpose(-2, -1) @ query
    dkey = _rope_backward(_sum_groups(dkey, kv_heads), t["cos"], t["sin"])
    return _merge(dquery), _merge(dkey), _merge(_sum_groups(dvalue, kv_heads))


def _rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation transposed: ``g·cos + rotate_half^T(g·sin)``."""
    first, second = (grad * sin.unsqueeze(1)).chunk(2, dim=-1)
    return grad * cos.unsqueeze(1) + torch.cat((second, -first), dim=-1)


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).sum(2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


PROBLEM = Problem(
    name="decoder_backward",
    dtype=torch.bfloat16,
    build=build,
    small={
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 80,
    },
    schema=schema,
    arguments=arguments,
    reference=reference,
    flops=flops,
    cases=(
        (1, 128), (4, 128), (32, 128), (2, 211), (1, 256), (4, 256), (8, 256), (32, 256),
        (4, 293), (8, 373), (16, 449), (2, 512), (1, 613), (2, 691), (1, 1024), (2, 1024),
    ),
    small_cases=((2, 17), (1, 7), (3, 33), (2, 1), (8, 8), (1, 129)),
)  # fmt: skip
