"""ffn_gelu_backward: a post-norm feed-forward block in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusedbwd.modules import GeluFFN
from fusedbwd.numerics import statistics_dtype
from fusedbwd.problems.problem import Problem, random_normal, weight_gradient
from fusedbwd.schema import Gradient, Schema, argument, grad_output, parameter, saved, scalar


def build(
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    random_norm: bool = True,
    **dims: Any,
) -> GeluFFN:
    """A :class:`GeluFFN` with weights drawn from ``seed``; ``dims`` are its arguments.

    ``ln_weight`` is random, which the module's own initialisation (ones, the problem's
    definition) does not test; ``random_norm=False`` gives that.
    """
    module = GeluFFN(**dims, device=device, dtype=dtype)
    generator = None
    if seed is not None:
        generator = torch.Generator(module.fc1_weight.device).manual_seed(seed)
    module.reset_parameters(generator, random_norm=random_norm)
    return module


def schema(module: nn.Module) -> Schema:
    """The backward's contract for a :class:`GeluFFN` of any dimensions and dtype."""
    assert isinstance(module, GeluFFN)
    m, dtype = module, module.fc1_weight.dtype
    wide = statistics_dtype(dtype)
    tokens = ("batch_size", "seq_len")
    hidden, intermediate = (*tokens, m.hidden_size), (*tokens, m.intermediate_size)
    fc1_shape, fc2_shape = (
        (m.intermediate_size, m.hidden_size),
        (m.hidden_size, m.intermediate_size),
    )

    inputs = (
        grad_output("grad_output", hidden, dtype, "gradient of the LayerNorm's output"),
        argument("hidden_states", hidden, dtype, "the block's input x"),
        parameter("fc1_weight", fc1_shape, dtype, "first projection"),
        saved("fc1_output", intermediate, dtype, "fc1(x), bias included"),
        saved("gelu_output", intermediate, dtype, "tanh-approximated GELU of fc1_output"),
        parameter("fc2_weight", fc2_shape, dtype, "second projection"),
        saved(
            "residual_output",
            hidden,
            dtype,
            "x + fc2(gelu_output), what the LayerNorm normalises",
            derived_from="normalized and var, up to the mean, which has no gradient of its own",
        ),
        saved("normalized", hidden, wide, "(residual_output - mean) / sqrt(var + eps)"),
        saved("var", (*tokens, 1), wide, "biased variance over hidden, without eps"),
        parameter("ln_weight", (m.hidden_size,), dtype, "weight of the LayerNorm"),
        scalar("eps", m.eps, "added to the variance"),
    )
    outputs = (
        Gradient("grad_hidden_states", "hidden_states", hidden, dtype, "of the block's input x"),
        Gradient("grad_fc1_weight", "fc1_weight", fc1_shape, dtype),
        Gradient("grad_fc1_bias", "fc1_bias", (m.intermediate_size,), dtype),
        Gradient("grad_fc2_weight", "fc2_weight", fc2_shape, dtype),
        Gradient("grad_fc2_bias", "fc2_bias", (m.hidden_size,), dtype),
        Gradient("grad_ln_weight", "ln_weight", (m.hidden_size,), wide),
        Gradient("grad_ln_bias", "ln_bias", (m.hidden_size,), wide),
    )
    return Schema("ffn_gelu_backward", inputs, outputs)


def arguments(
    module: nn.Module, batch: int, seq: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The forward's argument: x from N(0, 0.1²)."""
    assert isinstance(module, GeluFFN)
    x = random_normal((batch, seq, module.hidden_size), 0.1, module, generator)
    return {"hidden_states": x}


def reference(t: Mapping[str, Any]) -> dict[str, Tensor]:
    """The documented backward, formula by formula, on the tensors given."""
    normalized = t["normalized"]
    dout = t["grad_output"].to(normalized.dtype)

    # LayerNorm; its input's gradient goes to the residual and to fc2.
    dnormalized = dout * t["ln_weight"]
    projection = (dnormalized * normalized).mean(-1, keepdim=True)
    dresidual = dnormalized - dnormalized.mean(-1, keepdim=True) - normalized * projection
    dresidual = (dresidual / torch.sqrt(t["var"] + t["eps"])).to(t["grad_output"].dtype)

    dgelu = dresidual @ t["fc2_weight"]
    dfc1 = _gelu_backward(dgelu, t["fc1_output"])
    return {
        "grad_hidden_states": dfc1 @ t["fc1_weight"] + dresidual,
        "grad_fc1_weight": weight_gradient(dfc1, t["hidden_states"]),
        "grad_fc1_bias": dfc1.sum((0, 1)),
        "grad_fc2_weight": weight_gradient(dresidual, t["gelu_output"]),
        "grad_fc2_bias": dresidual.sum((0, 1)),
        "grad_ln_weight": (dout * normalized).sum((0, 1)),
        "grad_ln_bias": dout.sum((0, 1)),
    }


def flops(module: nn.Module, batch: int, seq: int) -> int:
    """Two matmuls for each of the two projections."""
    assert isinstance(module, GeluFFN)
    return 8 * batch * seq * module.hidden_size * module.intermediate_size


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Of ``x/2·(1 + tanh(sqrt(2/π)·(x + 0.044715·x³)))`` (Hendrycks and Gimpel, 2016)."""
    wide = x.to(statistics_dtype(x.dtype))
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(scale * (wide + cubic * wide**3))
    du = scale * (1 + 3 * cubic * wide**2)
    derivative = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tanh**2) * du
    return (grad * derivative).to(x.dtype)


PROBLEM = Problem(
    name="ffn_gelu_backward",
    dtype=torch.float32,
    build=build,
    small={"hidden_size": 48, "intermediate_size": 80},
    schema=schema,
    arguments=arguments,
    reference=reference,
    flops=flops,
    cases=(
        (1, 128), (1, 131), (2, 211), (8, 373), (16, 449), (32, 541), (1, 613), (4, 773),
        (8, 853), (16, 919), (64, 1087), (1, 1163), (8, 1423), (2, 1801), (4, 1879), (32, 4096),
    ),
    small_cases=((2, 17), (1, 7), (3, 33), (2, 1), (8, 8), (1, 1025)),
)  # fmt: skip
