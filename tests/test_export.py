"""Exported backwards: numbers, contract, errors, for the reference problems and a user's module."""

import functools
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedbwd
from fusedbwd import (
    Config,
    FusionError,
    Gradient,
    InputError,
    Schema,
    SchemaError,
    UnsupportedError,
    export_backward,
    tag,
)
from fusedbwd import schema as s
from fusedbwd.numerics import relative_l2
from fusedbwd.patterns import PATTERNS
from fusedbwd.problems import PROBLEMS, get_problem, record_inputs
from fusedbwd.verify import check_gradients, contract_violations, table, verify

BF16, FP32 = torch.bfloat16, torch.float32
DECODER, FFN = "decoder_backward", "ffn_gelu_backward"
FIRED = {
    DECODER: {"swiglu_backward": 1, "rms_norm_backward": 2},
    FFN: {"gelu_backward": 1, "layer_norm_backward": 1},
}

both = pytest.mark.parametrize("name", list(PROBLEMS))


@functools.cache
def build(name, dtype=None):
    problem = get_problem(name)
    return problem, problem.build(seed=1, dtype=dtype or problem.dtype, **problem.small)


@functools.cache
def exported(name, dtype=None):
    """A problem's small export; compiled once for all tests."""
    problem, module = build(name, dtype)
    return export_backward(module, saved=problem.schema(module), config=Config(verify=True))


def draw(name, batch=2, seq=17, seed=0, dtype=None):
    problem, module = build(name, dtype)
    return problem.inputs(module, batch, seq, seed)


def assert_verified(name, bwd, cases, dtype=None):
    problem, module = build(name, dtype)
    checks = list(verify(problem, module, bwd, cases, rounds=5))
    assert all(c.ok for c in checks), table(checks)


def equal(actual, expected):
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


# --- numbers


@pytest.mark.parametrize(
    ("name", "dtype"), [(DECODER, BF16), (DECODER, FP32), (FFN, FP32), (FFN, BF16)], ids=str
)
def test_right(name, dtype):
    bwd = exported(name, dtype)
    assert bwd.report.counts() == FIRED[name]
    cases = [case for case in get_problem(name).small_cases if 1 not in case]
    assert_verified(name, bwd, cases, dtype)
    assert bwd.variants[0] == "batch_size=any, seq_len=any"


@both
def test_one_compilation_for_all_sizes_and_one_for_each_size_of_one(name):
    problem, module = build(name)
    bwd = exported(name)
    for case in [(2, 17), (5, 3), (17, 2), (48, 2), (6, 80), (2, 8)]:
        bwd(**problem.inputs(module, *case))
    assert bwd.variants.count("batch_size=any, seq_len=any") == 1
    assert_verified(name, bwd, [(1, 7), (1, 19)])
    assert sorted(bwd.variants) == ["batch_size=1, seq_len=any", "batch_size=any, seq_len=any"]
    assert len(bwd.kernels()) == 2


def test_every_size_one():
    bwd = export_backward(*schema_of(FFN))
    assert_verified(FFN, bwd, [(1, 1), (3, 1), (2, 2), (1, 1)])
    assert bwd.variants == [
        "batch_size=any, seq_len=any",
        "batch_size=1, seq_len=1",
        "batch_size=any, seq_len=1",
    ]


def schema_of(name, dtype=None):
    problem, module = build(name, dtype)
    return module, problem.schema(module)


def empty(bwd, *case):
    """Inputs of a size that has a zero in it; the parameters have elements."""
    sizes = dict(zip(bwd.schema.symbols, case, strict=True))
    return {
        i.name: torch.rand(s.resolve(i.shape, sizes)).to(i.dtype)
        for i in bwd.schema.inputs
        if i.kind != s.SCALAR
    }


@both
@pytest.mark.parametrize("case", [(0, 17), (2, 0), (0, 0)], ids=str)
def test_empty_batch(name, case):
    bwd = exported(name)
    inputs = empty(bwd, *case)
    outputs = bwd(**inputs)
    assert not contract_violations(bwd.schema, inputs, outputs)
    assert all(not o.any() for o in outputs)


