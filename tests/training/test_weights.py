"""Frozen, adapted and shared weights."""

import copy

import pytest
import torch
from steps import assert_same_steps, gradients_of
from torch import nn
from trained import HIDDEN, TINY_COUNTS, LlamaLayer, TinyBlock, assert_as_eager, make

import fusedbwd
from fusedbwd import Config

aten = torch.ops.aten
_MATMULS = (
    aten.mm.default,
    aten.addmm.default,
    torch.ops.fusedbwd.sum_matmul.default,
    torch.ops.fusedbwd.matmul_gelu_backward.default,
    torch.ops.fusedbwd.matmul_swiglu_backward.default,
)


def matmul_shapes(backwards):
    """Shapes of all that the matmuls of the backward graphs give."""
    nodes = [n for gm in backwards for op in _MATMULS for n in _calls(gm, op)]
    values = [n.meta["val"] for n in nodes]
    flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return {tuple(v.shape) for v in flat}


def _calls(gm, op):
    return gm.graph.find_nodes(op="call_function", target=op)


def test_no_weight_gradient_of_a_frozen_weight(graphs):
    """Of the second layer alone: its own weight gradient, and what leads to the trained bias."""
    eager = make(TinyBlock)
    eager.fc2.weight.requires_grad_(False)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_same_steps(gradients_of, compiled, eager)
    shapes = matmul_shapes(graphs)
    trained, frozen = tuple(eager.fc1.weight.shape), tuple(eager.fc2.weight.shape)
    assert {trained, trained[::-1]} & shapes == {trained}  # both weights transposed look alike
    assert frozen not in shapes
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def adapted(build, targets, dtype=torch.float32):
    """The module with peft's LoRA on ``targets``, of rank 4, and all else frozen."""
    peft = pytest.importorskip("peft")
    module = build()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    module = peft.inject_adapter_in_model(config, module).to(dtype)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(targets) and all("lora_" in name for name in trained)
    return module


def test_lora(graphs):
    """Gradients of the adapters alone, right, and no matmul for any frozen weight's."""
    eager = adapted(lambda: make(TinyBlock), ["fc1", "fc2"])
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_same_steps(gradients_of, compiled, eager)
    shapes = matmul_shapes(graphs)
    adapters = {tuple(p.shape) for p in eager.parameters() if p.requires_grad}
    frozen = {tuple(layer.base_layer.weight.shape) for layer in (eager.fc1, eager.fc2)}
    assert adapters <= shapes and not frozen & shapes, shapes
    assert fusedbwd.report(compiled).counts() == {"layer_norm_backward": 1}


def test_lora_in_a_llama_layer(graphs):
    """As peft adapts Hugging Face's models, in bfloat16: norms and SwiGLU go on being fused."""
    dtype = torch.bfloat16
    layer = lambda: make(LlamaLayer, dtype)  # noqa: E731
    eager = adapted(layer, ["q_proj", "v_proj"], dtype)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_as_eager(compiled, eager, 2, 17, dtype, rounds=8)
    frozen = {tuple(p.shape) for p in eager.parameters() if not p.requires_grad and p.dim() == 2}
    assert not frozen & matmul_shapes(graphs)
    counts = fusedbwd.report(compiled).counts()
    assert counts["rms_norm_backward"] == 2 and counts["swiglu_backward"] == 1, counts


class TiedModel(nn.Module):
    """The embedding's weight is the head's."""

    def __init__(self, vocabulary=40):
        super().__init__()
        self.embedding, self.block = nn.Embedding(vocabulary, HIDDEN), TinyBlock()
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def tied_step(module, tokens, seed):
    module.zero_grad(set_to_none=True)
    targets = tokens.roll(-1, 1)
    nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def test_tied_weights():
    eager = make(TiedModel)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert compiled.head.weight is compiled.embedding.weight
    draw = lambda seed: (torch.randint(0, 40, (2, 17)),)  # noqa: E731
    assert_same_steps(tied_step, compiled, eager, inputs=draw)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


def test_tying_and_untying_after_the_first_call(graphs):
    eager = make(TwoLayers)
    exact, compiled = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    fusedbwd.compile(compiled, config=Config(verify=True))
    for tied in (False, True, False):
        for module in (compiled, eager, exact):
            weight = module.first.weight
            module.second.weight = weight if tied else nn.Parameter(weight.detach() * 2)
        assert_same_steps(gradients_of, compiled, eager, exact)
