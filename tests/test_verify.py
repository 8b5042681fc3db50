"""Verification and benchmarking, with the reference formulas standing in for an export."""

import collections
import json
import math
import pathlib
import runpy
import sys
import types

import pytest
import torch

from fusedbwd import bench, bench_results
from fusedbwd.errors import FusedBwdError, UnsupportedError
from fusedbwd.precision import RoundedMatmuls, matmul_precision
from fusedbwd.problems import PROBLEMS, get_problem
from fusedbwd.verify import table, verify, verify_case

both = pytest.mark.parametrize("name", list(PROBLEMS))


def small(name, dtype=None):
    problem = get_problem(name)
    return problem, problem.build(seed=0, dtype=dtype or problem.dtype, **problem.small)


def stand_in(problem, spoil=None):
    """A backward that applies the formulas; ``spoil(gradients, inputs)`` may break the result."""

    def bwd(**inputs):
        gradients = problem.reference(inputs)
        if spoil is not None:
            spoil(gradients, inputs)
        return collections.namedtuple("Gradients", gradients)(**gradients)

    return bwd


def check(name, spoil, dtype=None):
    problem, module = small(name, dtype)
    return verify_case(problem, module, stand_in(problem, spoil), 2, 5)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_formulas_pass(name, dtype):
    problem, module = small(name, dtype)
    checks = list(verify(problem, module, stand_in(problem), problem.small_cases))
    assert [(c.batch, c.seq) for c in checks] == list(problem.small_cases)
    assert all(c.ok and not c.violations for c in checks), table(checks)
    assert all(g.error == g.eager_error for c in checks for g in c.gradients)
    assert any(g.error > 0 for c in checks for g in c.gradients)


def rounding_matmuls(problem):
    """The formulas with matmuls on bfloat16 operands."""

    def bwd(**inputs):
        with RoundedMatmuls():
            return tuple(problem.reference(inputs).values())

    return bwd


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_rounded_operands_pass_at_medium_alone(precision):
    problem, module = small("ffn_gelu_backward")
    bwd = rounding_matmuls(problem)
    with matmul_precision(precision):
        (check,) = verify(problem, module, bwd, [(3, 33)], rounds=2)
    through_matmuls = {f"grad_{n}" for n in ("hidden_states", "fc1_weight", "fc1_bias")}
    through_matmuls.add("grad_fc2_weight")
    over = {g.name for g in check.gradients if not g.ok}
    assert over == (set() if precision == "medium" else through_matmuls)
    if precision == "medium":
        assert {g.name for g in check.gradients if g.rounded} == through_matmuls


def test_little_else_passes_at_medium():
    problem, module = small("ffn_gelu_backward")
    with matmul_precision("medium"):
        rounded = rounding_matmuls(problem)
        check = verify_case(problem, module, lambda **t: [g * 1.004 for g in rounded(**t)], 3, 33)
    assert not any(g.ok for g in check.gradients)


CORRUPTIONS = {
    "zeros": lambda g: g.zero_(),
    "one NaN": lambda g: g.view(-1)[3].fill_(math.nan),
    "sign": lambda g: g.neg_(),
    "1.5 % off": lambda g: g.mul_(1.015),
    "a row lost": lambda g: g.view(-1)[: g.shape[-1]].zero_(),
}


@both
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corrupted_gradient_is_found(name, corruption):
    problem, module = small(name)
    for gradient in problem.schema(module).outputs:

        def spoil(gradients, inputs, of=gradient.name):
            CORRUPTIONS[corruption](gradients[of])

        result = verify_case(problem, module, stand_in(problem, spoil), 2, 5)
        assert [g.name for g in result.gradients if not g.ok] == [gradient.name]
        assert not result.ok and not result.violations
        assert "OVER" in table([result])


def set_gradient(name, make):
    return lambda gradients, inputs: gradients.update({name: make(gradients, inputs)})


