"""Fused ops on rows of tokens: norms, activations, rounding."""

import torch
from checks import run
from fuzzing import (
    DEVICE,
    FP16,
    GRADIENT_SCALES,
    dtypes,
    examples,
    judge,
    maybe,
    rows,
    statistics,
    tensors,
    vectors,
    widths,
)
from hypothesis import given
from hypothesis import strategies as st

from fusedbwd.kernels import (
    gelu_backward,
    layer_norm_backward,
    layer_norm_backward_dx,
    layer_norm_backward_rounded,
    rms_norm_backward,
    rms_norm_backward_dx,
    rms_norm_backward_rounded,
    swiglu_backward,
)
from fusedbwd.kernels.rounding import round_to_launch, round_to_reference

eps = st.sampled_from([None, 0.0, 1e-6, 1e-2]).map(
    lambda value: None if value is None else torch.tensor(value, device=DEVICE)
)


@st.composite
def norm_operands(draw):
    """grad, x, weight, stat, eps, residual and the dtype of dx: each of its own dtype."""
    shape = tokens, width = draw(rows), draw(widths)
    return (
        draw(tensors(shape, draw(dtypes), scale=GRADIENT_SCALES)),
        draw(tensors(shape, draw(dtypes))),
        draw(maybe(vectors(width, draw(dtypes)))),
        draw(statistics(tokens)),
        draw(eps),
        draw(maybe(tensors(shape, draw(dtypes), scale=GRADIENT_SCALES))),
        draw(dtypes),
    )


@examples(10, 300)
@given(norm_operands(), st.sampled_from([0.0, 1.0]), st.data())
def test_rms_norm(operands, offset, data):
    grad, x, weight, stat, eps, residual, out_dtype = operands
    x_hat = data.draw(maybe(tensors(tuple(x.shape), data.draw(dtypes))))
    given_ = (grad, x, weight, stat, eps)
    match data.draw(st.sampled_from(["all", "dx", "rounded"])):
        case "all":
            judge(rms_norm_backward, (*given_, x_hat, residual, offset, out_dtype))
        case "dx":
            judge(rms_norm_backward_dx, (*given_, residual, offset, out_dtype))
        case "rounded":
            both = (out_dtype, FP16)
            judge(rms_norm_backward_rounded, (*given_, x_hat, residual, offset, *both))


@examples(10, 300)
@given(norm_operands(), st.booleans(), st.data())
def test_layer_norm(operands, sum_dx, data):
    grad, x, weight, stat, eps, residual, out_dtype = operands
    mean = data.draw(maybe(statistics(x.shape[0])))
    given_ = (grad, x, mean, weight, stat, eps, residual, out_dtype)
    match data.draw(st.sampled_from(["all", "dx", "rounded"])):
        case "all":
            judge(layer_norm_backward, (*given_, sum_dx))
        case "dx":
            judge(layer_norm_backward_dx, given_)
        case "rounded":
            judge(layer_norm_backward_rounded, (*given_, sum_dx, FP16))


@examples(10, 300)
@given(st.data())
def test_swiglu(data):
    shape = data.draw(rows), data.draw(widths)
    grad = data.draw(tensors(shape, data.draw(dtypes), scale=GRADIENT_SCALES))
    dtype = data.draw(dtypes)
    act = data.draw(tensors(shape, dtype, scale=(1.0, 8.0)))
    linear = data.draw(tensors(shape, data.draw(dtypes)))
    judge(swiglu_backward, (grad, act, linear, data.draw(st.booleans())), rounds_to=dtype)


@examples(10, 300)
@given(st.data())
def test_gelu(data):
    shape = data.draw(rows), data.draw(widths)
    grad = data.draw(tensors(shape, data.draw(dtypes), scale=GRADIENT_SCALES))
    x = data.draw(tensors(shape, data.draw(dtypes), scale=(1.0, 8.0)))
    approximate = data.draw(st.sampled_from(["tanh", "none"]))
    judge(gelu_backward, (grad, x, approximate, data.draw(maybe(dtypes))))


@examples(6, 200)
@given(st.lists(st.tuples(rows, widths), min_size=1, max_size=4), dtypes, st.data())
def test_round_to(shapes, dtype, data):
    xs = [data.draw(tensors(shape, data.draw(dtypes))) for shape in shapes]
    found = run(round_to_launch, xs, dtype)
    for actual, expected in zip(found, round_to_reference(xs, dtype), strict=True):
        assert torch.equal(actual, expected) and actual.stride() == expected.stride()
