"""Benchmark results: kept, summed up, drawn, and compared with earlier ones."""

import dataclasses
import json
import pathlib
import runpy

import pytest
import torch

from fusedbwd import FusedBwdError, UnsupportedError, bench
from fusedbwd.bench_kernels import Kernel, kernels, medians, table
from fusedbwd.bench_plot import plot
from fusedbwd.bench_results import CaseTimings, Results, Timing, load, regressions, summary
from fusedbwd.problems import PROBLEMS

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "docs" / "results" / "bench-decoder-h200.json"
ENVIRONMENT = {
    "device": "a GPU",
    "matmul_precision": "high",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-01-02T03:04:05+00:00",
}


def timing(variant, ms, floor):
    return Timing(variant, 5, 0.9 * ms, ms, 1.1 * ms, 2.0, floor / ms, 0.5, True, 1 << 20)


def results(**ms):
    """Two cases, of 1x8 and 2x8; the second takes twice as long in every variant."""
    cases = []
    for k in (1, 2):
        timings = tuple(timing(v.replace("_", "-"), k * t, k * 0.5) for v, t in ms.items())
        cases.append(CaseTimings(k, 8, 1000, 100, k * 0.5, (1980, None), timings))
    return Results("ffn_gelu_backward", "torch.float32", 1.0, ENVIRONMENT, tuple(cases))


def test_a_run_survives_the_file(tmp_path):
    run = results(eager=4.0, compile=2.0, ours=1.0)
    run.save(tmp_path / "run.json")
    assert load(tmp_path / "run.json") == run


