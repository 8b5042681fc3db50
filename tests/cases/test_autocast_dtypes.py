"""dtypes of outputs and gradients are eager's, under autocast and in mixed modules."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from decoder import Decoder, RMSNorm
from torch import nn
from trained import HIDDEN, gradients, make

import fusedbwd
from fusedbwd import Config
from fusedbwd.modules import rope_tables
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.precision import HIGH, HIGHEST, matmul_precision

BF16 = torch.bfloat16


class Functional(nn.Module):
    """F.rms_norm with a weight of this module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return F.rms_norm(x, (HIDDEN,), self.weight, 1e-5)


NORMS = {
    "F.rms_norm": Functional,
    "nn.RMSNorm": lambda: nn.RMSNorm(HIDDEN, 1e-5),
    "nn.LayerNorm": lambda: nn.LayerNorm(HIDDEN),
    "by hand": RMSNorm,
}
AMONG_LINEARS = {
    name: lambda norm=norm: nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), norm(), nn.Linear(HIDDEN, HIDDEN)
    )
    for name, norm in NORMS.items()
}


def check(eager, *, device="cpu", autocast=True, dtype=torch.float32, rounds=8):
    """Gradients have eager's dtypes, and over all rounds no more than its error allows."""
    eager = eager.to(device)
    config = Config(verify=True, gate=False)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=config)
    exact = copy.deepcopy(eager).double()
    context = torch.autocast(device, BF16) if autocast else contextlib.nullcontext()
    torch.manual_seed(0)
    found = {}
    for seed in range(rounds):
        inputs = [torch.randn(2, 17, HIDDEN, device=device).to(dtype)]
        if isinstance(eager, Decoder):
            inputs += rope_tables(2, 17, 8, dtype=torch.float32, device=device)
        with context:
            x = inputs[0].requires_grad_()
            assert compiled(x, *inputs[1:]).dtype == eager(x, *inputs[1:]).dtype
        ours, theirs = (_gradients(m, inputs, seed, context) for m in (compiled, eager))
        right = _gradients(exact, [t.double() for t in inputs], seed, contextlib.nullcontext())
        for name, grad in ours.items():
            assert grad.dtype == theirs[name].dtype, name
            found.setdefault(name, []).append((grad, theirs[name], right[name]))
    for name, drawn in found.items():
        grad, own, expected = (torch.stack(t) for t in zip(*drawn, strict=True))
        error = relative_l2(grad, expected)
        allowed = budget(relative_l2(own, expected), grad.dtype, BF16)
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"
    return fusedbwd.report(compiled)


def _gradients(module, inputs, seed, context):
    """As trained.gradients, with the incoming gradient drawn on the CPU."""
    if inputs[0].device.type == "cpu":
        return gradients(module, inputs, seed, forward=context)
    module.zero_grad(set_to_none=True)
    x = inputs[0].detach().requires_grad_()
    with context:
        out = module(x, *inputs[1:])
    drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(drawn.to(out))
    return {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_among_linear_layers(interpreted, name):
    report = check(make(AMONG_LINEARS[name]))
    assert sum(report.counts().get(f, 0) for f in ("rms_norm_backward", "layer_norm_backward")) == 1


def test_a_decoder_layer(interpreted):
    check(make(Decoder))


@pytest.mark.parametrize("name", NORMS)
def test_a_float32_weight_beside_16_bit_inputs(interpreted, name):
    """Without autocast; eager decides what comes out."""
    check(make(NORMS[name]), autocast=False, dtype=BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NORMS, "decoder"])
def test_on_a_gpu(fresh_dynamo, name):
    """Some releases of torch give a norm under autocast float32 results there."""
    check(make({**AMONG_LINEARS, "decoder": Decoder}[name]), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [HIGHEST, HIGH])
def test_float32_matmuls_are_what_the_setting_says(fresh_dynamo, precision):
    """No fused kernel lowers the precision of matmuls by itself."""
    torch.manual_seed(0)
    layers = nn.Linear(512, 2048), nn.GELU("tanh"), nn.Linear(2048, 512)
    eager = nn.Sequential(*layers).cuda()
    exact = copy.deepcopy(eager).double()
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True, gate=False))
    x, grad = torch.randn(2, 4096, 512, device="cuda")
    found = []
    with matmul_precision(precision):
        for module, wide in ((compiled, False), (eager, False), (exact, True)):
            leaf = (x.double() if wide else x.clone()).requires_grad_()
            out = module(leaf)
            found.append(torch.autograd.grad(out, [leaf, *module.parameters()], grad.to(out)))
    assert fusedbwd.report(compiled).counts()["gelu_backward"] == 1
    for ours, theirs, right in zip(*found, strict=True):
        error, own = relative_l2(ours, right), relative_l2(theirs, right)
        assert error <= (max(2 * own, 1e-6) if precision == HIGHEST else 5e-3)
