"""Schemas read off a forward, and the backward exported over them, for modules of a user's own."""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedbwd
from fusedbwd import SchemaError, UnsupportedError, infer_schema, tag
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.problems import record_inputs


class GegluBlock(nn.Module):
    """Pre-norm MLP: ``x + down(gelu(gate) * up)`` over a packed projection."""

    def __init__(self, hidden=96, wide=160):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(hidden, 2 * wide)
        self.down = nn.Linear(wide, hidden)

    def forward(self, x):
        normalized = tag(self.norm(x), "normalized")
        gate, up = self.gate_up(normalized).chunk(2, dim=-1)
        gate, up = tag(gate, "gate"), tag(up, "up")
        return x + self.down(tag(F.gelu(gate) * up, "product"))


class LayerNormGelu(nn.Module):
    """Post-norm feed-forward with heads split off, so that a saved tensor is permuted."""

    def __init__(self, hidden=96, wide=160, heads=4):
        super().__init__()
        self.heads = heads
        self.register_buffer("shift", torch.randn(hidden))
        self.fc1 = nn.Linear(hidden, wide)
        self.fc2 = nn.Linear(wide, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x, scale):
        inner = tag(F.gelu(tag(self.fc1(x + self.shift), "fc1"), approximate="tanh"), "inner")
        heads = inner.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads = tag(heads.tanh(), "heads")
        merged = heads.transpose(1, 2).flatten(2)
        return self.norm(tag(x + self.fc2(merged) * scale, "summed"))


SIZES = {"batch": 3, "seq": 7}


