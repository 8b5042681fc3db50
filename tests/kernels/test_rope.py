import pytest
import torch
from checks import DTYPES, assert_right, cast, gradients, run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.rope import (
    rope_backward,
    rope_backward_launch,
    rope_backward_reference,
)

# batch, heads, kv heads, group, S, D: kv heads repeated for their groups or not, more groups
# than are loaded at once, halves that are no whole vectors, heads that are no whole stacks.
SIZES = [
    (2, 4, 2, 2, 17, 16),
    (1, 8, 2, 4, 33, 160),
    (2, 4, 2, 1, 9, 32),
    (3, 3, 3, 1, 5, 10),
    (1, 12, 1, 12, 7, 24),
    (2, 6, 2, 3, 1, 128),
]
over_sizes = pytest.mark.parametrize(("batch", "heads", "kv_heads", "group", "seq", "dim"), SIZES)


def draw(batch, heads, kv_heads, group, seq, dim, dtype, device, table_batch=1):
    """dq, dk, dv, stored by tokens as an attention gives them; tables whose halves differ."""
    torch.manual_seed(seq + dim)

    def by_token(n):
        return torch.randn(batch, seq, n, dim, dtype=dtype, device=device).transpose(1, 2)

    def table():
        return torch.randn(table_batch, seq, dim, dtype=dtype, device=device)

    kv = kv_heads * group
    return by_token(heads), by_token(kv), by_token(kv), table(), table(), group


def rotate(z, cos, sin):
    first, second = z.chunk(2, -1)
    return z * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def autograd(dq, dk, dv, cos, sin, group):
    """What eager does to the three gradients, each of which is linear in its leaf."""

    def repeated(z):
        return z.repeat_interleave(group, 1)

    k = torch.zeros_like(dk[:, ::group])
    (dq,) = gradients(lambda z: rotate(z, cos, sin), dq, torch.zeros_like(dq))
    (dk,) = gradients(lambda z: repeated(rotate(z, cos, sin)), dk, k)
    (dv,) = gradients(repeated, dv, k)
    return torch.cat([g.transpose(1, 2).flatten(2).flatten(0, 1) for g in (dq, dk, dv)], 1)


def test_reference_is_autograd():
    args = draw(2, 6, 2, 3, 17, 10, torch.float64, "cpu", table_batch=2)
    torch.testing.assert_close(
        rope_backward_reference(*args), autograd(*args), rtol=1e-12, atol=1e-13
    )


