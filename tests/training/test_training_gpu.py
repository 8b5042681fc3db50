"""Training features where the kernels are launched by generated code: on a GPU."""

import copy

import pytest
import torch
from steps import assert_same_steps, gradients_of, loss_of
from test_autograd import twice
from test_checkpointing import Checkpointed
from trained import HEAD_DIM, HIDDEN, TINY_COUNTS, TinyBlock, arguments, make, saved_bytes

import fusedbwd
from fusedbwd import Config, UnsupportedError
from fusedbwd.modules import DecoderLayer

pytestmark = pytest.mark.gpu
ALL = Config(verify=True, gate=False)  # such narrow layers would be left to Inductor


def pair(dtype=torch.bfloat16):
    eager = make(TinyBlock, dtype).cuda()
    return fusedbwd.compile(copy.deepcopy(eager), config=ALL), eager


@pytest.mark.parametrize("kind", ["reentrant", "selective"])
def test_checkpointing(kind):
    eager = make(lambda: Checkpointed(TinyBlock(), kind), torch.bfloat16).cuda()
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=ALL)
    assert_same_steps(gradients_of, compiled, eager, rounds=8)
    assert TINY_COUNTS.keys() <= fusedbwd.report(compiled).counts().keys()


def test_checkpointing_saves_as_little_as_torch_compile():
    build = lambda: DecoderLayer(HIDDEN, 6, 2, HEAD_DIM, 80, dtype=torch.float32)  # noqa: E731
    layer = make(build, torch.bfloat16)
    x, *tables = (t.cuda() for t in arguments(layer, 2, 64, torch.bfloat16))
    plain = Checkpointed(layer, "not reentrant").cuda()
    fused = fusedbwd.compile(copy.deepcopy(plain), config=ALL)
    plain.compile()
    x.requires_grad_()
    assert saved_bytes(fused, x, *tables) <= saved_bytes(plain, x, *tables)
    assert fusedbwd.report(fused).counts()["attention_backward"] == 1


def test_float16_autocast_with_a_scaler():
    compiled, eager = pair(torch.float32)
    exact = copy.deepcopy(eager).double()
    scalers = {m: torch.amp.GradScaler("cuda", init_scale=16.0) for m in (compiled, eager)}
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.01) for m in (compiled, eager, exact)}

    def step(module, x, seed):
        optimizer, scaler = optimizers[module], scalers.get(module)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
            loss = loss_of(module(x), seed)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return {name: p.grad for name, p in module.named_parameters()}

    assert_same_steps(step, compiled, eager, exact, rounds=8, compute_dtype=torch.float16)


def test_retained_graph():
    compiled, eager = pair()
    assert_same_steps(twice, compiled, eager, rounds=8)


def test_many_gradients_at_once_are_refused():
    compiled, _ = pair()
    x = torch.randn(2, 17, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = compiled(x)
    with pytest.raises(UnsupportedError, match="is_grads_batched=True"):
        torch.autograd.grad(out, x, torch.randn(3, *out.shape).to(out), is_grads_batched=True)


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS asks for a variable
    try:
        compiled, eager = pair()
        assert_same_steps(gradients_of, compiled, eager, rounds=8)
        x = torch.randn(2, 17, HIDDEN).to(next(eager.parameters()))
        runs = [gradients_of(compiled, x, 0) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grad, runs[1][name]) for name, grad in runs[0].items())
    assert TINY_COUNTS.keys() <= fusedbwd.report(compiled).counts().keys()