@both
def test_eps_is_that_of_the_call(name):
    problem, _ = build(name)
    bwd, inputs = exported(name), draw(name)
    default = bwd(**inputs)
    without = {n: t for n, t in inputs.items() if n != "eps"}
    assert equal(bwd(**without), default)
    for eps in (1e-2, 1, 1e-6):
        given = {**inputs, "eps": eps}
        checks = check_gradients(problem, bwd.schema, given, bwd(**given))
        assert all(c.ok for c in checks), (eps, checks)
    assert not equal(bwd(**{**inputs, "eps": 1e-2}), default)
    variants = len(bwd.variants)
    bwd(**{**inputs, "eps": 0.5})
    assert len(bwd.variants) == variants


@both
def test_saved_tensors_are_used_as_given(name):
    """Each drawn for itself, so that none follows from another: the formulas on these."""
    problem, _ = build(name)
    bwd = exported(name)
    generator = torch.Generator().manual_seed(5)
    inputs = draw(name, 3, 33)
    for i in bwd.schema.inputs:
        if i.kind != s.SCALAR and i.read:
            shape = inputs[i.name].shape
            values = torch.randn(shape, generator=generator)
            if i.name.startswith("var"):
                values = values.abs() + 0.1
            inputs[i.name] = values.to(i.dtype)
    if "silu_up" in inputs:  # documented to follow from up
        inputs["silu_up"] = F.silu(inputs["up"].float()).to(inputs["up"].dtype)
    checks = check_gradients(problem, bwd.schema, inputs, bwd(**inputs))
    assert all(c.ok for c in checks), checks


@both
def test_what_is_declared_unread_is_what_is_not_read(name):
    bwd, inputs = exported(name), draw(name)
    declared = {i.name for i in bwd.schema.inputs if not i.read}
    assert declared and bwd.unread == declared
    spoiled = inputs | {n: torch.full_like(inputs[n], torch.nan) for n in declared}
    assert equal(bwd(**spoiled), bwd(**inputs))


@both
def test_what_is_declared_read_is_read(name):
    bwd, inputs = exported(name), draw(name)
    before = bwd(**inputs)
    for i in bwd.schema.inputs:
        if i.read and i.kind != s.SCALAR:
            spoiled = {**inputs, i.name: torch.full_like(inputs[i.name], torch.nan)}
            assert not equal(bwd(**spoiled), before), i.name


# --- the call


LAYOUTS = {
    "sliced": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "padded": lambda t: F.pad(t, (3, 2))[..., 3:-2],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "offset": lambda t: torch.cat([t.flatten(), t.flatten()])[t.numel() :].view(t.shape),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: nn.Parameter(t.clone()),
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(name, layout):
    bwd, inputs = exported(name), draw(name)
    make = LAYOUTS[layout]
    strided = {n: make(t) if isinstance(t, Tensor) else t for n, t in inputs.items()}
    outputs = bwd(**strided)
    assert equal(outputs, bwd(**inputs))
    assert not contract_violations(bwd.schema, strided, outputs)
    assert not any(o.requires_grad for o in outputs)


@both
@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 1), (2,)], ids=str)
def test_expanded_gradient(name, dims):
    bwd, inputs = exported(name), draw(name)
    grad = inputs["grad_output"]
    for dim in dims:
        grad = grad.select(dim, 0).unsqueeze(dim)
    grad = grad.expand_as(inputs["grad_output"])
    dense = {**inputs, "grad_output": grad.contiguous()}
    assert equal(bwd(**{**inputs, "grad_output": grad}), bwd(**dense))


@both
def test_one_tensor_for_two_inputs(name):
    bwd, inputs = exported(name), draw(name)
    same = "residual" if name == DECODER else "hidden_states"
    shared = {**inputs, same: inputs["grad_output"]}
    outputs = bwd(**shared)
    assert equal(outputs, bwd(**{**inputs, same: inputs["grad_output"].clone()}))
    assert not contract_violations(bwd.schema, shared, outputs)


