"""One training step, in three arms: compiled, eager, and eager in float64."""

import copy

import torch
from trained import HIDDEN

from fusedbwd.numerics import budget, relative_l2, within


def loss_of(out, seed):
    """A loss whose gradient is random, and the same in each arm."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return (out * weights.to(out)).sum()


def gradients_of(module, x, seed):
    """Gradients of the parameters and of ``x``, by name: the plainest step."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    loss_of(module(x), seed).backward()
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same_steps(
    step, compiled, eager, exact=None, *, rounds=4, inputs=None, compute_dtype=None
):
    """What ``step(module, *inputs, seed)`` returns, by name, is as right as in eager: over several
    rounds together, because small gradients are matters of luck. ``exact``: the float64 arm."""
    exact = exact or copy.deepcopy(eager).double()
    modules = (compiled, eager, exact)
    torch.manual_seed(11)
    found = {}
    for seed in range(rounds):
        given = inputs(seed) if inputs else (torch.randn(2, 17, HIDDEN),)
        for arm, module in enumerate(modules):
            of_arm = [_like(t, module) for t in given]
            for name, result in step(module, *of_arm, seed).items():
                if result is not None:
                    arms = found.setdefault(name, [[], [], []])
                    arms[arm].append(result.detach().clone())
    assert found
    for name, (ours, theirs, right) in found.items():
        assert len(ours) == len(theirs) == len(right) == rounds, name
        assert ours[0].dtype == theirs[0].dtype, name
        dtype = ours[0].dtype
        ours, theirs, right = (torch.stack(arm) for arm in (ours, theirs, right))
        error, allowed = (
            relative_l2(ours, right),
            budget(relative_l2(theirs, right), dtype, compute_dtype),
        )
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"


def _like(t, module):
    """On the module's device; floating inputs in the dtype of its parameters."""
    parameter = next(module.parameters())
    return t.to(parameter) if t.is_floating_point() else t.to(parameter.device)
