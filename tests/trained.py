"""What the training tests share: models, and the comparison with eager in float64."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedbwd
from fusedbwd import Config
from fusedbwd.modules import DecoderLayer, rope_tables
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.patterns import PATTERNS

HIDDEN, HEAD_DIM = 48, 8
OFF = {pattern.name: False for pattern in PATTERNS}


class LlamaLayer(nn.Module):
    """A Hugging Face layer, called with tensors alone."""

    def __init__(self, model="Llama", attention="sdpa"):
        super().__init__()
        name = model.lower()
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        config = getattr(module, f"{model}Config")(
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            attn_implementation=attention,
        )
        self.layer = getattr(module, f"{model}DecoderLayer")(config, 0)

    def forward(self, x, cos, sin, mask=None):
        out = self.layer(x, attention_mask=mask, position_embeddings=(cos, sin))
        return out[0] if isinstance(out, tuple) else out


class SdpaLayer(nn.Module):
    """Grouped-query SDPA with RoPE by halves and repeated heads, as in most decoders."""

    def __init__(self, hidden=HIDDEN, heads=6, kv_heads=2, head_dim=HEAD_DIM):
        super().__init__()
        self.head_dim, self.group = head_dim, heads // kv_heads
        self.q = nn.Linear(hidden, heads * head_dim)
        self.k = nn.Linear(hidden, kv_heads * head_dim)
        self.v = nn.Linear(hidden, kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        def heads(projected):
            return projected.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

        def rope(z):
            first, second = z.chunk(2, -1)
            return z * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)

        q, k, v = rope(heads(self.q(x))), rope(heads(self.k(x))), heads(self.v(x))
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class TinyBlock(nn.Module):
    """Pre-norm GELU feed-forward: small, and quick to compile."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


TINY_COUNTS = {"gelu_backward": 1, "layer_norm_backward": 1}


def compiled_tiny(block, **options):
    return fusedbwd.compile(copy.deepcopy(block), config=Config(**options))


def make(build, dtype=torch.float32, seed=0):
    """A module with random norm weights and biases."""
    torch.manual_seed(seed)
    module = build().to(dtype)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, float("norm" in name or "ln" in name), 0.3)
    return module


def arguments(module, batch, seq, dtype):
    x = torch.randn(batch, seq, HIDDEN).to(dtype)
    rope = isinstance(module, (DecoderLayer, LlamaLayer, SdpaLayer))
    return (x, *rope_tables(batch, seq, HEAD_DIM, dtype=dtype)) if rope else (x,)


def gradients(module, inputs, seed, with_input=True, forward=contextlib.nullcontext()):  # noqa: B008
    """By name; of the parameters that require grad, and of the first input. ``forward`` is a
    context for the forward alone."""
    module.zero_grad(set_to_none=True)
    x = inputs[0].detach().requires_grad_(with_input)
    with forward:
        out = module(x, *inputs[1:])
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def saved_bytes(module, *inputs):
    """Bytes that a forward of ``module`` keeps for its backward."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(*inputs)
    assert out.requires_grad and storages
    return sum(storage.nbytes() for storage in storages.values())


def assert_as_eager(
    compiled, eager, batch, seq, dtype=torch.float32, rounds=4, mask=None, **options
):
    """Over several rounds together, because small gradients are matters of luck."""
    exact = copy.deepcopy(eager).double()
    torch.manual_seed(1000 * batch + seq)
    found = {}
    for seed in range(rounds):
        inputs = arguments(eager, batch, seq, dtype)
        inputs += () if mask is None else (mask,)
        right = gradients(exact, [t.double() for t in inputs], seed, **options)
        theirs = gradients(eager, inputs, seed, **options)
        ours = gradients(compiled, inputs, seed, **options)
        for name, grad in ours.items():
            assert (grad is None) == (theirs[name] is None), name
            if grad is not None:
                assert grad.dtype == theirs[name].dtype, name
                found.setdefault(name, []).append((grad, theirs[name], right[name]))
    for name, all_rounds in found.items():
        grad, eager_grad, expected = (torch.stack(t) for t in zip(*all_rounds, strict=True))
        error = relative_l2(grad, expected)
        allowed = budget(relative_l2(eager_grad, expected), dtype)
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"
