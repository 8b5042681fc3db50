import pytest
import torch
import torch.nn.functional as F
from checks import DTYPES, SHAPES, assert_right, cast, gradients, run

from fusedbwd.kernels.swiglu import swiglu_backward_launch, swiglu_backward_reference

LARGE = (50.0, 87.5, 88.7, 100.0, 200.0, 1e4)


def autograd(grad, act, linear):
    return torch.cat(gradients(lambda a, b: F.silu(a) * b, grad, act, linear), 1)


def draw(tokens, width, dtype, device):
    torch.manual_seed(tokens + width)
    return [torch.randn(tokens, width, dtype=dtype, device=device) for _ in range(3)]


def test_reference_is_autograd():
    args = draw(127, 33, torch.float64, "cpu")
    torch.testing.assert_close(
        swiglu_backward_reference(*args), autograd(*args), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [*SHAPES, (3, 1100)])
def test_kernel(tokens, width, dtype, device):
    args = draw(tokens, width, dtype, device)
    assert_right(
        run(swiglu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        dtype,
    )


@pytest.mark.parametrize("run_it", [run, lambda launch, *args: swiglu_backward_reference(*args)])
def test_linear_first(run_it, device):
    """The same numbers, with the halves swapped."""
    args = draw(7, 33, torch.float32, device)
    d_act, d_linear = run_it(swiglu_backward_launch, *args).chunk(2, 1)
    swapped = run_it(swiglu_backward_launch, *args, True)
    assert torch.equal(swapped, torch.cat([d_linear, d_act], 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "width"), [(1025, 160), (127, 14336)])
def test_kernel_bf16(tokens, width, device):
    args = draw(tokens, width, torch.bfloat16, device)
    assert_right(
        run(swiglu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        torch.bfloat16,
    )


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_activations(dtype, implementation, device):
    act = torch.tensor([[*LARGE, *(-v for v in LARGE)]], dtype=dtype, device=device)
    ones = torch.ones_like(act)
    if implementation == "kernel":
        packed = run(swiglu_backward_launch, ones, act, ones)
    else:
        packed = swiglu_backward_reference(ones, act, ones)
    assert packed.isfinite().all()
    slope = packed[0, : 2 * len(LARGE)].double()
    assert (slope[: len(LARGE)] == 1).all()
    # Of the negative ones: -87.5 and -88.7 leave something that float32 can still represent.
    assert (slope[-3:].abs() < torch.finfo(torch.float32).tiny).all()
    if dtype != torch.float16:
        negative = torch.tensor(-87.5, dtype=torch.float64)
        s = torch.sigmoid(negative)
        truth = s * (1 + negative * (1 - s))  # -8.6e-37
        torch.testing.assert_close(slope[len(LARGE) + 1].cpu(), truth, rtol=1e-2, atol=0.0)


def test_nan_stays_in_its_element(device):
    grad, act, linear = draw(3, 33, torch.float32, device)
    act[1, 5] = torch.nan
    packed = run(swiglu_backward_launch, grad, act, linear)
    expected = torch.zeros_like(packed, dtype=torch.bool)
    expected[1, 5] = expected[1, 33 + 5] = True
    assert torch.equal(packed.isnan(), expected)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31(device):
    tokens, width = 149_797, 14336
    grad, act, linear = (
        torch.zeros(tokens, width, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    edges = torch.cat([torch.arange(8), torch.arange(tokens - 8, tokens)]).to(device)
    torch.manual_seed(0)
    for t in (grad, act, linear):
        t[edges] = torch.randn(16, width, dtype=t.dtype, device=device)
    packed = run(swiglu_backward_launch, grad, act, linear)
    alone = run(swiglu_backward_launch, grad[edges], act[edges], linear[edges])
    assert torch.equal(packed[edges], alone)
    assert not packed[8:-8].any()
