"""The fusions, one a file: each a :class:`~fusedbwd.patterns.pattern.Pattern`.

``algebra`` proves rewrites; ``gated``, ``heads``, ``matmuls``, ``norms``, ``rope`` and ``walk``
hold the steps that several patterns share.
"""

from fusedbwd.patterns import (
    attention_backward,
    bf16_matmuls,
    fp16_scaled,
    fp16x3,
    geglu_backward,
    gelu_backward,
    k_major_weights,
    layer_norm_backward,
    matmul_gelu_backward,
    matmul_swiglu_backward,
    rms_norm_backward,
    rope_backward,
    sum_matmul,
    swiglu_backward,
)
from fusedbwd.patterns.pattern import Miss, Pattern, Rewrite

PATTERNS: tuple[Pattern, ...] = (
    attention_backward.PATTERN,
    rope_backward.PATTERN,
    swiglu_backward.PATTERN,
    geglu_backward.PATTERN,
    gelu_backward.PATTERN,
    layer_norm_backward.PATTERN,
    rms_norm_backward.PATTERN,
    matmul_swiglu_backward.PATTERN,
    fp16_scaled.PATTERN,
    fp16x3.PATTERN,
    bf16_matmuls.PATTERN,
    matmul_gelu_backward.PATTERN,
    sum_matmul.PATTERN,
    k_major_weights.PATTERN,
)
"""Every fusion, in the order in which the passes run: LayerNorm first, because it is an RMSNorm
of what is centered before, and GeGLU before GELU, whose bias gradient alone it would take. K-major
weights come last, for the matmuls that are left to the library."""

__all__ = ["PATTERNS", "Miss", "Pattern", "Rewrite"]