def check_kernel(batch, *sizes, dtype, device):
    for table_batch in {1, batch}:
        args = draw(batch, *sizes, dtype, device, table_batch)
        assert_right(
            run(rope_backward_launch, *args),
            autograd(*cast(args, torch.float64)),
            autograd(*args),
            dtype,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@over_sizes
def test_kernel(batch, heads, kv_heads, group, seq, dim, dtype, device):
    check_kernel(batch, heads, kv_heads, group, seq, dim, dtype=dtype, device=device)


def test_group_sums_are_rounded_once(device):
    """In float16 a sum of these would lose the ones."""
    dq, dk, dv, cos, sin, group = draw(1, 3, 1, 3, 2, 16, torch.float16, device)
    for g in (dk, dv):
        g.copy_(torch.tensor([2048.0, 1.0, -2048.0], device=device).view(1, 3, 1, 1))
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    packed = run(rope_backward_launch, dq, dk, dv, cos, sin, group)
    assert (packed[:, 3 * 16 :] == 1).all()


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_other_tiles(stack, device):
    args = draw(2, 4, 1, 4, 13, 24, torch.float32, device)
    expected = run(rope_backward_launch, *args)
    launcher = lambda *a: rope_backward_launch(*a, stack=stack, vectors=16)  # noqa: E731
    assert torch.equal(run(launcher, *args), expected)


@pytest.mark.parametrize("layout", ["by head", "sliced", "transposed", "expanded"])
def test_layouts(layout, device):
    *tensors, group = draw(2, 4, 2, 2, 24, 16, torch.float32, device, table_batch=2)
    if layout == "expanded":
        tensors = [t[:1, :1].expand(t.shape) for t in tensors]
    strided = {
        "by head": lambda x: x.contiguous(),
        "sliced": lambda x: torch.cat([x + 1, x, x], -1)[..., 16:32],
        "transposed": lambda x: x.mT.contiguous().mT,
        "expanded": lambda x: x,
    }[layout]
    expected = run(rope_backward_launch, *(t.contiguous() for t in tensors), group)
    assert torch.equal(run(rope_backward_launch, *map(strided, tensors), group), expected)


def test_what_is_not_finite_stays_in_its_pair(device):
    """In q and k an element meets the one that RoPE pairs it with; in v none."""
    dq, dk, dv, cos, sin, group = draw(1, 1, 1, 1, 3, 16, torch.float32, device)
    for g in (dq, dk, dv):
        g[0, 0, 1, 5] = torch.inf
    packed = run(rope_backward_launch, dq, dk, dv, cos, sin, group)
    expected = torch.zeros_like(packed, dtype=torch.bool)
    expected[1, [5, 13, 16 + 5, 16 + 13, 32 + 5]] = True
    assert torch.equal(~packed.isfinite(), expected)


@pytest.mark.parametrize(("batch", "seq"), [(2, 5), (0, 5), (1, 0)])
def test_op(batch, seq, device):
    args = draw(batch, 4, 2, 2, seq, 16, torch.float32, device)
    before = cast(args, torch.float32)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in before]
    torch.library.opcheck(rope_backward, args)
    first, second = (run(rope_backward_launch, *args) for _ in range(2))
    declared = rope_backward(*(a.to("meta") for a in args[:5]), args[5])
    assert torch.equal(first, second)
    assert (first.shape, first.stride(), first.dtype) == (
        declared.shape,
        declared.stride(),
        declared.dtype,
    )
    assert all(torch.equal(a, b) for a, b in zip(args[:5], before[:5], strict=True))


def test_what_is_not_supported(device):
    dq, dk, dv, cos, sin, _ = draw(2, 4, 2, 1, 5, 16, torch.float32, device)
    for message, args in {
        "even head_dim": (dq[..., :7], dk[..., :7], dv[..., :7], cos[..., :7], sin[..., :7], 1),
        "whole groups of 4": (dq, dk, dv, cos, sin, 4),
        "dk in dq's": (dq, dk.half(), dv, cos, sin, 1),
        "expected dv": (dq, dk, dv[:, :1], cos, sin, 1),
        "expected sin": (dq, dk, dv, cos, sin[:, :4], 1),
        "bfloat16, float16 or float32": (*(t.long() for t in (dq, dk, dv)), cos, sin, 1),
    }.items():
        with pytest.raises(UnsupportedError, match=message):
            run(rope_backward_launch, *args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "group", "seq", "dim"), [
    (2, 32, 8, 4, 449, 160), (1, 32, 8, 1, 613, 128), (4, 32, 32, 1, 256, 64),
    (1, 71, 1, 71, 33, 64), (3, 12, 4, 3, 65, 80), (1, 8, 2, 4, 1, 160),
])  # fmt: skip
def test_kernel_at_size(batch, heads, kv_heads, group, seq, dim, dtype, device):
    check_kernel(batch, heads, kv_heads, group, seq, dim, dtype=dtype, device=device)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31(device):
    """Two batch entries so far apart that their distance is no 32-bit number of elements."""
    batch, heads, seq, dim = 2, 32, 262_144, 128
    args = draw(1, heads, 1, 1, 16, dim, torch.bfloat16, device)
    big = torch.zeros(batch, heads, seq, dim, dtype=torch.bfloat16, device=device)
    big[1, :, -16:] = args[0][0]
    dk, dv = (torch.zeros_like(big[:, :1]) for _ in range(2))
    dk[1, :, -16:], dv[1, :, -16:] = args[1][0], args[2][0]
    cos, sin = (torch.ones(1, seq, dim, dtype=big.dtype, device=device) for _ in range(2))
    cos[0, -16:], sin[0, -16:] = args[3][0], args[4][0]
    packed = run(rope_backward_launch, big, dk, dv, cos, sin, 1)
    assert torch.equal(packed[-16:], run(rope_backward_launch, *args))
    assert not packed[:-16].any()