VIOLATIONS = {
    "input 'grad_output' was changed": lambda g, i: i["grad_output"].view(-1)[0].add_(1),
    "input 'normalized' was changed": lambda g, i: i["normalized"].view(-1)[-1].fill_(math.nan),
    "grad_hidden_states: shares its storage with input 'hidden_states'": set_gradient(
        "grad_hidden_states", lambda g, i: i["hidden_states"].copy_(g["grad_hidden_states"])
    ),
    "grad_ln_bias: shares its storage with output 'grad_fc2_bias'": set_gradient(
        "grad_ln_bias", lambda g, i: g["grad_fc2_bias"]
    ),
    "grad_fc1_bias: expected torch.float32, got torch.float64": set_gradient(
        "grad_fc1_bias", lambda g, i: g["grad_fc1_bias"].double()
    ),
    "grad_fc1_bias: expected shape (80,), got (1, 80)": set_gradient(
        "grad_fc1_bias", lambda g, i: g["grad_fc1_bias"][None]
    ),
    "grad_fc1_weight: not contiguous, strides (1, 80)": set_gradient(
        "grad_fc1_weight", lambda g, i: g["grad_fc1_weight"].t().contiguous().t()
    ),
    "grad_ln_bias: expected a torch.Tensor, got Parameter": set_gradient(
        "grad_ln_bias", lambda g, i: torch.nn.Parameter(g["grad_ln_bias"])
    ),
    "expected 7 gradients, got 6": lambda g, i: g.pop("grad_ln_bias"),
    "expected the gradients ('grad_hidden_states'": lambda g, i: g.update(
        other=g.pop("grad_ln_bias")
    ),
}


@pytest.mark.parametrize("message", VIOLATIONS)
def test_every_breach_of_the_contract_is_found(message):
    result = check("ffn_gelu_backward", VIOLATIONS[message])
    assert not result.ok
    assert any(v.startswith(message) for v in result.violations), result.violations


def test_nan_in_an_input_is_not_taken_for_a_change():
    problem, module = small("ffn_gelu_backward")
    with torch.no_grad():
        module.fc1_bias[0] = math.nan
    assert not verify_case(problem, module, stand_in(problem), 2, 5).violations


def test_float64_cannot_be_verified():
    problem, module = small("ffn_gelu_backward", torch.float64)
    with pytest.raises(UnsupportedError, match="no wider oracle"):
        next(verify(problem, module, stand_in(problem), [(2, 5)]))


@both
def test_bench_times_and_checks_every_variant(name):
    problem, module = small(name)
    fns = bench.variants(problem, module, ["eager", "ours"], lambda: stand_in(problem))
    result = bench.bench_case(problem, module, fns, (2, 5), calls=5, flush_bytes=1 << 16)
    assert [t.variant for t in result.timings] == ["eager", "ours"]
    for t in result.timings:
        assert t.ok and t.calls == 5 and t.worst <= 1
        assert 0 < t.p20_ms <= t.p50_ms <= t.p80_ms
    sizes = {"batch_size": 2, "seq_len": 5}
    assert result.bytes == problem.schema(module).bytes(**sizes)
    assert result.flops == problem.flops(module, 2, 5)
    assert result.floor_ms == pytest.approx(1e3 * max(result.flops / 989e12, result.bytes / 4.8e12))
    assert "WRONG" not in bench_results.table([result])


@pytest.mark.parametrize("good_calls", [0, 7])
def test_bench_finds_a_variant_that_returns_zeros(good_calls):
    problem, module = small("ffn_gelu_backward")
    called = 0

    def zeros_later(inputs):
        nonlocal called
        called += 1
        gradients = tuple(problem.reference(inputs).values())
        return gradients if called <= good_calls else tuple(map(torch.zeros_like, gradients))

    fns = {"eager": stand_in_by_dict(problem), "ours": zeros_later}
    result = bench.bench_case(problem, module, fns, (2, 5), calls=5, flush_bytes=1 << 16)
    assert [t.ok for t in result.timings] == [True, False]
    assert "WRONG" in bench_results.table([result])