@both
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["no_grad", "grad", "inference", "autocast"],
)
def test_modes(name, mode):
    bwd, inputs = exported(name), draw(name)
    expected = bwd(**inputs)
    with mode():
        outputs = bwd(**inputs)
        assert not contract_violations(bwd.schema, inputs, outputs)
    assert equal(outputs, expected)


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference", "autocast"],
)
def test_compiled_in_a_mode(mode):
    """Neither an export nor a variant takes over the mode in which it is compiled."""
    inputs = draw(FFN, 1, 5)
    with mode():
        bwd = export_backward(*schema_of(FFN))
        bwd(**inputs)
    assert len(bwd.variants) == 2
    assert_verified(FFN, bwd, [(2, 17), (1, 5)])


@both
def test_inputs_stay_and_results_repeat(name):
    bwd, inputs = exported(name), draw(name)
    before = {n: t.clone() for n, t in inputs.items() if isinstance(t, Tensor)}
    first, second = bwd(**inputs), bwd(**inputs)
    assert equal(first, second)
    assert all(torch.equal(t, inputs[n]) for n, t in before.items())
    storages = {o.untyped_storage().data_ptr() for o in (*first, *second)}
    storages |= {t.untyped_storage().data_ptr() for t in inputs.values() if isinstance(t, Tensor)}
    assert len(storages) == len(first) + len(second) + len(before)
    assert all(o.is_contiguous() and type(o) is Tensor for o in first)


@both
def test_ways_to_call(name):
    bwd, inputs = exported(name), draw(name)
    expected = bwd(**inputs)
    values = tuple(inputs.values())
    assert expected._fields == tuple(o.name for o in bwd.schema.outputs)
    assert equal(bwd.run(*values), expected)
    assert equal(bwd(*values), expected)
    assert equal(bwd(*values[:-1]), expected)  # eps left out
    rest = dict(list(inputs.items())[3:])
    assert equal(bwd(*values[:3], **rest), expected)
    assert equal(bwd(**dict(reversed(inputs.items()))), expected)


def test_threads():
    bwd = export_backward(*schema_of(FFN))
    cases = [(2, 17), (1, 5), (1, 9), (3, 4)] * 2
    expected = {case: exported(FFN)(**draw(FFN, *case)) for case in cases}
    results = [None] * len(cases)

    def call(k):
        results[k] = bwd(**draw(FFN, *cases[k]))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bwd.variants) == 2
    for case, result in zip(cases, results, strict=True):
        assert equal(result, expected[case])


# --- what does not fit


def test_errors_name_the_tensor_what_was_expected_and_what_came():
    bwd, inputs = exported(DECODER), draw(DECODER)

    def message(**changes):
        with pytest.raises(InputError) as error:
            bwd(**(inputs | changes))
        return str(error.value)

    gate = inputs["gate"]
    assert message(gate=gate[:, :-1]) == (
        "input 'gate': expected torch.bfloat16 [2, 17, 80] on cpu (declared "
        "['batch_size', 'seq_len', 80]), got torch.bfloat16 [2, 16, 80] on cpu"
    )
    assert "'gate': expected torch.bfloat16" in message(gate=gate.float())
    assert "got torch.float32 [2, 17, 80] on cpu" in message(gate=gate.float())
    assert "got torch.bfloat16 [34, 80] on cpu" in message(gate=gate.flatten(0, 1))
    assert "'gate'" in (text := message(gate=gate.to("meta"))) and "on meta" in text
    assert "'gate': expected torch.bfloat16" in (text := message(gate=None)) and "NoneType" in text
    assert "got list" in message(gate=gate.tolist())
    assert "'silu_up'" in message(silu_up=gate[:1])  # unread, and checked all the same
    assert "'q_weight': expected torch.bfloat16 [48, 48]" in message(q_weight=gate)
    assert "'grad_output'" in (text := message(grad_output=gate[0])) and "[17, 80]" in text
    assert "'grad_output'" in message(grad_output=None)
    assert "'eps': expected a float, got Tensor" in message(eps=torch.tensor(1e-6))
    assert "'eps': expected a float, got str" in message(eps="1e-6")
    assert "'eps': expected a float, got bool" in message(eps=True)


