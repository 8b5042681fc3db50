"""Helpers of the kernel tests."""

import torch

from fusedbwd.kernels._op import eager
from fusedbwd.numerics import budget, relative_l2, within

SHAPES = [(1, 160), (7, 33), (127, 48), (1025, 33)]
DTYPES = [torch.float32, torch.float16]

# The interpreter's conversion to bfloat16 truncates.
ROUNDED = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def assert_right(actual, expected, own, compute_dtype):
    """Each of ``actual`` is as near to the float64 ``expected`` as eager's ``own`` result is.

    All three: a tensor or a sequence of tensors, in one order.
    """
    if isinstance(actual, torch.Tensor):
        actual, expected, own = [actual], [expected], [own]
    for index, (a, e, o) in enumerate(zip(actual, expected, own, strict=True)):
        error, eager_error = relative_l2(a, e), relative_l2(o, e)
        allowed = budget(eager_error, a.dtype, compute_dtype)
        assert within(error, allowed), f"output {index}: {error:.2e}, allowed {allowed:.2e}"


def assert_same_formula(actual, expected):
    """Two float64 evaluations of one formula agree, norm-wise.

    Not to the last digit: some processors' ``erf`` is off by 2e-11. Another formula (the other
    GELU, say) is off by 1e-4 and more.
    """
    if isinstance(actual, torch.Tensor):
        actual, expected = [actual], [expected]
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype == torch.float64
        error = relative_l2(a, e)
        assert error <= 1e-10, f"output {index}: {error:.2e}"


def cast(args, dtype):
    """``args`` with its floating-point tensors in ``dtype``."""
    return [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]


def run(launcher, *args):
    """The launcher's results, its kernels run at once."""
    return eager(launcher)(*args)


def gradients(forward, grad, *leaves):
    """Autograd's gradients of ``forward(*leaves)``, each in its leaf's dtype."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(forward(*leaves), leaves, grad)
