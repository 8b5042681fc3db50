"""What callers hand over and keep: gradients in any layout, shared tensors, huge ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from decoder import Decoder
from torch import nn
from trained import HIDDEN, arguments, assert_as_eager, make

import fusedbwd
from fusedbwd import Config, export_backward
from fusedbwd import schema as s
from fusedbwd.modules import GeluFFN

VERIFY = Config(verify=True)


class Sandwich(nn.Module):
    """x + norm2(W silu(norm1(x)))"""

    def __init__(self, width=40):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.norm2(self.linear(F.silu(self.norm1(x))))


def test_the_callers_gradient_is_not_written_to(fresh_dynamo):
    """The residual branch reads it too; Inductor may reuse buffers, so it is compiled for real."""
    eager = make(Sandwich)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    exact = copy.deepcopy(eager).double()
    torch.manual_seed(0)
    x, grad = torch.randn(2, 2, 5, 40)
    before, found = grad.clone(), []
    for module, cast in ((compiled, lambda t: t), (exact, torch.Tensor.double)):
        leaf = cast(x).requires_grad_()
        out = module(leaf)
        found.append(torch.autograd.grad(out, [leaf, *module.parameters()], cast(grad)))
    assert torch.equal(grad, before)
    assert fusedbwd.report(compiled).counts() == {"rms_norm_backward": 2}
    for ours, right in zip(*found, strict=True):
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


class Gated(nn.Module):
    def forward(self, g, u):
        return F.gelu(g) * u


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_that_leave_the_graph_lie_as_ever(interpreted, dynamic):
    """For a hook, say, that views them as one row."""
    compiled = fusedbwd.compile(Gated(), config=VERIFY)
    torch.manual_seed(0)
    values, found = torch.randn(2, 2, 5, 40), []
    for module in (compiled, Gated()):
        leaves = [value.clone().requires_grad_() for value in values]
        for leaf in leaves if dynamic else ():
            torch._dynamo.mark_dynamic(leaf, 0)
        out = module(*leaves)
        found.append([t.view(-1) for t in torch.autograd.grad(out.square().sum(), leaves)])
    assert fusedbwd.report(compiled).counts() == {"geglu_backward": 1}
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("build", [Decoder, lambda: GeluFFN(HIDDEN, 80)], ids=["decoder", "ffn"])
def test_the_gradient_of_a_sum_is_one_number_expanded(interpreted, build):
    eager = make(build)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    inputs = arguments(eager, 2, 5, torch.float32)
    ones = torch.ones(2, 5, HIDDEN)
    layouts = {
        "sum": lambda out: out.sum().backward(),
        "expanded": lambda out: out.backward(torch.tensor(1.0).expand(2, 5, HIDDEN)),
        "dense": lambda out: out.backward(ones),
    }
    found = []
    for backward in layouts.values():
        compiled.zero_grad(set_to_none=True)
        backward(compiled(*inputs))
        found.append([p.grad for p in compiled.parameters()])
    for by_sum, expanded, dense in zip(*found, strict=True):
        assert torch.equal(by_sum, dense) and torch.equal(expanded, dense)
    assert fusedbwd.report(compiled).fired


class Shared(nn.Module):
    """Tensors that enter fused ops twice."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.norm = nn.RMSNorm(HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        if what == "gate and up":
            self.second.weight = self.first.weight

    def forward(self, x):
        match self.what:
            case "gate and up":
                y = self.norm(x)
                return F.silu(self.first(y)) * self.second(y)
            case "gate is up":
                y = self.first(self.norm(x))
                return F.silu(y) * y
            case "norm":
                return self.norm(x + self.first(self.norm(x)))
            case "residual":
                y = self.norm(x)
                return self.first(y) + x + x
            case "k and v":
                q, kv = (z.unflatten(-1, (6, 8)).transpose(1, 2) for z in (self.first(x), x))
                p = F.softmax(q @ kv.transpose(-2, -1), -1)
                return (p @ kv).transpose(1, 2).flatten(2)


SHARED = ("gate and up", "gate is up", "norm", "residual", "k and v")


@pytest.mark.parametrize("what", SHARED)
def test_what_enters_twice_gets_both_gradients(interpreted, what):
    eager = make(lambda: Shared(what))
    used = {n for n, _ in eager.named_parameters()}
    dtype = torch.bfloat16 if what == "k and v" else torch.float32
    eager = eager.to(dtype)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    assert_as_eager(compiled, eager, 2, 5, dtype, rounds=16)
    assert ("second.weight" in used) == (what != "gate and up")
    report = fusedbwd.report(compiled)
    assert report.fired or report.missed, report


@pytest.mark.gpu
def test_offsets_past_2_to_the_31_in_an_export():
    """A SwiGLU of 2^31 elements: rows at both ends are as when computed alone."""

    class SwiGLU(nn.Module):
        def forward(self, act, linear):
            return F.silu(act) * linear

    tokens, width = 149_797, 14336
    shape = ("tokens", width)
    inputs = [s.argument(name, shape, torch.bfloat16) for name in ("act", "linear")]
    schema = s.Schema(
        "swiglu_backward",
        (s.grad_output("grad", shape, torch.bfloat16), *inputs),
        tuple(s.Gradient(f"d_{i.name}", i.name, shape, torch.bfloat16) for i in inputs),
    )
    bwd = export_backward(SwiGLU(), schema, device="cuda", config=Config(gate=False))
    assert bwd.report.counts() == {"swiglu_backward": 1}
    edges = torch.cat([torch.arange(8), torch.arange(tokens - 8, tokens)]).cuda()
    torch.manual_seed(0)
    given = {}
    for i in schema.inputs:
        given[i.name] = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
        given[i.name][edges] = torch.randn(16, width, dtype=torch.bfloat16, device="cuda")
    outputs = bwd(**given)
    alone = bwd(**{name: t[edges] for name, t in given.items()})
    for whole, part in zip(outputs, alone, strict=True):
        assert torch.equal(whole[edges], part)
        assert not whole[8:-8].any()
