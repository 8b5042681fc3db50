"""Norms: rows of any number, zeros, offsets, chained and modulated."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from checks import cast, run
from torch import nn
from trained import make

import fusedbwd
from fusedbwd import Config
from fusedbwd.kernels.layer_norm import layer_norm_backward_launch, layer_norm_backward_reference
from fusedbwd.kernels.rms_norm import rms_norm_backward_launch, rms_norm_backward_reference
from fusedbwd.numerics import relative_l2

EPS = 1e-5
VERIFY = Config(verify=True)

SIZES = list(itertools.product((1, 7, 127, 1025, 4097), (33, 48, 63, 512)))
if not torch.cuda.is_available():  # for the interpreter, the smaller ones
    SIZES = [(tokens, hidden) for tokens, hidden in SIZES if tokens * hidden < 150_000]


def check_every_row(tokens, hidden, device):
    torch.manual_seed(tokens + hidden)
    grad, x = torch.randn(2, tokens, hidden, device=device)
    weight = torch.randn(hidden, device=device)
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    eps = torch.tensor(EPS, device=device)
    rms = (grad, x, weight, x.square().mean(1, keepdim=True), eps, None, None, 0.0, torch.float32)
    layer = (grad, x, mean, weight, var, eps, None, torch.float32, True)
    for launch, reference, args in (
        (rms_norm_backward_launch, rms_norm_backward_reference, rms),
        (layer_norm_backward_launch, layer_norm_backward_reference, layer),
    ):
        wide = cast(args, torch.float64)
        exact = reference(*(torch.float64 if a is torch.float32 else a for a in wide))
        for index, (a, e) in enumerate(zip(run(launch, *args), exact, strict=True)):
            assert a.shape == e.shape
            assert relative_l2(a, e) <= 5e-6, (launch.__name__, index)


@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_no_row_is_lost_from_the_sums(tokens, hidden, kernels, device):
    """Rows that are no multiple of a block, over memory that was full of NaN."""
    check_every_row(tokens, hidden, device)


@pytest.mark.gpu
def test_no_row_is_lost_from_norms_of_heads(kernels, device):
    check_every_row(65_537, 160, device)


def check_a_row_of_zeros(device):
    """dw is 0 and dx is -1 / sqrt(eps), whatever memory holds, ten times."""
    config = Config(verify=True, gate=False)
    norm = fusedbwd.compile(nn.RMSNorm(4, EPS, device=device), config=config)
    for _ in range(10):
        x = torch.zeros(4, device=device, requires_grad=True)
        norm.zero_grad()
        (-norm(x).sum()).backward()
        assert norm.weight.grad.tolist() == [0, 0, 0, 0]
        torch.testing.assert_close(x.grad, torch.full_like(x, -316.2278))
    assert fusedbwd.report(norm).counts() == {"rms_norm_backward": 1}


def test_a_row_of_zeros(interpreted):
    check_a_row_of_zeros("cpu")


@pytest.mark.gpu
def test_a_row_of_zeros_on_a_gpu(fresh_dynamo):
    check_a_row_of_zeros("cuda")


class PlainAndOffset(nn.Module):
    """Two norms of one input; the second multiplies by 1 + w, taken in float32."""

    def __init__(self, width=256):
        super().__init__()
        self.plain = nn.Parameter(torch.empty(width))
        self.offset = nn.Parameter(torch.empty(width, dtype=torch.bfloat16))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        offset = 1.0 + self.offset.to(wide.dtype)
        return torch.cat([normalized * self.plain, normalized * offset], -1).to(x.dtype)


@pytest.mark.parametrize("ones", [False, True], ids=["random weights", "ones"])
def test_plain_weights_and_offset_weights_in_one_module(interpreted, ones):
    torch.manual_seed(0)
    eager = PlainAndOffset()
    with torch.no_grad():
        for weight in eager.parameters():
            weight.copy_(torch.ones(256) if ones else torch.randn(256))
        if not ones:
            eager.plain[:2] = 0.0
            eager.offset[:2] = torch.tensor([0.00390625, 15.8125])
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=VERIFY)
    x = torch.randn(64, 256)
    grad = torch.randn(64, 512)
    exact, found = copy.deepcopy(eager).double(), []
    for module, wide in ((compiled, lambda t: t), (exact, torch.Tensor.double)):
        leaf = wide(x).requires_grad_()
        out = module(leaf)
        found.append([out, *torch.autograd.grad(out, [leaf, *module.parameters()], wide(grad))])
    assert fusedbwd.report(compiled).fired or fusedbwd.report(compiled).missed
    for ours, right, bound in zip(*found, (1e-6, 1e-6, 1e-6, 2**-8), strict=True):
        assert relative_l2(ours, right) <= bound
    if not ones:  # bfloat16 would have added to 1 and 16.75
        slope = found[0][0][:, 256:258] / found[1][0][:, 256:258].float()
        torch.testing.assert_close(slope, torch.ones(64, 2), rtol=1e-5, atol=0)


class Modulated(nn.Module):
    """Two LayerNorms one after the other, scaled and shifted by chunks of one parameter."""

    def __init__(self, width):
        super().__init__()
        self.modulation = nn.Parameter(0.3 * torch.randn(4 * width))

    def forward(self, x):
        s1, b1, s2, b2 = self.modulation.chunk(4)
        for scale, shift in ((s1, b1), (s2, b2)):
            x = x + F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return x


def check_modulated(module, x, grad, compiled):
    exact = copy.deepcopy(module).double()
    found = []
    for m, wide in ((compiled, lambda t: t), (exact, torch.Tensor.double)):
        leaf = wide(x).requires_grad_()
        found.append(torch.autograd.grad(m(leaf), [leaf, *m.parameters()], wide(grad)))
    (dx, dm), (right_dx, right_dm) = found
    assert relative_l2(dx, right_dx) <= 1e-4
    for ours, right in zip(dm.chunk(4), right_dm.chunk(4), strict=True):
        assert relative_l2(ours, right) <= 1e-4


def test_chained_modulated_norms(interpreted):
    torch.manual_seed(0)
    module = Modulated(48)
    compiled = fusedbwd.compile(copy.deepcopy(module), config=VERIFY)
    check_modulated(module, *torch.randn(2, 1, 129, 48), compiled)
    assert fusedbwd.report(compiled).counts() == {"layer_norm_backward": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_chained_modulated_norms_at_size(fresh_dynamo, tokens, gate):
    """Some releases of Inductor leave a part of the shared parameter's gradient unwritten."""
    torch.manual_seed(0)
    module = Modulated(1024).cuda()
    compiled = fusedbwd.compile(copy.deepcopy(module), config=Config(gate=gate))
    check_modulated(module, *torch.randn(2, 1, tokens, 1024, device="cuda"), compiled)


