"""What a training loop does around the backward: scaling, accumulating, clipping, stepping."""

import copy
import io

import torch
from steps import assert_same_steps, gradients_of, loss_of
from torch import nn
from torch._inductor import config as inductor_config
from trained import HIDDEN, TINY_COUNTS, TinyBlock, make

import fusedbwd
from fusedbwd import Config


def pair():
    """A block, eager and compiled."""
    eager = make(TinyBlock)
    return fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True)), eager


def parameters_of(module):
    return {name: p.detach() for name, p in module.named_parameters()}


def test_accumulating_clipping_and_stepping():
    """Three steps of two micro-batches each, clipped to a norm that bites."""
    compiled, eager = pair()
    exact = copy.deepcopy(eager).double()
    optimizers = {m: torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (compiled, eager, exact)}

    def step(module, first, second, seed):
        optimizers[module].zero_grad()
        for x in (first, second):
            (loss_of(module(x), seed) / 2).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        assert norm > 1
        optimizers[module].step()
        return {"norm": norm, **parameters_of(module)}

    draw = lambda seed: torch.randn(2, 2, 17, HIDDEN).unbind()  # noqa: E731
    assert_same_steps(step, compiled, eager, exact, rounds=3, inputs=draw)
    # The first norm's input needs no gradient.
    assert fusedbwd.report(compiled).counts() == {"gelu_backward": 1}


def test_optimizer_in_the_backward():
    """A step per parameter as soon as its gradient is there, which is then dropped."""
    compiled, eager = pair()
    exact = copy.deepcopy(eager).double()
    for module in (compiled, eager, exact):
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.05)

            def step_at_once(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step_at_once)

    def step(module, x, seed):
        loss_of(module(x), seed).backward()
        assert all(p.grad is None for p in module.parameters())
        return parameters_of(module)

    assert_same_steps(step, compiled, eager, exact, rounds=3)


AUTOCAST = torch.autocast("cpu", torch.float16)


def test_float16_autocast_with_a_scaler():
    """Unscaled gradients as eager's under autocast; and a step whose gradients overflow is left
    out, and the scale halved."""
    compiled, eager = pair()
    exact = copy.deepcopy(eager).double()
    scalers = {m: torch.amp.GradScaler("cpu", init_scale=16.0) for m in (compiled, eager)}
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.01) for m in (compiled, eager, exact)}

    def step(module, x, seed):
        optimizer = optimizers[module]
        optimizer.zero_grad()
        if module is exact:
            loss_of(module(x), seed).backward()
            optimizer.step()
        else:
            with AUTOCAST:
                loss = loss_of(module(x), seed)
            scalers[module].scale(loss).backward()
            scalers[module].unscale_(optimizer)
            scalers[module].step(optimizer)
            scalers[module].update()
        return {name: p.grad for name, p in module.named_parameters()}

    assert_same_steps(step, compiled, eager, exact, rounds=8, compute_dtype=torch.float16)
    for module in (compiled, eager):
        scaler, optimizer = scalers[module], optimizers[module]
        before = copy.deepcopy(parameters_of(module))
        optimizer.zero_grad()
        with AUTOCAST:
            loss = loss_of(module(torch.full((2, 17, HIDDEN), torch.inf)), 0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert "1 graph compiled" in fusedbwd.report(compiled).notes


class Dropping(nn.Module):
    """Dropout between GELU and its matmul, and on the block's output."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        return x + self.drop(self.fc2(self.drop(nn.functional.gelu(self.fc1(self.norm(x))))))


def test_dropout_and_switching_to_evaluation():
    """With eager's random numbers, gradients are eager's; back in training nothing is compiled
    again, and in evaluation nothing is dropped."""
    eager = make(Dropping)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    exact = copy.deepcopy(eager).double()

    def step(module, x, seed):
        torch.manual_seed(seed)
        return gradients_of(module, x, seed)

    with inductor_config.patch(fallback_random=True):
        for train in (True, False, True):
            for module in (compiled, eager, exact):
                module.train(train)
            assert_same_steps(step, compiled, eager, exact)
    assert "2 graphs compiled" in fusedbwd.report(compiled).notes
    counts = fusedbwd.report(compiled).counts()
    assert counts["layer_norm_backward"] == 2, fusedbwd.report(compiled)


def test_evaluation_between_steps_leaves_the_training_graph():
    compiled, eager = pair()
    assert_same_steps(gradients_of, compiled, eager)
    x = torch.randn(2, 17, HIDDEN)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            out = compiled(x)
            torch.testing.assert_close(out, eager(x))
            assert not out.requires_grad
    assert_same_steps(gradients_of, compiled, eager)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def test_resuming_from_a_checkpoint():
    """Saved after two of four steps and loaded into another compiled module: the same to the bit
    as without the interruption; and the file loads into an eager module."""
    batches = torch.randn(4, 2, 17, HIDDEN, generator=torch.Generator().manual_seed(5))

    def build():
        module = fusedbwd.compile(make(TinyBlock))
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def train(module, optimizer, batches):
        for x in batches:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

    straight, optimizer = build()
    train(straight, optimizer, batches)

    module, optimizer = build()
    train(module, optimizer, batches[:2])
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    eager = TinyBlock()
    assert list(saved["model"]) == list(eager.state_dict())
    eager.load_state_dict(saved["model"])
    resumed, optimizer = build()
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, batches[2:])
    for ours, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_a_copy_is_compiled_in_turn():
    """deepcopy and pickle give modules that are not compiled; compiled in turn they are right."""
    compiled, eager = pair()
    assert_same_steps(gradients_of, compiled, eager)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    for other in (copy.deepcopy(compiled), torch.load(file, weights_only=False)):
        assert other._compiled_call_impl is None
        assert_same_steps(gradients_of, fusedbwd.compile(other), eager)
        assert fusedbwd.report(other).counts() == TINY_COUNTS
