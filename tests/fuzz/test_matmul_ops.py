"""Fused ops around matmuls: every operand in any layout, so by descriptors and by pointers."""

from fuzzing import DEVICE, FP16, GRADIENT_SCALES, dtypes, examples, judge, maybe, rows, tensors
from hypothesis import given
from hypothesis import strategies as st

from fusedbwd.kernels import matmul_gelu_backward, matmul_swiglu_backward, sum_matmul
from fusedbwd.kernels._matmul import MatmulTile
from fusedbwd.kernels.matmul_gelu import (
    matmul_gelu_backward_fused,
    matmul_gelu_backward_launch,
)
from fusedbwd.kernels.matmul_sum import sum_matmul_fused, sum_matmul_launch
from fusedbwd.kernels.matmul_swiglu import (
    matmul_swiglu_backward_fused,
    matmul_swiglu_backward_launch,
)

sizes = st.one_of(st.integers(1, 48), st.sampled_from([64, 65, 130]))
# A GPU has no use for float32 here.
operand_dtypes = dtypes if DEVICE == "cpu" else st.just(FP16)


@st.composite
def tiles(draw, *, epilogue: bool):
    """A tile, or None for the route that the tables choose."""
    return draw(
        maybe(
            st.builds(
                MatmulTile,
                rows=st.sampled_from([16, 32, 64]),
                columns=st.sampled_from([32, 64]),
                depth=st.sampled_from([16, 32]),
                stages=st.just(2),
                warps=st.just(4),
                programs_per_sm=st.sampled_from([1, 3, 5]),
                subtiles=st.sampled_from([1, 2, 4]),
                group=st.sampled_from([1, 2, 8]),
                split=st.just(False) if epilogue else st.booleans(),
                early=st.sampled_from([0, 1, 2]),
                staged=st.booleans(),
            )
        )
    )


def routed(tile, fused, launch):
    return launch if tile is None else lambda *args: fused(*args, tile=tile)


@examples(8, 250)
@given(rows, sizes, st.lists(sizes, min_size=1, max_size=3), operand_dtypes, st.data())
def test_sum_matmul(tokens, width, depths, dtype, data):
    a = [data.draw(tensors((tokens, d), dtype, scale=GRADIENT_SCALES)) for d in depths]
    b = [data.draw(tensors((d, width), dtype)) for d in depths]
    residual = data.draw(maybe(tensors((tokens, width), data.draw(dtypes))))
    tile = data.draw(tiles(epilogue=False))
    launcher = routed(tile, sum_matmul_fused, sum_matmul_launch)
    judge(sum_matmul, (a, b, residual, data.draw(dtypes)), launcher=launcher, rounds_to=dtype)


@examples(8, 250)
@given(rows, sizes, sizes, operand_dtypes, st.data())
def test_matmul_gelu(tokens, hidden, width, dtype, data):
    grad = data.draw(tensors((tokens, hidden), dtype, scale=GRADIENT_SCALES))
    weight = data.draw(tensors((hidden, width), dtype))
    x = data.draw(tensors((tokens, width), data.draw(dtypes)))
    args = (grad, weight, x, data.draw(st.sampled_from(["tanh", "none"])))
    tile = data.draw(tiles(epilogue=True))
    launcher = routed(tile, matmul_gelu_backward_fused, matmul_gelu_backward_launch)
    judge(matmul_gelu_backward, args, launcher=launcher, rounds_to=dtype)


@examples(8, 250)
@given(rows, sizes, sizes, operand_dtypes, st.data())
def test_matmul_swiglu(tokens, hidden, width, dtype, data):
    grad = data.draw(tensors((tokens, hidden), dtype, scale=GRADIENT_SCALES))
    weight = data.draw(tensors((hidden, width), dtype))
    act = data.draw(tensors((tokens, width), dtype))
    linear = data.draw(tensors((tokens, width), dtype))
    tile = data.draw(tiles(epilogue=True))
    launcher = routed(tile, matmul_swiglu_backward_fused, matmul_swiglu_backward_launch)
    judge(matmul_swiglu_backward, (grad, weight, act, linear), launcher=launcher, rounds_to=dtype)