OPTIONS = {
    "LayerNorm, no bias": lambda: nn.LayerNorm(40, bias=False),
    "LayerNorm, no weights": lambda: nn.LayerNorm(40, elementwise_affine=False),
    "RMSNorm, no weight": lambda: nn.RMSNorm(40, elementwise_affine=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_absent_operands_over_poisoned_memory(fresh_dynamo, name, bias):
    """Free memory full of NaN: nothing of it gets into gradients, and none that is absent comes."""
    torch.manual_seed(0)
    layers = OPTIONS[name](), nn.Linear(40, 80, bias), nn.GELU(), nn.Linear(80, 40, bias)
    eager = make(lambda: nn.Sequential(*layers)).cuda()
    exact = copy.deepcopy(eager).double()
    config = Config(verify=True, gate=False)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=config)
    for _ in range(5):
        poison = torch.full((1 << 24,), torch.nan, device="cuda")
        del poison
        x, grad = torch.randn(2, 3, 7, 40, device="cuda")
        found = []
        for module, wide in ((compiled, lambda t: t), (exact, torch.Tensor.double)):
            leaf = wide(x).requires_grad_()
            found.append(
                torch.autograd.grad(module(leaf), [leaf, *module.parameters()], wide(grad))
            )
        for ours, right in zip(*found, strict=True):
            assert relative_l2(ours, right) <= 1e-5
