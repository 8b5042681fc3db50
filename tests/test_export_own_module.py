"""Exported backwards of a user's own modules, and mistakes in their schemas."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusedbwd import Config, Gradient, Schema, SchemaError, UnsupportedError, export_backward, tag
from fusedbwd import schema as s
from fusedbwd.numerics import relative_l2
from fusedbwd.problems import record_inputs
from fusedbwd.verify import contract_violations

BF16, FP32 = torch.bfloat16, torch.float32


def equal(actual, expected):
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


class Block(nn.Module):
    """Pre-norm SwiGLU with a LayerNorm behind it; scales a buffer in."""

    def __init__(self, hidden=24, inner=40, eps=1e-3):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_up = nn.Linear(hidden, 2 * inner)
        self.down = nn.Linear(inner, hidden)
        self.out_norm = nn.LayerNorm(hidden)
        self.register_buffer("scale", torch.rand(hidden) + 0.5)
        self.eps = eps
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.out_norm.weight)

    def forward(self, x, mask, unused=None):
        normalized = tag(self.norm(x), "normalized")
        gate, up = tag(self.gate_up(normalized), "gate_up").chunk(2, dim=-1)
        inner = tag(F.silu(gate) * up, "inner")
        h = tag(x + self.down(inner) * self.scale, "h")
        return self.out_norm(h) * mask + self.eps * h


HIDDEN = ("n", 24)
INPUTS = (
    s.grad_output("dy", HIDDEN, FP32),
    s.argument("x", HIDDEN, FP32),
    s.argument("mask", ("n", 1), FP32),
    s.saved("normalized", HIDDEN, FP32),
    s.saved("gate_up", ("n", 80), FP32),
    s.saved("inner", ("n", 40), FP32),
    s.saved("h", HIDDEN, FP32),
    s.parameter("w_norm", (24,), FP32, of="norm.weight"),
    s.parameter("w_gate_up", (80, 24), FP32, of="gate_up.weight"),
    s.parameter("w_down", (24, 40), FP32, of="down.weight"),
    s.parameter("w_out_norm", (24,), FP32, of="out_norm.weight"),
    s.parameter("scale", (24,), FP32),
    s.scalar("leak", 1e-3, of="eps"),
)
OUTPUTS = (
    Gradient("dx", "x", HIDDEN, FP32),
    Gradient("d_gate_up", "gate_up.weight", (80, 24), FP32),
    Gradient("d_norm", "norm.weight", (24,), FP32),
    Gradient("d_out_bias", "out_norm.bias", (24,), FP32),
    Gradient("d_down", "down.weight", (24, 40), FP32),
)
OWN = Schema("block_backward", INPUTS, OUTPUTS)


@functools.cache
def own():
    torch.manual_seed(3)
    module = Block()
    return module, export_backward(module, OWN, config=Config(verify=True))


@pytest.mark.parametrize("rows", [2, 7, 127])
def test_own_module(rows):
    module, bwd = own()
    counts = bwd.report.counts()
    assert counts == {"swiglu_backward": 1, "rms_norm_backward": 1, "layer_norm_backward": 1}
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 24, generator=generator)
    mask = torch.rand(rows, 1, generator=generator)
    inputs = record_inputs(OWN, module, {"x": x, "mask": mask}, generator)
    wanted = {g.of: None for g in OWN.outputs}

    def autograd(dtype):
        leaves = {k: t.detach().to(dtype) for k, t in module.state_dict().items()} | {
            "x": x.to(dtype)
        }
        for n in wanted:
            leaves[n].requires_grad_()
        params = {k: t for k, t in leaves.items() if k != "x"}
        out = torch.func.functional_call(module, params, (leaves["x"], mask.to(dtype)))
        return torch.autograd.grad(out, [leaves[n] for n in wanted], inputs["dy"].to(dtype))

    outputs = bwd(**inputs)
    for o, expected, eager in zip(outputs, autograd(torch.float64), autograd(FP32), strict=True):
        error, allowed = relative_l2(o, expected), 2 * relative_l2(eager, expected)
        assert error <= max(allowed, 2**-23), (error, allowed)
    without = {n: t for n, t in inputs.items() if n != "leak"}
    assert equal(bwd(**without), outputs)
    assert not equal(bwd(**without, leak=1.0), outputs)
    assert module.eps == 1e-3


def changed(**replacements):
    """The schema with inputs or outputs replaced, dropped (None) or added, by name."""
    inputs, outputs = {i.name: i for i in INPUTS}, {o.name: o for o in OUTPUTS}
    for name, item in replacements.items():
        (outputs if name in outputs or isinstance(item, Gradient) else inputs)[name] = item
    return tuple(i for i in inputs.values() if i), tuple(o for o in outputs.values() if o)


MISTAKES = {
    "unknown tag": (
        {"inner": s.saved("inner", ("n", 40), FP32, of="innner")},
        "saved 'inner' stands for 'innner', which the module does not have; it has .*'inner'",
    ),
    "unknown parameter": (
        {"scale": s.parameter("scale", (24,), FP32, of="scales")},
        "parameter 'scale' stands for 'scales', which the module does not have",
    ),
    "unknown attribute": ({"leak": s.scalar("leak", 1e-3, of="epsilon")}, "no attribute 'epsilon'"),
    "unknown argument": (
        {"mask": s.argument("mask", ("n", 1), FP32, of="masks")},
        "masks.* are not arguments of Block.forward",
    ),
    "argument left out": ({"mask": None}, "argument 'mask' of Block.forward is not declared"),
    "gradient of nothing": (
        {"dx": Gradient("dx", "y", HIDDEN, FP32)},
        "'y'.* neither parameters nor arguments of Block",
    ),
    "gradient of what has none": (
        {
            "unused": s.argument("unused", HIDDEN, FP32),
            "dx": Gradient("dx", "unused", HIDDEN, FP32),
        },
        "the output does not depend on 'unused'",
    ),
    "wrong shape of a saved tensor": (
        {"inner": s.saved("inner", ("n", 41), FP32)},
        r"'inner' is declared torch.float32 \['n', 41\], but in the module it is torch.float32",
    ),
    "wrong dtype of a saved tensor": (
        {"inner": s.saved("inner", ("n", 40), BF16)},
        "'inner' is declared torch.bfloat16",
    ),
    "wrong shape of a parameter": (
        {"w_down": s.parameter("w_down", (40, 24), FP32, of="down.weight")},
        "'w_down' is declared",
    ),
    "wrong dtype of the incoming gradient": (
        {"dy": s.grad_output("dy", HIDDEN, BF16)},
        "'dy' is declared torch.bfloat16",
    ),
    "wrong dtype of a gradient": (
        {"d_down": Gradient("d_down", "down.weight", (24, 40), BF16)},
        "'d_down' is declared torch.bfloat16",
    ),
    "wrong shape of a gradient": (
        {"d_down": Gradient("d_down", "down.weight", (40, 24), FP32)},
        "'d_down' is declared",
    ),
    "weight left out": ({"w_down": None}, "backward needs .* which is not among the inputs"),
    "name that is none": (
        {"dx": Gradient("d x", "x", HIDDEN, FP32)},
        "output name 'd x' is not an identifier",
    ),
    "declared twice": (
        {"dx": Gradient("d_norm", "x", HIDDEN, FP32)},
        "output 'd_norm' is declared twice",
    ),
    "two incoming gradients": (
        {"dy2": s.grad_output("dy2", HIDDEN, FP32)},
        "exactly one grad_output",
    ),
    "wrong order": (
        {"h": replace(INPUTS[6], order=(0, 0))},
        "order .* not a permutation of its 2 dimensions",
    ),
    "size of no input": (
        {"dx": Gradient("dx", "x", ("k", 24), FP32)},
        "no input has the size 'k'|'dx' is declared",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_schema(mistake):
    replacements, message = MISTAKES[mistake]
    with pytest.raises(SchemaError, match=message):
        export_backward(Block(), Schema("block_backward", *changed(**replacements)))


def test_forward_that_gives_two_tensors():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    schema = Schema(
        "two",
        (s.grad_output("dy", ("n", 4), FP32), s.argument("x", ("n", 4), FP32)),
        (Gradient("dx", "x", ("n", 4), FP32),),
    )
    with pytest.raises(UnsupportedError, match="must return one tensor"):
        export_backward(Two(), schema)


def test_parameters_on_several_devices():
    module = Block()
    module.down.to("meta")
    with pytest.raises(UnsupportedError, match="several devices"):
        export_backward(module, OWN)


def test_a_size_that_the_forward_fixes():
    class Fixed(nn.Module):
        def forward(self, x):
            return x * x if x.shape[0] > 100 else x * x * x

    schema = Schema(
        "fixed",
        (s.grad_output("dy", ("n", 4), FP32), s.argument("x", ("n", 4), FP32)),
        (Gradient("dx", "x", ("n", 4), FP32),),
    )
    bwd = export_backward(Fixed(), schema)
    for rows in (5, 200, 7, 300):
        x = torch.randn(rows, 4)
        (dx,) = bwd(dy=torch.ones(rows, 4), x=x)
        torch.testing.assert_close(dx, 2 * x if rows > 100 else 3 * x * x)
    assert len(bwd.variants) == 2


def test_gradient_that_passes_through():
    """An output that would be an input, or another output, is a copy."""

    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    shape = ("n", 4)
    schema = Schema(
        "sum",
        (
            s.grad_output("dy", shape, FP32),
            s.argument("x", shape, FP32),
            s.argument("y", shape, FP32),
        ),
        (Gradient("dx", "x", shape, FP32), Gradient("d_y", "y", shape, FP32)),
    )
    bwd = export_backward(Sum(), schema)
    inputs = {n: torch.randn(3, 4) for n in ("dy", "x", "y")}
    outputs = bwd(**inputs)
    assert equal(outputs, (inputs["dy"], inputs["dy"]))
    assert not contract_violations(schema, inputs, outputs)
    assert bwd.unread == {"x", "y"}


def test_random_numbers_are_not_drawn_again():
    class Dropped(nn.Module):
        def forward(self, x):
            return tag(F.dropout(tag(x * x, "square"), 0.5, self.training), "dropped") * x

    shape = ("n", 4)
    schema = Schema(
        "dropped",
        (
            s.grad_output("dy", shape, FP32),
            s.argument("x", shape, FP32),
            s.saved("square", shape, FP32),
            s.saved("dropped", shape, FP32),
        ),
        (Gradient("dx", "x", shape, FP32),),
    )
    with pytest.raises(SchemaError, match="draw random numbers again"):
        export_backward(Dropped(), schema)
    bwd = export_backward(Dropped().eval(), schema)
    x, dy = torch.randn(3, 4), torch.randn(3, 4)
    (dx,) = bwd(dy=dy, x=x, square=x * x, dropped=x * x)
    torch.testing.assert_close(dx, 3 * x * x * dy)


def test_forward_that_changes_a_buffer():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * x

    schema = Schema(
        "counter",
        (s.grad_output("dy", ("n", 4), FP32), s.argument("x", ("n", 4), FP32)),
        (Gradient("dx", "x", ("n", 4), FP32),),
    )
    with pytest.raises(UnsupportedError, match="changes a buffer or an argument in place"):
        export_backward(Counter(), schema)


def test_copies_are_refused():
    _, bwd = own()
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        copy.deepcopy(bwd)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(UnsupportedError, match=f"there is no device {device}"):
        export_backward(Block(), OWN, device=device)
