"""How right a gradient is: relative L2 error, and the error that it may have.

A result is judged against float64, and by eager PyTorch's own error there: at most 1.2 times
it in 16-bit types and 2 times in float32, or one rounding unit of the output's dtype where
that is larger. There is no absolute tolerance, so a gradient that is small all over is held
to the same standard as a large one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedbwd.errors import InputError


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norm statistics, softmax and activations on ``dtype``: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64, Frobenius norms.

    Args:
        actual, expected: tensors of one shape, any floating dtypes, on one device.

    Returns:
        0 where both are empty or both all zero; infinity where either has a NaN or infinite
        element, or where ``expected`` is all zero and ``actual`` is not.

    Raises:
        InputError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise InputError(
            f"cannot compare shape {tuple(actual.shape)} with expected {tuple(expected.shape)}"
        )
    expected = expected.double()
    error = torch.linalg.vector_norm(actual.double() - expected).item()
    scale = torch.linalg.vector_norm(expected).item()
    if not (math.isfinite(error) and math.isfinite(scale)):
        return math.inf
    if scale == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / scale


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to ``dtype``: half the spacing at 1."""
    return torch.finfo(dtype).eps / 2


def budget(
    eager_error: float, dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> float:
    """The relative L2 error that a gradient may have.

    Args:
        eager_error: eager PyTorch's own relative L2 error on the same inputs. One that is not
            finite earns no allowance.
        dtype: the gradient's dtype; one rounding unit of it is always allowed.
        compute_dtype: the dtype that the activations have where it differs (a bf16 layer
            whose norm weight gradients are fp32).
    """
    factor = 1.2 if (compute_dtype or dtype).itemsize == 2 else 2.0
    allowed = factor * eager_error if math.isfinite(eager_error) else 0.0
    return max(allowed, rounding_unit(dtype))


def within(error: float, allowed: float) -> bool:
    """Whether ``error`` is a number no larger than ``allowed``; NaN and infinity never are."""
    return math.isfinite(error) and error <= allowed
