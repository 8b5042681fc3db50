"""Layers compiled one by one: as many as a model has, with and without hooks of their own."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from trained import HIDDEN, TINY_COUNTS, TinyBlock, assert_as_eager, make

import fusedbwd
from fusedbwd import Config
from fusedbwd.training import compile_with

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LAYERS = torch._dynamo.config.recompile_limit + 2


def interpreted(gm, inputs, **options):
    return make_boxed_func(gm.forward)


class Encoder(nn.Sequential):
    """Its forward is torch.nn's, where Dynamo does not begin."""

    def __init__(self):
        super().__init__(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN)
        )
        self[0].weight.data.uniform_(0.5, 1.5)


@pytest.mark.parametrize("layer", [TinyBlock, Encoder])
def test_more_layers_than_recompilations(layer):
    """None is left to eager; layers of one class share what is compiled."""
    eager = make(lambda: nn.Sequential(*(layer() for _ in range(LAYERS))))
    model = copy.deepcopy(eager)
    for block in model:
        compile_with(block, Config(), interpreted, fullgraph=True)
    assert_as_eager(model, eager, 2, 5)
    for block in model:
        assert fusedbwd.report(block).counts() == TINY_COUNTS
    assert fusedbwd.report(model).counts() == {name: LAYERS for name in TINY_COUNTS}


def test_layers_of_one_class_are_compiled_once(tiny, caplog):
    caplog.set_level("INFO", logger="fusedbwd")
    model = nn.Sequential(*(copy.deepcopy(tiny) for _ in range(3)))
    for block in model:
        compile_with(block, Config(), interpreted)
    model(torch.randn(2, 5, HIDDEN, requires_grad=True)).sum().backward()
    assert sum("fused" in record.message for record in caplog.records) == 1


def test_a_hook_that_is_never_traced(tiny):
    """It runs outside the graph, as under nn.Module.compile, and breaks none."""
    seen = []

    @torch._dynamo.disable
    def hook(module, args, out):
        seen.append(out.shape)
        return 2 * out

    eager = copy.deepcopy(tiny)
    eager.register_forward_hook(hook)
    compiled = copy.deepcopy(eager)
    compile_with(compiled, Config(verify=True), interpreted, fullgraph=True)
    assert_as_eager(compiled, eager, 2, 5)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS and seen


def test_compiled_inside_of_compiled(tiny):
    eager = nn.Sequential(copy.deepcopy(tiny), copy.deepcopy(tiny))
    model = copy.deepcopy(eager)
    compile_with(model[0], Config(verify=True), interpreted)
    compile_with(model, Config(verify=True), interpreted)
    assert_as_eager(model, eager, 2, 5)
    assert fusedbwd.report(model).counts() == {name: 2 for name in TINY_COUNTS}
