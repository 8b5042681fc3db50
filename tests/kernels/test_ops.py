"""What holds for every fused op, whatever it computes."""

import re

import pytest
import torch
from checks import run
from torch.utils import _pytree as pytree

from fusedbwd.kernels import (
    fp16_matmul,
    fp16_parts,
    geglu_backward,
    gelu_backward,
    layer_norm_backward,
    layer_norm_backward_dx,
    layer_norm_backward_rounded,
    matmul_gelu_backward,
    matmul_swiglu_backward,
    rms_norm_backward,
    rms_norm_backward_dx,
    rms_norm_backward_rounded,
    round_to,
    sum_matmul,
    swiglu_backward,
)
from fusedbwd.kernels._op import LAUNCHERS

WIDTH = 48


def draw(tokens, device):
    """Random operands: three matrices, a weight, a positive statistic, eps."""
    torch.manual_seed(tokens)
    matrices = [torch.randn(tokens, WIDTH, device=device) for _ in range(3)]
    weight, stat = torch.randn(WIDTH, device=device), torch.rand(tokens, 1, device=device) + 0.1
    return *matrices, weight, stat, torch.tensor(1e-5, device=device)


def arguments(op, tokens, device):
    """A full set of arguments for ``op``; the incoming gradient comes first."""
    a, b, c, weight, stat, eps = draw(tokens, device)
    square = torch.randn(WIDTH, WIDTH, device=device)
    h, k, m = (t.half() for t in (a, b, square))
    if op == fp16_matmul:
        return a, square, *in_parts(a, square), c
    return {
        swiglu_backward: (a, b, c),
        geglu_backward: (a, b, c, "tanh"),
        gelu_backward: (a, b, "tanh"),
        rms_norm_backward: (a, b, weight, stat, eps, None, c, 1.0, torch.float32),
        rms_norm_backward_dx: (a, b, weight, stat, eps, c, 1.0, torch.float32),
        layer_norm_backward: (a, b, stat, weight, stat, eps, c, torch.float32, True),
        layer_norm_backward_dx: (a, b, stat, weight, stat, eps, c, torch.float32),
        rms_norm_backward_rounded: (
            *(a, b, weight, stat, eps, None, c, 1.0, torch.float32),
            torch.bfloat16,
        ),
        layer_norm_backward_rounded: (
            *(a, b, stat, weight, stat, eps, c, torch.float32, True),
            torch.bfloat16,
        ),
        round_to: ([a, b], torch.float32),
        sum_matmul: ([h, k], [m, m + 1], c, torch.float32),
        matmul_swiglu_backward: (h, m, k, k + 1),
        matmul_gelu_backward: (h, m, k, "tanh"),
        fp16_parts: ([a, b], 1),
    }[op]


def in_parts(*xs):
    """The float16 parts of each, with its maxima and flags."""
    parts = fp16_parts(list(xs), 2)
    each = len(parts) // len(xs)
    return [parts[i : i + each] for i in range(0, len(parts), each)]


# The ops on rows of tokens; those on heads are tested in test_attention and test_rope.
OPS = [op for op in LAUNCHERS if not any(w in op._schema.name for w in ("attention", "rope"))]
over_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op._schema.name.split("::")[1])


def outputs(op, *args):
    result = run(LAUNCHERS[op], *args)
    return (result,) if isinstance(result, torch.Tensor) else result


@over_ops
@pytest.mark.parametrize("tokens", [0, 7])
def test_opcheck(op, tokens, device):
    torch.library.opcheck(op, arguments(op, tokens, device))


@over_ops
def test_kernel_has_the_shapes_that_the_op_declares(op, device):
    args = arguments(op, 7, device)
    meta = op(*pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args))
    meta = (meta,) if isinstance(meta, torch.Tensor) else meta
    for actual, declared in zip(outputs(op, *args), meta, strict=True):
        assert actual.shape == declared.shape
        assert actual.dtype == declared.dtype
        assert actual.stride() == declared.stride()


# But for those whose tensors have nothing to do with each other.
@pytest.mark.parametrize("op", [op for op in OPS if op not in (round_to, fp16_parts)], ids=str)
def test_fewer_gradients_than_rows(op):
    """Said while the graph is traced: the kernels would read past the end."""
    grad, *rest = arguments(op, 7, "meta")
    if op == sum_matmul:
        name, fewer = "a[1]", [grad[0], grad[1][:6]]
    else:
        name, fewer = "grad", grad[:6]
    message = f"{name}: expected shape [7, 48], got [6, 48]"
    if op == fp16_matmul:
        message = "a_parts[0]: expected shape [6, 48], got [7, 48]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        op(fewer, *rest)


@pytest.mark.parametrize(
    ("op", "index", "name", "rows"),
    [
        (matmul_gelu_backward, 1, "weight", 48),
        (matmul_swiglu_backward, 1, "weight", 48),
        (matmul_swiglu_backward, 3, "linear", 7),
        (sum_matmul, 2, "residual", 7),
    ],
)
def test_narrower_operands_of_matmuls(op, index, name, rows):
    args = list(arguments(op, 7, "meta"))
    args[index] = args[index][:, :47]
    message = f"{name}: expected shape [{rows}, 48], got [{rows}, 47]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        op(*args)


@over_ops
def test_no_tokens(op, device):
    for actual in outputs(op, *arguments(op, 0, device)):
        assert actual.numel() == 0 or not actual.any()


@over_ops
@pytest.mark.parametrize("layout", ["expanded", "rows expanded", "sliced", "transposed"])
def test_layout_of_the_gradient(op, layout, device):
    (grad, *rest), structure = pytree.tree_flatten(arguments(op, 7, device))
    strided = {
        "expanded": lambda: grad[0, 0].expand(7, WIDTH),
        "rows expanded": lambda: grad[0].expand(7, WIDTH),
        "sliced": lambda: torch.cat([grad, grad + 1, grad], 1)[:, 5 : 5 + WIDTH],
        "transposed": lambda: grad.t().contiguous().t(),
    }[layout]()

    def results(grad):
        return outputs(op, *pytree.tree_unflatten([grad, *rest], structure))

    for actual, want in zip(results(strided), results(strided.contiguous()), strict=True):
        assert torch.equal(actual, want)


@over_ops
def test_inputs_are_not_written_and_results_repeat(op, device):
    args = arguments(op, 127, device)
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    first, second = outputs(op, *args), outputs(op, *args)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (*tensors, *first, *second)]
    assert len({*storages}) == len({*(id(t) for t in tensors)}) + len(first) + len(second)


# But for those whose results are float16, or in float32 by their name.
@pytest.mark.parametrize("op", [op for op in OPS if op not in (fp16_parts, fp16_matmul)], ids=str)
def test_float64_is_computed_in_float64(op, device):
    args = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, list(arguments(op, 7, device)))
    args = [torch.float64 if isinstance(a, torch.dtype) else a for a in args]
    results = op(*args)
    results = (results,) if isinstance(results, torch.Tensor) else results
    for actual, result in zip(outputs(op, *args), results, strict=True):
        assert actual.dtype == torch.float64
        assert torch.equal(actual, result)