def test_errors_of_names():
    bwd, inputs = exported(DECODER), draw(DECODER)
    rest = {n: t for n, t in inputs.items() if n != "gate"}
    with pytest.raises(InputError, match=r"'gate' \(torch.bfloat16, .*80\]\) is missing"):
        bwd(**rest)
    with pytest.raises(InputError, match=r"no input 'gat'; it has .*'gate'"):
        bwd(**rest, gat=inputs["gate"])
    with pytest.raises(InputError, match="'grad_output' is given twice"):
        bwd(inputs["grad_output"], **inputs)
    with pytest.raises(InputError, match=f"takes {len(inputs)} inputs, got {len(inputs) + 1}"):
        bwd(*inputs.values(), 1.0)
    with pytest.raises(InputError, match="is missing"):
        bwd()


def test_errors_leave_the_export_usable():
    bwd, inputs = exported(FFN), draw(FFN)
    expected = bwd(**inputs)
    with pytest.raises(InputError):
        bwd(**{**inputs, "grad_output": inputs["grad_output"][:, :3]})
    assert equal(bwd(**inputs), expected)


def test_static_sizes():
    sizes = {"batch_size": 2, "seq_len": 17}
    bwd = export_backward(*schema_of(FFN), dynamic=False, sizes=sizes)
    assert_verified(FFN, bwd, [(2, 17)])
    assert bwd.variants == ["batch_size=2, seq_len=17"]
    with pytest.raises(InputError, match=r"exported for .*'seq_len': 17.* got .*'seq_len': 18"):
        bwd(**draw(FFN, 2, 18))
    with pytest.raises(InputError, match="exported for"):
        bwd(**empty(bwd, 0, 17))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": False}, "needs sizes for exactly"),
        ({"dynamic": False, "sizes": {"batch_size": 2}}, "needs sizes for exactly"),
        ({"sizes": {"batch_size": 2, "seq_len": 17}}, "dynamic=True leaves them open"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(SchemaError, match=message):
        export_backward(*schema_of(FFN), **options)


def test_wrong_module_or_device():
    with pytest.raises(UnsupportedError, match="no problem is called 'nonsense'"):
        export_backward("nonsense")
    module, schema = schema_of(FFN)
    with pytest.raises(SchemaError, match="saved=None"):
        export_backward(module)
    with pytest.raises(UnsupportedError, match="not on meta"):
        export_backward(module, schema, device="meta")


# --- configuration


@pytest.mark.parametrize("switch", ["gelu_backward", "layer_norm_backward"])
def test_switches(switch):
    bwd = export_backward(*schema_of(FFN), config=Config(**{switch: False}))
    assert bwd.report.switched_off == [switch]
    assert bwd.report.counts() == {k: v for k, v in FIRED[FFN].items() if k != switch}
    assert_verified(FFN, bwd, [(2, 17)])


def all_off(**options):
    return Config(**{pattern.name: False for pattern in PATTERNS}, **options)


def test_all_switched_off():
    bwd = export_backward(*schema_of(FFN), config=all_off())
    assert not bwd.report.fired and "fused nothing" in bwd.report.summary()
    assert "fusedbwd" not in "".join(bwd.kernels())
    assert_verified(FFN, bwd, [(2, 17), (3, 33)])


def test_strict():
    with pytest.raises(FusionError, match="nothing was fused"):
        export_backward(*schema_of(FFN), config=all_off(strict=True))
    export_backward(*schema_of(FFN), config=Config(strict=True))


@both
def test_what_the_export_tells(name):
    bwd = exported(name)
    text = str(bwd.report)
    for fusion, count in FIRED[name].items():
        assert f"{fusion} x{count}" in bwd.report.summary() and fusion in text
    assert all(f"fusedbwd.{fusion}" in bwd.kernels()[0] for fusion in FIRED[name])
    assert bwd.schema.inputs[0].name in bwd.schema.table()


# --- a user's own module


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


def test_exports_do_not_share(recwarn):
    """Two exports of one module under different configurations."""
    plain = export_backward(*schema_of(FFN), config=all_off())
    fused = exported(FFN)
    inputs = draw(FFN)
    for _ in range(2):
        assert not plain.report.fired and fused.report.fired
        for a, b in zip(plain(**inputs), fused(**inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_by_name():
    """A reference problem by its name is built at full size; shapes say so."""
    problem = get_problem(FFN)
    bwd = fusedbwd.export_backward(FFN, config=Config(verify=False))
    assert bwd.schema == problem.schema(problem.build())