NO_CASES = json.dumps(dataclasses.asdict(results(ours=1.0)) | {"cases": []})
NO_ENVIRONMENT = json.dumps(dataclasses.asdict(results(ours=1.0)) | {"environment": None})


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", "{}", '{"cases": [{"batch": 1}]}', NO_CASES, NO_ENVIRONMENT],
)
def test_files_that_hold_no_results(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(FusedBwdError, match=r"run\.json holds no benchmark results"):
        load(tmp_path / "run.json")


def test_speed_up_is_over_the_fastest_other():
    first, second = results(eager=4.0, compile=2.0, max_autotune=1.8, ours=1.0).cases
    assert first.speed_up() == second.speed_up() == pytest.approx(1.8)
    with pytest.raises(FusedBwdError, match="nothing to compare"):
        results(ours=1.0).cases[0].speed_up()
    with pytest.raises(FusedBwdError, match="no timing of 'ours'"):
        results(eager=1.0).cases[0].speed_up()


def test_summary():
    eager, compiled, ours, ratios = summary(results(eager=4.5, compile=2.5, ours=1.5)).splitlines()
    assert "eager: 6.750 ms, 11% of the limit, SOL score 0.50" in eager
    assert "compile: 3.750 ms, 20% of the limit, SOL score 0.67" in compiled
    assert "ours: 2.250 ms, 33% of the limit, SOL score 0.80" in ours
    assert "1.67 (1x8) to 1.67" in ratios
    assert "SOL" not in summary(results(compile=2.0, ours=1.0))


def test_regressions_are_of_ratios():
    old = results(compile=2.0, ours=1.0)
    assert regressions(results(compile=4.0, ours=2.0), old) == []
    assert regressions(results(compile=2.0, ours=1.04), old) == []
    lost = regressions(results(compile=2.0, ours=1.06), old)
    assert [line.split(":")[0] for line in lost] == ["1x8", "2x8"]
    assert "1.887" in lost[0] and "2.000" in lost[0]
    assert len(regressions(results(compile=2.0, ours=float("nan")), old)) == 2
    part = dataclasses.replace(old, cases=old.cases[1:])
    assert len(regressions(results(compile=2.0, ours=1.06), part)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": "decoder_backward"}, "problem"),
        ({"dtype": "torch.float16"}, "dtype"),
        ({"environment": ENVIRONMENT | {"device": "another GPU"}}, "device is 'another GPU'"),
        ({"environment": ENVIRONMENT | {"matmul_precision": "medium"}}, "matmul_precision"),
        ({"cases": results(eager=1.0, ours=1.0).cases}, "variants"),
        ({"cases": (dataclasses.replace(results(compile=1.0, ours=1.0).cases[0], seq=9),)}, "case"),
    ],
)
def test_runs_that_cannot_be_compared(changes, message):
    old = results(compile=2.0, ours=1.0)
    with pytest.raises(FusedBwdError, match=message):
        regressions(dataclasses.replace(old, **changes), old)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(tmp_path, ending):
    pytest.importorskip("matplotlib")
    for path in (tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"):
        plot(load(COMMITTED), path)
    first, second = ((tmp_path / f"{name}.{ending}").read_bytes() for name in "ab")
    assert len(first) > 5000 and first == second
    with pytest.raises(FusedBwdError, match="'ours'"):
        plot(results(eager=1.0), tmp_path / f"c.{ending}")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(FusedBwdError, match=r"fusedbwd\[bench\]"):
        plot(load(COMMITTED), tmp_path / "a.svg")


def test_script_on_earlier_results(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["main"]
    old = tmp_path / "old.json"
    content = json.loads(COMMITTED.read_text())
    for case in content["cases"]:
        for t in case["timings"]:
            t["p50_ms"] *= 0.9 if t["variant"] == "ours" and case["seq"] == 613 else 1
    old.write_text(json.dumps(content))
    assert main(["--from", str(COMMITTED), "--check", str(COMMITTED)]) == 0
    assert "16 cases, ours" in capsys.readouterr().out
    assert main(["--from", str(COMMITTED), "--check", str(old)]) == 1
    assert "slower than before: 1x613" in capsys.readouterr().out
    assert main(["--from", str(COMMITTED), "--check", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "{}/none/new.json"], "no folder"),
        (["--plot", "{}/none/new.svg"], "no folder"),
        (["--plot", "{}/new.txt"], "none of .svg, .png, .pdf"),
        (["--calls", "0"], "at least one call"),
    ],
)
def test_what_would_fail_afterwards_fails_before(tmp_path, capsys, options, message):
    main = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["main"]
    options = [option.format(tmp_path) for option in options]
    assert main(["--problem", "ffn_gelu_backward", "--small", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_kernels_of_several_calls():
    calls = [
        [("a", 0.0, 10.0), ("b", 12.0, 20.0)],
        [("b", 113.0, 122.0), ("a", 100.0, 111.0)],
        [("a", 0.0, 50.0), ("b", 59.0, 99.0)],
    ]
    found = medians(calls)
    assert found == [Kernel("a", 11.0, 0.0), Kernel("b", 9.0, 2.0)]
    assert "2 in all" in table(found) and "20.0" in table(found)
    with pytest.raises(FusedBwdError, match="different kernels"):
        medians([*calls, [("a", 0.0, 10.0)]])
    with pytest.raises(UnsupportedError, match="cpu"):
        kernels(lambda inputs: (), {}, torch.device("cpu"))


def test_addresses_make_torch_compile_compile_nothing_anew():
    """On a GPU Dynamo guards offsets as it does sizes: for being 0 or 1, or equal to another."""
    problem = PROBLEMS["ffn_gelu_backward"]
    module = problem.build(device="meta")
    inputs = problem.inputs(problem.build(**problem.small), 2, 33)
    moving = bench._MovingInputs(inputs)
    sizes = max(max(p.shape) for p in module.parameters()), *(n for c in problem.cases for n in c)
    offsets = []
    for _ in range(bench._ADDRESSES + 1):
        found = {t.storage_offset() for t in moving.next().values() if isinstance(t, torch.Tensor)}
        assert min(found) > max(sizes)
        offsets.append(found)
    assert offsets[0] == offsets[-1] and len(set(map(frozenset, offsets))) == bench._ADDRESSES
