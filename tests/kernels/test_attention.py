import pytest
import torch
from checks import DTYPES, assert_right, cast, gradients, run

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels.attention import (
    AttentionTile,
    attention_backward,
    attention_backward_launch,
    attention_backward_reference,
    attention_rope_backward,
    attention_rope_backward_launch,
    attention_rope_backward_reference,
    supported,
)

SCALE = 0.3
SMALL = AttentionTile(1, 16, 16, 4, 2, 32, 16, 4, 2)
WIDE = AttentionTile(1, 64, 64, 4, 2, 128, 64, 4, 2)
# batch, heads, kv heads, S, D
SIZES = [
    (2, 2, 2, 17, 16),
    (1, 4, 2, 33, 32),
    (1, 4, 1, 65, 160),
    (2, 3, 1, 1, 24),
    (1, 2, 1, 72, 80),
]
over_sizes = pytest.mark.parametrize(("batch", "heads", "kv_heads", "seq", "dim"), SIZES)


def draw(batch, heads, kv_heads, seq, dim, dtype, device, mask="causal"):
    """grad, P, q, k, v: P is not a softmax of q and k, and its rows do not sum to one."""
    torch.manual_seed(seq + dim)

    def by_token(n):
        return torch.randn(batch, seq, n, dim, dtype=dtype, device=device).transpose(1, 2)

    probs = torch.rand(batch, heads, seq, seq, device=device)
    probs = {"causal": probs.tril(), "none": probs}[mask].to(dtype)
    return by_token(heads), probs, by_token(heads), by_token(kv_heads), by_token(kv_heads)


def tables(batch, seq, dim, dtype, device):
    """RoPE tables whose halves differ."""
    return [torch.randn(batch, seq, dim, device=device).to(dtype) for _ in range(2)]


def eager(grad, probs, q, k, v, scale=SCALE, causal=False):
    """The backward as a training step would run it, every matmul rounded to the dtype."""
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)

    def summed(x):
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    dp = (grad @ v.repeat_interleave(group, 1).transpose(-2, -1)).to(wide)
    p = probs.to(wide)
    ds = (p * (dp - (dp * p).sum(-1, keepdim=True)) * scale).to(q.dtype)
    dq = ds @ k.repeat_interleave(group, 1)
    dv = probs.to(q.dtype).transpose(-2, -1) @ grad
    return dq, summed(ds.transpose(-2, -1) @ q), summed(dv)


def rotate(z, cos, sin):
    first, second = z.chunk(2, -1)
    return z * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def pack(*gradients_):
    return torch.cat([g.transpose(1, 2).flatten(2).flatten(0, 1) for g in gradients_], 1)


def eager_packed(grad, probs, q, k, v, cos, sin, scale=SCALE, causal=False):
    dq, dk, dv = eager(grad, probs, q, k, v, scale)
    dq, dk = (gradients(lambda z: rotate(z, cos, sin), g, g)[0] for g in (dq, dk))
    return pack(dq, dk, dv)


