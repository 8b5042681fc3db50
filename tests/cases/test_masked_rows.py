"""Attention where a query may look at no key: each spelling keeps its own meaning."""

import pytest
import torch
import torch.nn.functional as F
from checks import run
from torch import nn

import fusedbwd
from fusedbwd import Config
from fusedbwd.kernels.attention import attention_backward_launch, attention_backward_reference

SHAPE = (1, 2, 4, 8)
ROW = 2  # which sees nothing
INF = torch.inf


def allowed():
    return torch.ones(4, 4, dtype=torch.bool).tril() & (torch.arange(4) != ROW)[:, None]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed())


def filled(q, k, v):
    scores = q @ k.transpose(-2, -1) * 8**-0.5
    return F.softmax(scores.masked_fill(~allowed(), -INF), -1) @ v


def added(least):
    def attention(q, k, v):
        scores = q @ k.transpose(-2, -1) * 8**-0.5
        number = torch.finfo(q.dtype).min if least else -INF
        mask = torch.zeros(4, 4, dtype=q.dtype).masked_fill(~allowed(), number)
        return F.softmax(scores + mask, -1) @ v

    return attention


SPELLINGS = {
    "sdpa": sdpa,
    "filled": filled,
    "-inf added": added(least=False),
    "least number added": added(least=True),
}


class Attentions(nn.Module):
    """Each spelling on tensors of its own."""

    def forward(self, *tensors):
        return [f(*tensors[3 * i : 3 * i + 3]) for i, f in enumerate(SPELLINGS.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_spelling_becomes_another(interpreted, dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(SHAPE).to(dtype) for _ in range(12)]
    grads = [torch.randn(SHAPE).to(dtype) for _ in range(4)]
    compiled = fusedbwd.compile(Attentions(), config=Config(verify=True))
    found = []
    for module in (compiled, Attentions()):
        leaves = [t.clone().requires_grad_() for t in tensors]
        outs = module(*leaves)
        found.append((outs, torch.autograd.grad(outs, leaves, grads)))
    (outs, ours), (eager_outs, theirs) = found
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    )
    for a, b in zip([*outs, *ours], [*eager_outs, *theirs], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)

    by_name = {name: (outs[i], *ours[3 * i : 3 * i + 3]) for i, name in enumerate(SPELLINGS)}
    out, dq, dk, dv = by_name["sdpa"]
    assert not out[:, :, ROW].any() and not dq[:, :, ROW].any()
    assert all(t.isfinite().all() for t in by_name["sdpa"])
    out, dq, dk, dv = by_name["filled"]
    assert out[:, :, ROW].isnan().all() and dv.isnan().any()
    assert dq.isfinite().all() and dk.isfinite().all()
    out, dq, dk, dv = by_name["-inf added"]
    assert out[:, :, ROW].isnan().all() and dq[:, :, ROW].isnan().all() and dk.isnan().all()
    out, dq, dk, dv = by_name["least number added"]
    assert all(t.isfinite().all() for t in by_name["least number added"])
    average = tensors[11].mean(2)
    torch.testing.assert_close(out[:, :, ROW], average, **tolerance)

    fired = fusedbwd.report(compiled).counts().get("attention_backward", 0)
    assert fired == (2 if dtype == torch.bfloat16 else 0), fusedbwd.report(compiled)


def test_probabilities_that_are_not_numbers(kernels, device):
    """What a fully masked row's softmax gives spreads as the formulas say, and no further."""
    torch.manual_seed(0)
    grad, q = torch.randn(2, 1, 4, 80, 16, device=device)
    k, v = torch.randn(2, 1, 2, 80, 16, device=device)
    probs = torch.rand(1, 4, 80, 80, device=device).tril()
    probs[:, 1, 70] = torch.nan
    args = (grad, probs, q, k, v, 0.3, False)
    for ours, right in zip(
        run(attention_backward_launch, *args), attention_backward_reference(*args), strict=True
    ):
        assert torch.equal(ours.isnan(), right.isnan())
        torch.testing.assert_close(ours, right, equal_nan=True, rtol=1e-3, atol=1e-4)
