"""What training code does with a compiled module: two backwards, wrapping, CUDA graphs."""

import copy

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from trained import HIDDEN, TINY_COUNTS, TinyBlock, make

import fusedbwd
from fusedbwd import Config
from fusedbwd.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_two_backwards(module, x):
    """The loss's gradient twice over, from one forward."""
    loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def by_weights(module, x):
    """Gradients of one weight, as for an adaptive loss weight, and then of everything."""
    loss = module(x).square().sum()
    first = torch.autograd.grad(loss, module.fc2.weight, retain_graph=True)
    second = torch.autograd.grad(loss, module.fc2.weight, retain_graph=True)
    assert torch.equal(first[0], second[0])
    loss.backward()


def by_two_losses(module, x):
    out = module(x)
    out.square().sum().backward(retain_graph=True)
    out.exp().sum().backward()


USES = {"two backwards": by_two_backwards, "weights": by_weights, "two losses": by_two_losses}


@pytest.mark.parametrize("donated", [True, False], ids=["donated buffers", "kept buffers"])
def test_one_forward_and_several_backwards(tiny, donated):
    """Right every time, or torch's own error; never silently other numbers."""
    x = 0.1 * torch.randn(2, 5, HIDDEN)
    x.requires_grad_()
    with functorch_config.patch(donated_buffer=donated):
        compiled = fusedbwd.compile(copy.deepcopy(tiny), config=Config(verify=True))
        for name, use in USES.items():
            eager = copy.deepcopy(tiny)
            use(eager, x)
            compiled.zero_grad()
            try:
                use(compiled, x)
            except RuntimeError as error:
                assert donated and "donated_buffer" in str(error), name
                continue
            for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
                assert relative_l2(ours.grad, theirs.grad) <= 1e-5, name
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def test_the_module_stays_the_object_that_it_was(interpreted):
    """len, bool, isinstance, modes, and averaging weights by name."""
    model = nn.Sequential(make(TinyBlock), nn.ReLU())
    average = copy.deepcopy(model.state_dict())
    compiled = fusedbwd.compile(model)
    assert compiled is model and len(compiled) == 2 and bool(compiled)
    assert isinstance(compiled, nn.Sequential) and (compiled or None) is model
    assert not compiled.eval().training and compiled.train().training
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(torch.randn(2, 5, HIDDEN)).sum().backward()
    optimizer.step()
    updated = set()
    for name, parameter in compiled.named_parameters():
        before = average[name].clone()
        average[name].lerp_(parameter.detach(), 0.5)
        updated |= {name} if not torch.equal(before, average[name]) else set()
    assert updated == set(average)


@pytest.mark.gpu
def test_accumulation_over_cuda_graphs(tiny):
    """Gradients that live in a graph's memory are not overwritten by its next replay; outputs
    that are kept stay. Or else torch says that they were overwritten; never other numbers."""
    eager = copy.deepcopy(tiny).cuda()
    micro_batches = torch.randn(3, 4, 2, 64, HIDDEN, device="cuda")
    with inductor_config.patch({"triton.cudagraphs": True}):
        compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(gate=False))
        try:
            for batches in micro_batches:
                accumulate(compiled, eager, batches)
        except RuntimeError as error:
            assert "overwritten" in str(error)


def accumulate(compiled, eager, batches):
    kept, copies = [], []
    for module in (eager, compiled):
        module.zero_grad(set_to_none=True)
    for x in batches:
        eager(x).square().sum().backward()
        torch.compiler.cudagraph_mark_step_begin()
        kept.append(compiled(x))
        copies.append(kept[-1].detach().clone())
        kept[-1].square().sum().backward()
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert relative_l2(ours.grad, theirs.grad) <= 1e-5
    for out, right in zip(kept, copies, strict=True):
        assert torch.equal(out, right)
