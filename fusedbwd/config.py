"""Settings of one compilation."""

from __future__ import annotations

from dataclasses import dataclass, fields

OPT_INS = ("fp16_scaled", "fp16x3")
"""Fusions that are off by default: which rounding is allowed is for the user to say."""


@dataclass(frozen=True)
class Config:
    """What to fuse and how strictly to check it. Part of every cache key.

    Attributes:
        attention_backward: fuse the attention backward on given probabilities (16-bit dtypes).
        rope_backward: fuse RoPE backward, group sums and packing after SDPA's own backward.
        swiglu_backward: fuse the SwiGLU backward into one packed gradient buffer.
        geglu_backward: the same for GeGLU, gated by tanh or exact GELU.
        gelu_backward: fuse the GELU backward with the bias gradient.
        rms_norm_backward: fuse the RMSNorm backward with residual and weight gradients.
        layer_norm_backward: fuse the LayerNorm backward with residual and parameter gradients.
        matmul_swiglu_backward: put the SwiGLU backward in the epilogue of the matmul before it.
        matmul_gelu_backward: the same for GELU's backward and its bias gradient.
        fp16_scaled: run the backward's float32 matmuls on float16 operands under power-of-two
            scales, which are as exact as TF32, while
            ``torch.set_float32_matmul_precision("high")`` or "medium" allows that. Off by default.
        fp16x3: run them as three float16 products, as exact as float32, under any precision; where
            ``fp16_scaled`` is on and allowed, that is taken. Off by default.
        bf16_matmuls: run the backward's float32 matmuls on bfloat16 operands while
            ``torch.set_float32_matmul_precision("medium")`` allows it.
        sum_matmul: add up input gradients of projections inside one matmul (16-bit dtypes).
        k_major_weights: copy a weight so that it is contiguous along the summed dimension before a
            float32 matmul of an input gradient, where TF32 is allowed and that was measured to pay.
        gate: leave to Inductor what its own code was measured to do faster on the GPU
            (:mod:`fusedbwd.gate`); False fuses whatever is proven.
        strict: raise :class:`~fusedbwd.errors.FusionError` where nothing was fused.
        verify: check each rewrite on random data against the subgraph that it replaces, when
            it is compiled; raise :class:`~fusedbwd.errors.VerificationError` on disagreement.
        cpp_wrapper: exported backwards on a GPU only: let Inductor generate a C++ wrapper, whose
            launches cost a fraction of Python's and whose first compilation takes longer.
    """

    attention_backward: bool = True
    rope_backward: bool = True
    swiglu_backward: bool = True
    geglu_backward: bool = True
    gelu_backward: bool = True
    rms_norm_backward: bool = True
    layer_norm_backward: bool = True
    matmul_swiglu_backward: bool = True
    fp16_scaled: bool = False
    fp16x3: bool = False
    bf16_matmuls: bool = True
    matmul_gelu_backward: bool = True
    sum_matmul: bool = True
    k_major_weights: bool = True
    gate: bool = True
    strict: bool = False
    verify: bool = False
    cpp_wrapper: bool = True

    def enabled(self, fusion: str) -> bool:
        """Whether the fusion of that name is switched on."""
        return getattr(self, fusion)

    def key(self) -> str:
        """A text that two configurations share exactly when they are equal."""
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
