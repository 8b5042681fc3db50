"""Fused backward kernels: reference, Triton kernel, launcher and op, one file a fusion."""

from fusedbwd.kernels.attention import attention_backward, attention_rope_backward
from fusedbwd.kernels.gelu import gelu_backward
from fusedbwd.kernels.layer_norm import layer_norm_backward, layer_norm_backward_dx
from fusedbwd.kernels.matmul_gelu import matmul_gelu_backward
from fusedbwd.kernels.matmul_sum import sum_matmul
from fusedbwd.kernels.matmul_swiglu import matmul_swiglu_backward
from fusedbwd.kernels.rms_norm import rms_norm_backward, rms_norm_backward_dx
from fusedbwd.kernels.rope import rope_backward
from fusedbwd.kernels.swiglu import swiglu_backward

__all__ = [
    "attention_backward",
    "attention_rope_backward",
    "gelu_backward",
    "layer_norm_backward",
    "layer_norm_backward_dx",
    "matmul_gelu_backward",
    "matmul_swiglu_backward",
    "rms_norm_backward",
    "rms_norm_backward_dx",
    "rope_backward",
    "sum_matmul",
    "swiglu_backward",
]