def check(args, dtype, *, causal, tile=None):
    actual = run(lambda *a: attention_backward_launch(*a, tile), *args, SCALE, causal)
    wide = cast(args, torch.float64)
    assert_right(actual, attention_backward_reference(*wide, SCALE, causal), eager(*args), dtype)
    return actual


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_reference_is_autograd(groups):
    """Through softmax and RoPE, where P is the softmax's and dO is O's."""
    batch, kv_heads, seq, dim = 2, 2, 17, 10
    grad, _, q, k, v = draw(batch, groups * kv_heads, kv_heads, seq, dim, torch.float64, "cpu")
    cos, sin = tables(batch, seq, dim, torch.float64, "cpu")
    mask = torch.full((seq, seq), -torch.inf).triu(1)

    def probabilities(q, k):
        scores = q @ k.repeat_interleave(groups, 1).transpose(-2, -1)
        return torch.softmax(SCALE * scores + mask, -1)

    def plain(q, k, v):
        return probabilities(q, k) @ v.repeat_interleave(groups, 1)

    expected = gradients(plain, grad, q, k, v)
    actual = attention_backward_reference(grad, probabilities(q, k), q, k, v, SCALE, True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)

    expected = gradients(
        lambda q, k, v: plain(rotate(q, cos, sin), rotate(k, cos, sin), v), grad, q, k, v
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    packed = attention_rope_backward_reference(
        grad, probabilities(q, k), q, k, v, cos, sin, SCALE, True
    )
    torch.testing.assert_close(packed, pack(*expected), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@over_sizes
def test_kernel(batch, heads, kv_heads, seq, dim, dtype, causal, device):
    check(draw(batch, heads, kv_heads, seq, dim, dtype, device), dtype, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_batch", [1, 2])
@over_sizes
def test_rope_kernel(batch, heads, kv_heads, seq, dim, table_batch, dtype, device):
    args = draw(batch, heads, kv_heads, seq, dim, dtype, device)
    args += (*tables(min(batch, table_batch), seq, dim, dtype, device), SCALE, True)
    assert_right(
        run(attention_rope_backward_launch, *args),
        attention_rope_backward_reference(*cast(args, torch.float64)),
        eager_packed(*args),
        dtype,
    )


@pytest.mark.parametrize("seq", [136, 141])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "ragged", "one", "all"])
def test_any_mask(mask, heads, seq, device):
    """Several tiles each way: what the bounds skip is zero, and all else is read."""
    grad, probs, q, k, v = draw(2, 4, 2, seq, 16, torch.float32, device, "none")
    row, column = torch.arange(seq, device=device)[:, None], torch.arange(seq, device=device)
    # Ends that fall as rows go down, and that differ between heads and batch entries.
    ends = torch.tensor([136, 3, 17, 0, 1, 70, 64, 8], device=device).reshape(2, 4, 1, 1)
    keep = {
        "none": row >= 0,
        "causal": row >= column,
        "window": (row >= column) & (row < column + 5),
        "ragged": column < torch.where(row < 70, ends, torch.where(row < 130, 0, 5)),
        "one": (row == seq - 1) & (column == 0),
        "all": row < 0,
    }[mask]
    args = (grad, probs * keep, q, k, v)
    check(args, torch.float32, causal=False, tile=WIDE._replace(heads=heads))


@pytest.mark.parametrize("seq", [72, 75])
def test_tiles_above_the_diagonal_are_not_read(seq, device):
    """NaN there changes nothing if the caller says causal, and everything if not."""
    grad, probs, q, k, v = draw(1, 2, 1, seq, 16, torch.float32, device)
    expected = check((grad, probs, q, k, v), torch.float32, causal=True, tile=SMALL)
    tile = torch.arange(seq, device=device) // 64
    poisoned = probs.masked_fill(tile[None, :] > tile[:, None], torch.nan)
    assert poisoned.isnan().any()
    for causal in (True, False):
        actual = run(
            lambda *a: attention_backward_launch(*a, SMALL), grad, poisoned, q, k, v, SCALE, causal
        )
        same = all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
        assert same == causal


@pytest.mark.parametrize("tile", [
    AttentionTile(4, 16, 32, 4, 2, 16, 32, 4, 2),
    AttentionTile(2, 32, 16, 4, 2, 64, 16, 4, 2),
    AttentionTile(1, 128, 64, 4, 2, 16, 64, 4, 2),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_other_shapes(tile, causal, device):
    args = draw(1, 4, 1, 137, 16, torch.float32, device)
    check(args, torch.float32, causal=causal, tile=tile)


@pytest.mark.parametrize("layout", ["expanded", "sliced", "by head", "transposed"])
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(layout, causal, device):
    args = draw(2, 4, 2, 24, 16, torch.float32, device)
    if layout == "expanded":
        args = (args[0][:1, :1, :1, :1].expand(args[0].shape), *args[1:])
    strided = {
        "expanded": lambda x: x,
        "sliced": lambda x: torch.nn.functional.pad(x, (3, 5, 1, 2))[:, :, 1:-2, 3:-5],
        "by head": lambda x: x.contiguous(),
        "transposed": lambda x: x.mT.contiguous().mT,
    }[layout]
    views = [strided(x) for x in args]
    expected = run(attention_backward_launch, *(x.contiguous() for x in args), SCALE, causal)
    for actual, want in zip(
        run(attention_backward_launch, *views, SCALE, causal), expected, strict=True
    ):
        assert torch.equal(actual, want)


@pytest.mark.parametrize("causal", [False, True])
@over_sizes
def test_wider_probabilities(batch, heads, kv_heads, seq, dim, causal, device):
    """Float32 P beside 16-bit operands: dS is from P as given, dv from P rounded."""
    grad, probs, q, k, v = draw(batch, heads, kv_heads, seq, dim, torch.float16, device)
    wide = torch.rand_like(probs, dtype=torch.float32).tril()
    dq, dk, dv = check((grad, wide, q, k, v), torch.float16, causal=causal)
    same = run(attention_backward_launch, grad, wide.half(), q, k, v, SCALE, causal)
    assert torch.equal(dv, same[2])
    assert seq == 1 or (not torch.equal(dq, same[0]) and not torch.equal(dk, same[1]))


@pytest.mark.parametrize("op", [attention_backward, attention_rope_backward])
@pytest.mark.parametrize(("batch", "seq"), [(2, 5), (0, 5), (1, 0)])
def test_op(op, batch, seq, device):
    args = draw(batch, 4, 2, seq, 16, torch.float32, device)
    if op is attention_rope_backward:
        args += tuple(tables(1, seq, 16, torch.float32, device))
    before = [a.clone() for a in args]
    torch.library.opcheck(op, (*args, SCALE, True))
    launcher = {
        attention_backward: attention_backward_launch,
        attention_rope_backward: attention_rope_backward_launch,
    }[op]
    first, second = (run(launcher, *args, SCALE, True) for _ in range(2))
    declared = op(*(a.to("meta") for a in args), SCALE, True)
    for a, b, meta in zip(*map(torch.utils._pytree.tree_leaves, (first, second, declared)),
                          strict=True):  # fmt: skip
        assert torch.equal(a, b)
        assert (a.shape, a.stride(), a.dtype) == (meta.shape, meta.stride(), meta.dtype)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_what_is_not_supported(device):
    assert [d for d in (0, 2, 160, 161, 256, 258) if supported(d)] == [2, 160, 256]
    grad, probs, q, k, v = draw(1, 3, 1, 5, 16, torch.float32, device)
    with pytest.raises(UnsupportedError, match="k in q's"):
        run(attention_backward_launch, grad, probs, q, k.half(), v, SCALE, True)
    with pytest.raises(UnsupportedError, match="3 of them for 2"):
        run(attention_backward_launch, grad, probs, q, k.repeat(1, 2, 1, 1), v, SCALE, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "seq", "dim"), [
    (2, 32, 8, 449, 160), (1, 32, 8, 613, 160), (4, 32, 8, 256, 160), (1, 32, 8, 1, 160),
    (2, 16, 16, 300, 64), (2, 12, 4, 232, 128), (1, 8, 2, 333, 256), (1, 4, 1, 200, 16),
])  # fmt: skip
def test_kernel_at_size(batch, heads, kv_heads, seq, dim, causal, dtype, device):
    args = draw(batch, heads, kv_heads, seq, dim, dtype, device)
    first, second = (check(args, dtype, causal=causal) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = torch.rand(args[1].shape, device=device).tril()
    check((args[0], wide, *args[2:]), dtype, causal=causal)
    args += (*tables(batch, seq, dim, dtype, device), SCALE, causal)
    assert_right(
        run(attention_rope_backward_launch, *args),
        attention_rope_backward_reference(*cast(args, torch.float64)),
        eager_packed(*args),
        dtype,
    )