def randomised(module, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            t.copy_(torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5)
        module.norm.weight += 1
    return module.to(dtype)


def draw(schema, module, dtype, batch, seq, seed):
    """The forward's arguments at these sizes, by name."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"batch": batch, "seq": seq}
    return {
        i.of: torch.randn(fusedbwd.schema.resolve(i.shape, sizes), generator=generator).to(dtype)
        for i in schema.inputs
        if i.kind == "argument"
    }


def autograd(module, schema, arguments, grad):
    """The gradients in the schema's order, by autograd."""
    leaves = {k: t.clone().requires_grad_() for k, t in arguments.items()}
    named = {**dict(module.named_parameters()), **leaves}
    wanted = [named[g.of] for g in schema.outputs]
    return torch.autograd.grad(module(**leaves), wanted, grad)


def arguments_of(block, dtype=torch.float32):
    x = torch.randn(3, 7, 96, dtype=dtype)
    return (x,) if block is GegluBlock else (x, torch.rand(3, 7, 1, dtype=dtype))


both = pytest.mark.parametrize("block", [GegluBlock, LayerNormGelu])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exported_backward_over_an_inferred_schema_matches_autograd(block, dtype):
    module = randomised(block(), dtype)
    schema = infer_schema(module, *arguments_of(block, dtype), sizes=SIZES)
    bwd = fusedbwd.export_backward(module, saved=schema)
    cases = [(3, 7), (2, 33), (5, 4), (1, 64)]
    errors, eager_errors = ({g.name: [] for g in schema.outputs} for _ in range(2))
    for seed, (batch, seq) in enumerate(cases):
        arguments = draw(schema, module, dtype, batch, seq, seed)
        inputs = record_inputs(schema, module, arguments, torch.Generator().manual_seed(seed))
        grad = inputs["grad_output"]
        eager = autograd(module, schema, arguments, grad)
        wide = {k: t.double() for k, t in arguments.items()}
        truth = autograd(randomised(block(), dtype).double(), schema, wide, grad.double())
        ours = bwd(**inputs)
        assert ours._fields == tuple(errors)
        for name, mine, other, right in zip(errors, ours, eager, truth, strict=True):
            assert mine.dtype == other.dtype
            errors[name].append(relative_l2(mine, right))
            eager_errors[name].append(relative_l2(other, right))
    for name, found in errors.items():
        # Over all cases: a norm weight's gradient has too few elements for one to tell much.
        error, eager_error = (statistics.fmean(e) for e in (found, eager_errors[name]))
        assert within(error, budget(eager_error, dtype)), name
    assert len(bwd.variants) == 2  # one for a batch of 1


class Attend(nn.Module):
    """SDPA on tagged heads; its output and statistics are not saved, but computed again."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(96), nn.Linear(96, 3 * 96)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 24)).permute(2, 0, 3, 1, 4)
        q, k, v = (tag(z, name) for z, name in zip(heads, "qkv", strict=True))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_attention_op_without_dropout_is_not_random():
    module = randomised(Attend())
    schema = infer_schema(module, torch.randn(3, 7, 96), sizes=SIZES)
    bwd = fusedbwd.export_backward(module, saved=schema)
    arguments = draw(schema, module, torch.float32, 2, 9, seed=1)
    inputs = record_inputs(schema, module, arguments, torch.Generator().manual_seed(1))
    ours, eager = bwd(**inputs), autograd(module, schema, arguments, inputs["grad_output"])
    exact = randomised(Attend()).double()
    wide = {k: t.double() for k, t in arguments.items()}
    truth = autograd(exact, schema, wide, inputs["grad_output"].double())
    for name, mine, other, right in zip(ours._fields, ours, eager, truth, strict=True):
        allowed = budget(relative_l2(other, right), torch.float32)
        assert within(relative_l2(mine, right), allowed), name


def test_geglu_schema():
    schema = infer_schema(GegluBlock(), torch.randn(3, 7, 96), sizes=SIZES)
    assert schema.name == "GegluBlock_backward"
    assert schema.symbols == ("batch", "seq")
    assert [(i.name, i.kind, i.of, i.shape) for i in schema.inputs] == [
        ("grad_output", "grad_output", "grad_output", ("batch", "seq", 96)),
        ("x", "argument", "x", ("batch", "seq", 96)),
        ("normalized", "saved", "normalized", ("batch", "seq", 96)),
        ("gate", "saved", "gate", ("batch", "seq", 160)),
        ("up", "saved", "up", ("batch", "seq", 160)),
        ("product", "saved", "product", ("batch", "seq", 160)),
        ("norm_weight", "parameter", "norm.weight", (96,)),
        ("gate_up_weight", "parameter", "gate_up.weight", (320, 96)),
        ("gate_up_bias", "parameter", "gate_up.bias", (320,)),
        ("down_weight", "parameter", "down.weight", (96, 160)),
        ("down_bias", "parameter", "down.bias", (96,)),
    ]
    assert [(g.name, g.of) for g in schema.outputs][:3] == [
        ("grad_x", "x"),
        ("grad_norm_weight", "norm.weight"),
        ("grad_gate_up_weight", "gate_up.weight"),
    ]


def test_layouts_and_buffers():
    schema = infer_schema(LayerNormGelu(), *arguments_of(LayerNormGelu), sizes=SIZES)
    heads = schema.input("heads")
    assert (heads.shape, heads.order) == (("batch", 4, "seq", 40), (0, 2, 1, 3))
    assert all(i.order is None for i in schema.inputs if i.name != "heads")
    assert schema.input("scale").shape == ("batch", "seq", 1)
    assert schema.input("shift").kind == "parameter"
    assert "grad_shift" not in [g.name for g in schema.outputs]


def test_only_what_requires_grad_gets_a_gradient():
    module = LayerNormGelu()
    module.fc1.requires_grad_(False)
    x, scale = arguments_of(LayerNormGelu)
    both_arguments = infer_schema(module, x, scale, sizes=SIZES)
    x_alone = infer_schema(module, x.requires_grad_(), scale, sizes=SIZES)
    parameters = ["grad_fc2_weight", "grad_norm_weight", "grad_norm_bias"]
    assert [g.name for g in both_arguments.outputs] == ["grad_x", "grad_scale", *parameters]
    assert [g.name for g in x_alone.outputs] == ["grad_x", *parameters]


def test_a_module_that_is_compiled_for_training():
    module = GegluBlock()
    x = torch.randn(3, 7, 96, requires_grad=True)
    expected = infer_schema(module, x, sizes=SIZES)
    fusedbwd.compile(module)(x).sum().backward()
    assert infer_schema(module, x, sizes=SIZES) == expected
    bwd = fusedbwd.export_backward(module, saved=expected)
    fired = {"rms_norm_backward": 1, "geglu_backward": 1}
    assert bwd.report.counts() == fusedbwd.report(module).counts() == fired
    module(x)
    assert fusedbwd.report(module).counts() == fired  # still compiled, and not again


class Repeated(nn.Module):
    """Tags one tensor twice, and its argument and parameter once more."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96))

    def forward(self, x):
        x = tag(x, "x")
        tag(self.weight, "again")
        y = tag(x * self.weight, "y")
        return tag(y, "same_y").exp()


def test_a_tensor_with_several_names_is_declared_once():
    module = Repeated()
    schema = infer_schema(module, torch.randn(3, 7, 96), sizes=SIZES)
    assert [i.name for i in schema.inputs] == ["grad_output", "x", "y", "weight"]
    bwd = fusedbwd.export_backward(module, saved=schema)
    arguments = draw(schema, module, torch.float32, 3, 7, 0)
    inputs = record_inputs(schema, module, arguments, torch.Generator().manual_seed(0))
    expected = autograd(module, schema, arguments, inputs["grad_output"])
    for mine, right in zip(bwd(**inputs), expected, strict=True):
        assert relative_l2(mine, right) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 3, "seq": 3}, "batch and seq are both 3"),
        ({"batch": 3, "seq": 96}, "seq = 96 is also a dimension of norm.weight"),
        ({"batch": 3, "seq": 1}, "at least 2"),
        ({"batch": 3, "seq": 8}, "no dimension has the size of 'seq'"),
    ],
)
def test_ambiguous_sizes(sizes, message):
    x = torch.randn(3, sizes["seq"] if sizes["seq"] != 8 else 7, 96)
    with pytest.raises(SchemaError, match=message):
        infer_schema(GegluBlock(), x, sizes=sizes)


def test_arguments_and_outputs_that_no_schema_can_hold():
    class Pair(GegluBlock):
        def forward(self, x, factor=1.0):
            return x, super().forward(x) * factor

    x = torch.randn(3, 7, 96)
    with pytest.raises(UnsupportedError, match="expected a tensor for 'factor', got float"):
        infer_schema(Pair(), x, 2.0, sizes=SIZES)
    with pytest.raises(UnsupportedError, match="must return one tensor, got tuple"):
        infer_schema(Pair(), x, sizes=SIZES)
    with pytest.raises(SchemaError, match="missing a required argument: 'x'"):
        infer_schema(Pair(), sizes=SIZES)


def test_the_table_documents_the_real_names():
    schema = infer_schema(GegluBlock(), torch.randn(3, 7, 96), sizes=SIZES)
    lines = schema.table().splitlines()
    row = next(line for line in lines if line.startswith("| gate_up_weight "))
    assert "parameter gate_up.weight" in row and "[320, 96]" in row
    assert any(line.startswith("| grad_norm_weight ") and "norm.weight" in line for line in lines)
