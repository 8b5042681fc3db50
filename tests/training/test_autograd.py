"""Hooks, repeated and higher-order backwards, determinism: right as in eager, or a clear error."""

import copy

import pytest
import torch
from steps import assert_same_steps, gradients_of, loss_of
from torch import nn
from torch._functorch import config as functorch_config
from trained import HIDDEN, TINY_COUNTS, TinyBlock, make

import fusedbwd
from fusedbwd import Config, FusedBwdWarning, UnsupportedError

# --- hooks


def forward_hook(module, called):
    module.fc1.register_forward_hook(lambda m, args, out: called.append(m) or out * 3)


def forward_pre_hook_of_the_root(module, called):
    module.register_forward_pre_hook(lambda m, args: called.append(m) or (args[0] * 3,))


def full_backward_hook(module, called):
    module.fc1.register_full_backward_hook(
        lambda m, g_in, g_out: called.append(m) or (g_in[0] * 3,)
    )


def full_backward_pre_hook_of_the_root(module, called):
    module.register_full_backward_pre_hook(lambda m, g_out: called.append(m) or (g_out[0] * 3,))


def tensor_hook(module, called):
    module.fc1.weight.register_hook(lambda grad: called.append(grad) or grad * 3)


def post_accumulate_hook(module, called):
    module.fc1.weight.register_post_accumulate_grad_hook(
        lambda p: (called.append(p), p.grad.mul_(3), None)[-1]
    )


HOOKS = (
    forward_hook,
    forward_pre_hook_of_the_root,
    full_backward_hook,
    full_backward_pre_hook_of_the_root,
    tensor_hook,
    post_accumulate_hook,
)


@pytest.mark.filterwarnings("ignore::fusedbwd.FusedBwdWarning")  # backward hooks break graphs
@pytest.mark.parametrize(
    ("hook", "when"),
    [(hook, "after the first call") for hook in HOOKS]
    + [(hook, "before compiling") for hook in (forward_hook, full_backward_hook)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_hooks(hook, when, graphs):
    """Called as often as in eager, what they change is changed, and removed they are gone."""
    eager = make(TinyBlock)
    compiled, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    if when == "after the first call":
        fusedbwd.compile(compiled)
        assert_same_steps(gradients_of, compiled, eager, exact, rounds=1)
    calls = []
    for module in (compiled, eager, exact):
        calls.append([])
        hook(module, calls[-1])
    if when == "before compiling":
        fusedbwd.compile(compiled)
    assert_same_steps(gradients_of, compiled, eager, exact, rounds=2)
    assert [len(called) for called in calls] == [2, 2, 2]


def test_removed_hook(graphs):
    eager = make(TinyBlock)
    compiled, called = copy.deepcopy(eager), []
    handle = compiled.fc1.register_forward_hook(lambda m, args, out: called.append(m) or out * 3)
    fusedbwd.compile(compiled)
    compiled(torch.randn(2, 17, HIDDEN)).sum().backward()
    handle.remove()
    assert_same_steps(gradients_of, compiled, eager)
    assert len(called) == 1


class Watching(TinyBlock):
    """Notes the gradient of an intermediate that a fusion replaces, in the forward itself."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        wide = self.fc1(self.norm(x))
        wide.register_hook(self.note)
        return x + self.fc2(nn.functional.gelu(wide))

    def note(self, grad):
        self.seen.append(grad)
        return grad * 2


@pytest.mark.filterwarnings("ignore::fusedbwd.FusedBwdWarning")
def test_hook_on_an_intermediate(graphs):
    eager = make(Watching)
    compiled = fusedbwd.compile(copy.deepcopy(eager))

    def step(module, x, seed):
        gradients = gradients_of(module, x, seed)
        return {"seen": module.seen[-1], **gradients}

    assert_same_steps(step, compiled, eager)
    assert len(compiled.seen) == len(eager.seen) == 4


# --- backward again, of itself, and over many at once


def twice(module, x, seed):
    """Two backwards of one forward, the graph retained in between: gradients add up."""
    module.zero_grad(set_to_none=True)
    loss = loss_of(module(x.detach().requires_grad_()), seed)
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters()}


def test_retained_graph():
    """Right where the first backward of a compiled graph already asks for it."""
    eager = make(TinyBlock)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_same_steps(twice, compiled, eager, rounds=2)


def test_graph_retained_later():
    """After an ordinary backward torch's own error names the setting, with which it is right."""
    eager, x = make(TinyBlock), torch.randn(2, 17, HIDDEN)
    compiled = fusedbwd.compile(copy.deepcopy(eager))
    gradients_of(compiled, x, 0)
    with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
        twice(compiled, x, 0)
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        compiled = fusedbwd.compile(copy.deepcopy(eager))
        assert_same_steps(gradients_of, compiled, eager, rounds=1)
        assert_same_steps(twice, compiled, eager, rounds=2)


def test_two_losses_of_one_forward():
    eager = make(TinyBlock)
    compiled = fusedbwd.compile(copy.deepcopy(eager))

    def step(module, x, seed):
        module.zero_grad(set_to_none=True)
        out = module(x)
        (first,) = torch.autograd.grad(loss_of(out, seed), module.fc1.weight, retain_graph=True)
        loss_of(out, seed + 1).backward()
        return {"first": first, **{name: p.grad for name, p in module.named_parameters()}}

    assert_same_steps(step, compiled, eager, rounds=2)


def test_double_backward_is_refused(graphs):
    compiled = fusedbwd.compile(make(TinyBlock))
    x = torch.randn(2, 17, HIDDEN, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


def test_vmap_over_the_backward_is_refused(graphs):
    compiled = fusedbwd.compile(make(TinyBlock))
    x = torch.randn(2, 17, HIDDEN, requires_grad=True)
    out = compiled(x)
    many = torch.randn(3, *out.shape)
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True .* not supported"):
        torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="compiled backward function within vmap"):
        torch.func.vmap(lambda g: torch.autograd.grad(out, x, g))(many)


def test_function_transforms_run_as_eager():
    """Right, not fused, and said so."""
    eager, x = make(TinyBlock), torch.randn(2, 17, HIDDEN)
    compiled = fusedbwd.compile(copy.deepcopy(eager))

    def loss(module):
        return lambda parameters: torch.func.functional_call(module, parameters, (x,)).sum()

    with pytest.warns(FusedBwdWarning, match=r"TinyBlock: called under a transform") as said:
        ours = torch.func.grad(loss(compiled))(dict(compiled.named_parameters()))
    theirs = torch.func.grad(loss(eager))(dict(eager.named_parameters()))
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name])
    assert len([w for w in said if w.category is FusedBwdWarning]) == 1
    assert "transform of torch.func" in fusedbwd.report(compiled).notes[1]


# --- determinism


def test_deterministic_algorithms():
    """Nothing is refused, and a second run gives the same bits."""
    eager, x = make(TinyBlock), torch.randn(2, 17, HIDDEN)
    torch.use_deterministic_algorithms(True)
    try:
        compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
        assert_same_steps(gradients_of, compiled, eager)
        runs = [gradients_of(compiled, x, 0) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grad, runs[1][name]) for name, grad in runs[0].items())
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS
