"""Exported backwards of the reference problems: numbers, contract, errors."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedbwd
from fusedbwd import (
    Config,
    FusionError,
    InputError,
    SchemaError,
    UnsupportedError,
    export_backward,
)
from fusedbwd import schema as s
from fusedbwd.patterns import PATTERNS
from fusedbwd.problems import PROBLEMS, get_problem
from fusedbwd.verify import check_gradients, contract_violations, table, verify

BF16, FP32 = torch.bfloat16, torch.float32
DECODER, FFN = "decoder_backward", "ffn_gelu_backward"
FIRED = {
    DECODER: {
        "attention_backward": 1,
        "swiglu_backward": 1,
        "rms_norm_backward": 2,
        "matmul_swiglu_backward": 1,
        "sum_matmul": 2,
    },
    FFN: {"gelu_backward": 1, "layer_norm_backward": 1, "matmul_gelu_backward": 1},
}

SIXTEEN_BIT = {
    *("attention_backward", "matmul_gelu_backward"),
    *("matmul_swiglu_backward", "sum_matmul"),
}

# What fires at each problem's own dtype.
OWN = {
    name: {k: n for k, n in fired.items() if name == DECODER or k not in SIXTEEN_BIT}
    for name, fired in FIRED.items()
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
    fired = dict(FIRED[name])
    if dtype == FP32:  # attention and matmuls are fused in 16 bits only
        fired = {k: n for k, n in fired.items() if k not in SIXTEEN_BIT}
    assert bwd.report.counts() == fired
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
    if name == DECODER:  # documented to follow from what is read
        inputs["silu_up"] = F.silu(inputs["up"].float()).to(inputs["up"].dtype)
        for repeated, once in (
            ("key_states_repeated", "key_states_rotated"),
            ("value_states_repeated", "value_states"),
        ):
            group = inputs[repeated].shape[1] // inputs[once].shape[1]
            inputs[repeated] = inputs[once].repeat_interleave(group, dim=1)
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


def moved(t, elements):
    """A copy of ``t`` so many elements into a buffer of its own."""
    buffer = t.new_empty(t.numel() + elements)
    return buffer.as_strided(t.shape, t.stride(), elements).copy_(t)


@both
def test_calls_at_other_addresses(name):
    """Over a hundred: plain tensors, the first call's numbers, no new threads."""
    bwd, inputs = exported(name), draw(name)
    expected, threads = bwd(**inputs), threading.active_count()
    for call in range(110):
        given = {n: moved(t, 8 * call) if isinstance(t, Tensor) else t for n, t in inputs.items()}
        outputs = bwd(**given)
        assert equal(outputs, expected) and all(type(o) is Tensor for o in outputs)
    assert threading.active_count() == threads


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
    assert bwd.report.counts() == {k: v for k, v in OWN[FFN].items() if k != switch}
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
    for fusion, count in OWN[name].items():
        assert f"{fusion} x{count}" in bwd.report.summary() and fusion in text
    ops = {
        "attention_backward": "attention_rope_backward",
        "swiglu_backward": "matmul_swiglu_backward",  # which takes the other's place
    }
    assert all(f"fusedbwd.{ops.get(f, f)}" in bwd.kernels()[0] for f in OWN[name])
    assert bwd.schema.inputs[0].name in bwd.schema.table()


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
