"""Kernels run on the device of their tensors and on its current stream."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_ops import arguments, over_ops
from torch import nn
from torch.utils import _pytree as pytree

import fusedbwd
from fusedbwd import Config

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SLEEP = 200_000_000  # cycles, about 0.1 s: what does not wait reads too early


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def compiled(module):
    return fusedbwd.compile(module, config=Config(gate=False))  # too narrow to pay


def gradients(module, x):
    module.zero_grad()
    x = x.detach().requires_grad_()
    module(x).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.cpu(), e.cpu())


@over_ops
def test_op_on_another_stream(op):
    args = arguments(op, 127, "cuda")
    expected = flat(op(*args))
    late = pytree.tree_map_only(torch.Tensor, torch.zeros_like, args)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP)
        for mine, given in zip(pytree.tree_leaves(late), pytree.tree_leaves(args), strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given)
        actual = flat(op(*late))
    torch.cuda.synchronize()
    assert_same(actual, expected)


def test_training_on_another_stream(fresh_dynamo):
    block, x = compiled(Block().cuda()), torch.randn(4, 33, 64, device="cuda")
    expected = gradients(block, x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP)
        late.copy_(x)
        actual = gradients(block, late)
    torch.cuda.synchronize()
    assert_same(actual, expected)


@two_gpus
@over_ops
def test_op_on_another_device(op):
    args = arguments(op, 127, "cuda:0")
    moved = pytree.tree_map_only(torch.Tensor, lambda t: t.to("cuda:1"), args)
    with torch.cuda.device(0):
        actual = flat(op(*moved))
    assert all(t.device.index == 1 for t in actual)
    assert_same(actual, flat(op(*args)))


@two_gpus
def test_training_on_another_device(fresh_dynamo):
    """There from the start, moved there after compilation, and half of a model there."""
    block, x = Block(), torch.randn(4, 33, 64)
    here, there = (compiled(copy.deepcopy(block).to(f"cuda:{i}")) for i in (0, 1))
    expected = gradients(here, x.to("cuda:0"))
    assert_same(gradients(there, x.to("cuda:1")), expected)
    assert_same(gradients(here.to("cuda:1"), x.to("cuda:1")), expected)
    for module in (here, there):
        assert set(fusedbwd.report(module).counts()) == {"gelu_backward", "layer_norm_backward"}


class Split(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(b.to(f"cuda:{i}") for i, b in enumerate(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.to(block.norm.weight.device))
        return x


@two_gpus
def test_one_graph_on_two_devices(fresh_dynamo):
    blocks, x = [Block(), Block()], torch.randn(4, 33, 64, device="cuda:0")
    one = compiled(nn.Sequential(*copy.deepcopy(blocks)).to("cuda:0"))
    two = compiled(Split(blocks))
    for actual, expected in zip(gradients(two, x), gradients(one, x), strict=True):
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)
