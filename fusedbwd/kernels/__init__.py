"""Fused backward kernels: reference, Triton kernel, launcher and op, one file a fusion."""

from fusedbwd.kernels.attention import attention_backward, attention_rope_backward
from fusedbwd.kernels.fp16_matmul import fp16_matmul
from fusedbwd.kernels.fp16_parts import fp16_parts
from fusedbwd.kernels.geglu import geglu_backward
from fusedbwd.kernels.gelu import gelu_backward
from fusedbwd.kernels.layer_norm import (
    layer_norm_backward,
    layer_norm_backward_dx,
    layer_norm_backward_rounded,
)
from fusedbwd.kernels.matmul_gelu import matmul_gelu_backward
from fusedbwd.kernels.matmul_sum import sum_matmul
from fusedbwd.kernels.matmul_swiglu import matmul_swiglu_backward
from fusedbwd.kernels.rms_norm import (
    rms_norm_backward,
    rms_norm_backward_dx,
    rms_norm_backward_rounded,
)
from fusedbwd.kernels.rope import rope_backward
from fusedbwd.kernels.rounding import round_to
from fusedbwd.kernels.swiglu import swiglu_backward

__all__ = [
    "attention_backward",
    "attention_rope_backward",
    "fp16_matmul",
    "fp16_parts",
    "geglu_backward",
    "gelu_backward",
    "layer_norm_backward",
    "layer_norm_backward_dx",
    "layer_norm_backward_rounded",
    "matmul_gelu_backward",
    "matmul_swiglu_backward",
    "rms_norm_backward",
    "rms_norm_backward_dx",
    "rms_norm_backward_rounded",
    "rope_backward",
    "round_to",
    "sum_matmul",
    "swiglu_backward",
]
