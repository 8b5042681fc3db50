import pytest
import torch
import torch.nn.functional as F
from checks import DTYPES, assert_right, assert_same_formula, cast, gradients, run

from fusedbwd.kernels.geglu import geglu_backward_launch, geglu_backward_reference

FLAVOURS = ["tanh", "none"]


def autograd(grad, act, linear, approximate):
    def geglu(a, b):
        return F.gelu(a, approximate=approximate) * b

    return torch.cat(gradients(geglu, grad, act, linear), 1)


def draw(tokens, width, dtype, device):
    torch.manual_seed(tokens + width)
    return [torch.randn(tokens, width, dtype=dtype, device=device) for _ in range(3)]


@pytest.mark.parametrize("approximate", FLAVOURS)
def test_reference_is_autograd(approximate):
    grad, act, linear = draw(127, 33, torch.float64, "cpu")
    args = grad, 3 * act, linear, approximate
    assert_same_formula(geglu_backward_reference(*args), autograd(*args))


@pytest.mark.parametrize("approximate", FLAVOURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 160), (127, 33), (3, 1100)])
def test_kernel(tokens, width, dtype, approximate, device):
    args = [*draw(tokens, width, dtype, device), approximate]
    assert_right(
        run(geglu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        dtype,
    )


@pytest.mark.parametrize("run_it", [run, lambda launch, *args: geglu_backward_reference(*args)])
def test_linear_first(run_it, device):
    """The same numbers, with the halves swapped."""
    args = [*draw(7, 33, torch.float32, device), "tanh"]
    d_act, d_linear = run_it(geglu_backward_launch, *args).chunk(2, 1)
    swapped = run_it(geglu_backward_launch, *args, True)
    assert torch.equal(swapped, torch.cat([d_linear, d_act], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", FLAVOURS)
@pytest.mark.parametrize(("tokens", "width"), [(1025, 160), (127, 14336)])
def test_kernel_bf16(tokens, width, approximate, device):
    args = [*draw(tokens, width, torch.bfloat16, device), approximate]
    assert_right(
        run(geglu_backward_launch, *args),
        autograd(*cast(args, torch.float64)),
        autograd(*args),
        torch.bfloat16,
    )


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("approximate", FLAVOURS)
def test_large_activations(approximate, implementation, device):
    """Slope and value of GELU where its exponentials and powers leave float32's range."""
    act = torch.tensor([[30.0, 1e4, 1e20, -30.0, -1e4, -1e20]], device=device)
    ones = torch.ones_like(act)
    if implementation == "kernel":
        packed = run(geglu_backward_launch, ones, act, ones, approximate)
    else:
        packed = geglu_backward_reference(ones, act, ones, approximate)
    slope, value = packed.chunk(2, 1)
    assert slope.tolist() == [[1, 1, 1, 0, 0, 0]]
    assert value.tolist() == [[*act[0, :3].tolist(), 0, 0, 0]]


def test_nan_stays_in_its_element(device):
    grad, act, linear = draw(3, 33, torch.float32, device)
    act[1, 5] = torch.nan
    packed = run(geglu_backward_launch, grad, act, linear, "tanh")
    assert packed.isnan().nonzero().tolist() == [[1, 5], [1, 33 + 5]]
