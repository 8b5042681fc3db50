"""torch's precision of float32 matmuls: exports and training follow it."""

import copy

import pytest
import torch
from trained import TINY_COUNTS, assert_as_eager, compiled_tiny, gradients

import fusedbwd
from fusedbwd import Config, export_backward
from fusedbwd.numerics import relative_l2
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import get_problem
from fusedbwd.verify import table, verify

PLAIN = {"gelu_backward": 1, "layer_norm_backward": 1}
ROUNDED = PLAIN | {"bf16_matmuls": 4, "sum_matmul": 1, "matmul_gelu_backward": 1}


def small(name):
    problem = get_problem(name)
    module = problem.build(seed=1, **problem.small)
    return problem, module, problem.schema(module)


def assert_verified(problem, module, bwd, *cases):
    checks = list(verify(problem, module, bwd, cases, rounds=3))
    assert all(c.ok for c in checks), table(checks)


def test_an_export_follows_the_setting():
    problem, module, schema = small("ffn_gelu_backward")
    bwd = export_backward(module, saved=schema, config=Config(verify=True))
    inputs = problem.inputs(module, 2, 17)
    exact = bwd(**inputs)
    with matmul_precision(MEDIUM):
        rounded = bwd(**inputs)
        assert bwd.report.counts() == ROUNDED
        assert bwd.report.precisions == [MEDIUM]
        assert_verified(problem, module, bwd, (2, 17), (3, 33))
    assert bwd.report.counts() == PLAIN
    assert bwd.variants == [
        "batch_size=any, seq_len=any",
        "batch_size=any, seq_len=any, float32 matmuls at 'medium'",
    ]
    error = relative_l2(rounded.grad_fc1_weight, exact.grad_fc1_weight)
    assert 5e-4 < error < 1e-2
    assert all(map(torch.equal, bwd(**inputs), exact))


def test_an_export_with_both_opt_ins_follows_it():
    """float16 in one part where "high" allows that, else in two."""
    problem, module, schema = small("ffn_gelu_backward")
    config = Config(verify=True, fp16_scaled=True, fp16x3=True)
    bwd = export_backward(module, saved=schema, config=config)
    inputs = problem.inputs(module, 2, 17)
    found = {}
    for precision, name in ((HIGHEST, "fp16x3"), (HIGH, "fp16_scaled")):
        with matmul_precision(precision):
            found[precision] = bwd(**inputs).grad_fc1_weight
            assert bwd.report.counts() == PLAIN | {name: 4, "sum_matmul": 1}
            assert_verified(problem, module, bwd, (2, 17), (3, 33))
    assert 5e-5 < relative_l2(found[HIGH], found[HIGHEST]) < 1e-3
    assert len(bwd.variants) == 2


def test_a_static_export_follows_it_too():
    problem, module, schema = small("ffn_gelu_backward")
    sizes = {"batch_size": 2, "seq_len": 17}
    with matmul_precision(MEDIUM):
        bwd = export_backward(module, saved=schema, dynamic=False, sizes=sizes)
        assert_verified(problem, module, bwd, (2, 17))
    assert_verified(problem, module, bwd, (2, 17))
    assert [v.partition(", f")[0] for v in bwd.variants] == ["batch_size=2, seq_len=17"] * 2


def test_it_does_not_matter_without_float32_matmuls():
    problem, module, schema = small("decoder_backward")
    bwd = export_backward(module, saved=schema)
    inputs = problem.inputs(module, 2, 17)
    exact = bwd(**inputs)
    with matmul_precision(MEDIUM):
        assert all(map(torch.equal, bwd(**inputs), exact))
    assert len(bwd.variants) == 1
    assert bwd.report.precisions == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_training_is_compiled_for_each_setting(tiny):
    """Dynamo itself does not tell "high" from "medium"."""
    compiled = compiled_tiny(tiny, verify=True)
    x = torch.randn(2, 17, tiny.norm.weight.numel())
    found = {}
    for precision in (HIGHEST, HIGH, MEDIUM, HIGH, MEDIUM):
        with matmul_precision(precision):
            ours = gradients(compiled, (x,), 0)["fc1.weight"].clone()
        assert torch.equal(ours, found.setdefault(precision, ours))
    report = fusedbwd.report(compiled)
    assert report.precisions == [HIGH, HIGHEST, MEDIUM]
    medium_alone = {"bf16_matmuls": 4, "matmul_gelu_backward": 1}
    assert report.counts() == {k: 3 * n for k, n in TINY_COUNTS.items()} | medium_alone
    assert 5e-4 < relative_l2(found[MEDIUM], found[HIGHEST]) < 1e-2
    assert_as_eager(compiled, copy.deepcopy(tiny), 2, 17)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [HIGHEST, HIGH])
def test_opt_ins_on_a_gpu(precision):
    problem = get_problem("ffn_gelu_backward")
    module = problem.build(seed=1, device="cuda")
    config = Config(verify=True, fp16_scaled=True, fp16x3=True)
    with matmul_precision(precision):
        bwd = export_backward(module, saved=problem.schema(module), config=config)
        assert bwd.report.counts()["fp16x3" if precision == HIGHEST else "fp16_scaled"] == 4
        (source,) = bwd.kernels()
        assert "_fp16_matmul_kernel" in source and "torch.ops.fusedbwd." not in source
        assert_verified(problem, module, bwd, (2, 211), (16, 919))


@pytest.mark.gpu
@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["Python", "C++"])
def test_on_a_gpu(cpp_wrapper):
    problem = get_problem("ffn_gelu_backward")
    module = problem.build(seed=1, device="cuda")
    with matmul_precision(MEDIUM):
        config = Config(verify=True, cpp_wrapper=cpp_wrapper)
        bwd = export_backward(module, saved=problem.schema(module), config=config)
        assert bwd.report.counts()["bf16_matmuls"] == 4
        (source,) = bwd.kernels()
        assert "_round_to_kernel" in source and "torch.ops.fusedbwd." not in source
        assert_verified(problem, module, bwd, (2, 211), (16, 919))
    assert_verified(problem, module, bwd, (2, 211))