def test_bench_moves_the_inputs_and_keeps_their_values():
    problem, module = small("decoder_backward")
    expected = problem.inputs(module, 2, 5, seed=0)
    addresses: dict[str, set[int]] = {name: set() for name in expected if name != "eps"}

    def record(inputs):
        for name, seen in addresses.items():
            assert torch.equal(inputs[name], expected[name])
            assert inputs[name].stride() == expected[name].stride()
            seen.add(inputs[name].data_ptr())
        inputs["grad_output"].zero_()  # the next call's inputs are fresh all the same
        return tuple(problem.reference(expected).values())

    fns = {"ours": record}
    first = bench.first_calls(problem, module, fns, (2, 5))
    for seen in addresses.values():
        assert len(seen) == 1
        seen.clear()  # its copies are gone by now: another call's may come to lie there
    bench.bench_case(problem, module, fns, (2, 5), first=first, calls=5, flush_bytes=1 << 16)
    for name, seen in addresses.items():
        assert len(seen) == bench.WARMUP_CALLS + 5, name


def stand_in_by_dict(problem):
    return lambda inputs: tuple(problem.reference(inputs).values())


def test_unknown_variant():
    problem, module = small("ffn_gelu_backward")
    with pytest.raises(FusedBwdError, match=r"'theirs'.*eager, compile, max-autotune, ours"):
        bench.variants(problem, module, ["theirs"], lambda: stand_in(problem))


def test_percentiles_and_precision():
    assert bench.percentiles([float(v) for v in range(11)]) == (2.0, 5.0, 8.0)
    before = torch.get_float32_matmul_precision()
    with matmul_precision("medium"):
        assert bench.environment(torch.device("cpu"))["matmul_precision"] == "medium"
    assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def script(monkeypatch):
    """Loads a script whose export is the formulas, spoilt by ``spoil``."""

    def load(name, spoil=None):
        def export_backward(module, **kwargs):
            problem = get_problem(kwargs["saved"].name)
            assert kwargs["saved"] == problem.schema(module)
            return stand_in(problem, spoil)

        fake = types.SimpleNamespace(export_backward=export_backward)
        monkeypatch.setitem(sys.modules, "fusedbwd.export", fake)
        path = pathlib.Path(__file__).parents[1] / "scripts" / f"{name}.py"
        return runpy.run_path(str(path))["main"]

    return load


def negate_first(gradients, inputs):
    next(iter(gradients.values())).neg_()


@both
def test_verify_script(name, script, tmp_path, capsys):
    argv = ["--problem", name, "--small", "--device", "cpu"]
    file = tmp_path / "report.json"
    assert script("verify")([*argv, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["environment"]["torch"] == torch.__version__
    assert [c["ok"] for c in report["cases"]] == [True] * len(get_problem(name).small_cases)
    capsys.readouterr()

    assert script("verify")([*argv, "--cases", "0", "--precision", "medium"]) == 0
    assert "float32 matmuls at 'medium': 1 of 1 cases pass" in capsys.readouterr().out
    assert torch.get_float32_matmul_precision() == "highest"
    assert script("verify", negate_first)([*argv, "--cases", "0,2x9"]) == 1
    printed = capsys.readouterr().out
    assert "0 of 2 cases pass" in printed and "failed: 2x17, 2x9" in printed
    assert script("verify")([*argv, "--cases", "99"]) == 2
    assert "case '99'" in capsys.readouterr().err


@both
def test_bench_script(name, script, tmp_path, capsys):
    file = tmp_path / "report.json"
    argv = ["--problem", name, "--small", "--device", "cpu", "--cases", "0", "--calls", "2"]
    argv += ["--variants", "eager,ours", "--precision", "high"]
    assert script("bench")([*argv, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["environment"]["matmul_precision"] == "high"
    assert [t["variant"] for t in report["cases"][0]["timings"]] == ["eager", "ours"]
    assert "mean p50" in capsys.readouterr().out
    assert script("bench", negate_first)(argv) == 1
    assert script("bench")([*argv, "--variants", "theirs"]) == 2
