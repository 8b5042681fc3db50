"""Activation checkpointing: gradients as eager's, and no more saved than torch.compile saves."""

import copy
from functools import partial

import pytest
import torch
from steps import assert_same_steps, gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from trained import HEAD_DIM, HIDDEN, TINY_COUNTS, TinyBlock, arguments, make, saved_bytes

import fusedbwd
from fusedbwd import Config
from fusedbwd.modules import DecoderLayer

_MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
KINDS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _MATMULS),
    },
}


class Checkpointed(nn.Module):
    def __init__(self, block, kind):
        super().__init__()
        self.block, self.options = block, KINDS[kind]

    def forward(self, *args):
        return checkpoint(self.block, *args, **self.options)


class Dropping(TinyBlock):
    """A block that draws random numbers, the same in its recomputation."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_inside(kind):
    eager = make(lambda: Checkpointed(TinyBlock(), kind))
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_same_steps(gradients_of, compiled, eager)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_outside(kind):
    """A compiled block called by checkpoint, as Hugging Face's models call their layers."""
    eager = make(lambda: Checkpointed(TinyBlock(), kind))
    compiled = copy.deepcopy(eager)
    fusedbwd.compile(compiled.block)
    assert_same_steps(gradients_of, compiled, eager)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_recomputed_dropout_is_the_same(where):
    """In the backward the mask of the forward: where an output is zero, so is its gradient."""
    module = Checkpointed(make(Dropping), "not reentrant")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "fc2" in name:
                parameter.zero_()  # so that the output is dropout(x), to the bit
    fusedbwd.compile(module if where == "inside" else module.block)
    for _ in range(2):
        x = torch.randn(2, 17, HIDDEN, requires_grad=True)
        out = module(x)
        kept = out != 0
        assert 0.6 < kept.double().mean() < 0.9
        out.sum().backward()
        torch.testing.assert_close(x.grad, kept / 0.75)


@pytest.mark.parametrize("kind", ["reentrant", "selective"])
def test_saves_as_little_as_torch_compile(kind, graphs):
    """Fusing, and expanding what is not fused, keeps what is marked for recomputation so."""
    layer = make(
        lambda: DecoderLayer(HIDDEN, 6, 2, HEAD_DIM, 80, dtype=torch.float32), torch.bfloat16
    )
    x, *tables = arguments(layer, 2, 64, torch.bfloat16)
    module, saved = Checkpointed(layer, kind), {}
    for arm in ("torch.compile", "fusedbwd", "without"):
        arm_module = copy.deepcopy(layer if arm == "without" else module)
        if arm == "torch.compile":  # Inductor's partitioner, and no code generation
            arm_module.compile(backend="aot_eager_decomp_partition")
        else:
            fusedbwd.compile(arm_module)
        saved[arm] = saved_bytes(arm_module, x.requires_grad_(), *tables)
    assert saved["fusedbwd"] <= saved["torch.compile"] < saved["without"]
