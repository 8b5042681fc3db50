"""What the graph looks like: open sizes, frozen weights, absent operands, intermediates wanted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from decoder import Decoder, LoRA, RMSNorm
from torch import nn
from trained import HIDDEN, TINY_COUNTS, assert_as_eager, compiled_tiny, make

import fusedbwd
from fusedbwd import Config
from fusedbwd.numerics import relative_l2
from fusedbwd.training import _record_of

VERIFY = Config(verify=True)
BF16 = torch.bfloat16


def reports(compiled):
    """Of each joint graph."""
    return [one for graph in _record_of(compiled).graphs.values() for one in graph]


def test_lengths(interpreted):
    """Right at every length; and what fuses at one fuses at the others, or says why not."""
    eager = make(Decoder, BF16)
    compiled = fusedbwd.compile(copy.deepcopy(eager), dynamic=True, config=VERIFY)
    for batch, seq in [(2, 17), (2, 33), (5, 64), (2, 1), (2, 129)]:
        assert_as_eager(compiled, eager, batch, seq, BF16, rounds=8)
    first, *others = reports(compiled)
    assert first.counts()["attention_backward"] == 1
    assert first.counts()["rms_norm_backward"] == 2
    for report in others:
        assert set(first.counts()) - set(report.counts()) <= set(report.near_misses()), report
    assert len(others) <= 1  # for the length of 1


def test_a_batch_that_is_marked_dynamic(interpreted, tiny):
    compiled = compiled_tiny(tiny, verify=True)
    for batch in (2, 5, 3):
        x = torch.randn(batch, 17, HIDDEN, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        ours, theirs = (
            torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
            for module in (compiled, tiny)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert relative_l2(a, b) <= 1e-5
    (report,) = reports(compiled)
    assert report.counts() == TINY_COUNTS


def lora(decoder):
    decoder.requires_grad_(False)
    decoder.q, decoder.gate = LoRA(decoder.q), LoRA(decoder.gate)
    return decoder


def only_down(decoder):
    decoder.requires_grad_(False).down.requires_grad_(True)
    return decoder


TRAINED = {"everything": lambda d: d, "down projection": only_down, "LoRA": lora}


@pytest.mark.parametrize(
    ("name", "with_input"),
    [("everything", False), ("down projection", False), ("LoRA", True)],
)
def test_frozen_weights_have_no_gradient_and_no_matmul(interpreted, name, with_input):
    eager = make(lambda: TRAINED[name](Decoder()))
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    assert_as_eager(compiled, eager, 2, 17, with_input=with_input)
    (graph,) = interpreted
    products = [
        n.meta["val"].shape
        for n in graph.graph.nodes
        if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    # Any other product has the 34 tokens as its rows.
    matrices = sum(p.dim() == 2 and p.requires_grad for p in eager.parameters())
    assert sum(2 * 17 not in shape for shape in products) == matrices


ABSENT = {
    "biases and mask": {"bias": False, "masked": False},
    "residual": {"bias": True, "residual": False},
}


@pytest.mark.parametrize("what", ABSENT)
def test_absent_operands(interpreted, what):
    eager = make(lambda: Decoder(**ABSENT[what]), BF16)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    assert_as_eager(compiled, eager, 3, 7, BF16, rounds=12)
    counts = fusedbwd.report(compiled).counts()
    assert counts["attention_backward"] == 1 and counts["swiglu_backward"] == 1


class Returned(nn.Module):
    """Intermediates of what fuses, given back beside the result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))
        self.norm = RMSNorm()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, r):
        normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.linear(normalized * self.weight)
        h = y + r
        scores = F.softmax(h @ h.transpose(-2, -1), -1)
        act = F.gelu(self.linear(self.norm(h)))
        return act + h, normalized, h, scores @ r, scores


def test_intermediates_that_are_returned(interpreted):
    """In float64, so that any path lost would show."""
    eager = make(Returned, torch.float64)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    torch.manual_seed(0)
    x, r = torch.randn(2, 2, 5, HIDDEN, dtype=torch.float64)
    found = []
    for module in (compiled, eager):
        leaves = [x.clone().requires_grad_(), r.clone().requires_grad_()]
        loss = sum((out**3).sum() for out in module(*leaves))
        found.append(torch.autograd.grad(loss, [*leaves, *module.parameters()]))
    for ours, right in zip(*found, strict=True):
        assert relative_l2(ours, right) <= 1e-10
    report = fusedbwd.report(compiled)
    assert report.fired and set(report.counts()) | set(report.near_misses()) >= {
        "rms_norm_backward",
        "gelu_backward",
    }


class ByTwos(nn.Module):
    """GELUs of both kinds, as ops and written out, each behind a bias of its own."""

    def __init__(self, width=80):
        super().__init__()
        self.biases = nn.Parameter(torch.zeros(4, width))

    def forward(self, x):
        a, b, c, d = (x[i] + self.biases[i] for i in range(4))
        tanh = torch.tanh((2 / torch.pi) ** 0.5 * (d + 0.044715 * d**3))
        return torch.stack(
            [
                F.gelu(a),
                F.gelu(b, approximate="tanh"),
                0.5 * c * (1 + torch.erf(c / 2**0.5)),
                0.5 * d * (1 + tanh),
            ]
        )


def test_kinds_of_gelu_are_not_exchanged(interpreted):
    x = torch.linspace(-4, 4, 640).view(8, 80)
    x[0, :2] = torch.tensor([2.0186, -2.0186])  # where their slopes differ most, by 8.7e-4
    x = x.expand(4, 8, 80)
    module, exact = ByTwos(), ByTwos().double()
    fusedbwd.compile(module, config=VERIFY)
    found = []
    for m, wide in ((module, lambda t: t.clone()), (exact, torch.Tensor.double)):
        leaf = wide(x).requires_grad_()
        out = m(leaf)
        found.append((out, *torch.autograd.grad(out.sum(), [leaf, m.biases])))
    for ours, right in zip(*found, strict=True):
        for mine, its in zip(ours, right, strict=True):
            assert (mine - its).abs().max() <= 1e-6 * max(1, its.abs().max())
    assert 8e-4 < (found[0][1][0] - found[0][1][1]).abs().max() < 9e-4
    assert fusedbwd.report(module).counts() == {"gelu_backward": 4}


class NormedTwice(nn.Module):
    """Applies one norm twice to one tensor; eps, an attribute, is a tensor if dynamic."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(HIDDEN)), 1e-5
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def forward(self, x):
        x = x * 2
        return self.norm(x) + self.linear(self.norm(x))


def test_verified_though_eps_is_cast_twice(interpreted):
    """What is replaced goes by one cast of the eps, and the fused op reads the other."""
    eager = make(NormedTwice)
    compiled = fusedbwd.compile(copy.deepcopy(eager), dynamic=True, config=VERIFY)
    assert_as_eager(compiled, eager, 1, 1)
    assert fusedbwd.report(compiled).counts()["rms_norm_backward"] >= 1
