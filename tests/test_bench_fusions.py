"""The measurements behind the gate: on a CPU the path is run, and the times mean nothing."""

import contextlib
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusedbwd import FusedBwdError, FusionError, VerificationError, bench_fusions
from fusedbwd.bench_fusions import measure, measure_all, table, write
from fusedbwd.config import OPT_INS
from fusedbwd.fusion_cases import SUBJECTS, TOKENS, Case, cases
from fusedbwd.gate import Row
from fusedbwd.kernels._routes import measurements
from fusedbwd.patterns import PATTERNS

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_fusions.py"
CPU = torch.device("cpu")
SMALL = Case("swiglu_backward", 16, torch.float32, 8)


def test_every_fusion_is_measured():
    """Here, or as a matmul, of which scripts/tune.py measures the routes and bench_layouts.py the
    layouts. bf16_matmuls and the opt-ins are asked for: a change of precision, and not another way
    to compute the same."""
    measured = SUBJECTS.keys() | {row["op"] for row in measurements((9, 0))}
    assert {p.name for p in PATTERNS} - measured == {"bf16_matmuls", *OPT_INS}


@pytest.mark.parametrize("name", SUBJECTS)
def test_subjects(monkeypatch, name):
    """Each fusion fires alone, and gives what the graph without it gives."""
    run = lambda gm, *_: SimpleNamespace(run=lambda inputs: gm(*inputs))  # noqa: E731
    monkeypatch.setattr(bench_fusions, "compile_backward", run)
    (case,) = cases([name], small=True)
    row = measure(case, CPU, calls=1, gpu=contextlib.nullcontext())
    assert (row.fusion, row.width, row.tokens) == (name, case.width, case.tokens)
    assert row.ours_ms > 0 and row.inductor_ms > 0


def test_script(monkeypatch, tmp_path, capsys):
    """Compiled by Inductor, in a process."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the script sets it
    path = tmp_path / "cpu.json"
    main = runpy.run_path(str(SCRIPT))["main"]
    arguments = ["--device", "cpu", "--small", "--fusions", "swiglu_backward", "--jobs", "1"]
    assert main([*arguments, "--calls", "2", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["fusions"]
    assert row["fusion"] == "swiglu_backward" and row["ours_ms"] > 0 and row["inductor_ms"] > 0
    printed = capsys.readouterr().out
    assert "swiglu_backward" in printed and "1 of 1 cases" in printed
    assert main(["--fusions", "none"]) == 2
    assert "none" in capsys.readouterr().err


def test_problem_sizes_come_first():
    quick, every = cases([], quick=True), cases([])
    assert every[: len(quick)] == quick and len(set(every)) == len(every)
    assert {(c.width, c.dtype) for c in quick} == {
        (160, torch.bfloat16),
        (14336, torch.bfloat16),
        (2048, torch.float32),
        (5120, torch.bfloat16),
        (512, torch.float32),
    }
    assert {c.tokens for c in every} == set(TOKENS)
    assert {c.fusion for c in cases(["gelu_backward"])} == {"gelu_backward"}
    with pytest.raises(FusedBwdError, match="no_backward"):
        cases(["no_backward"])


# --- what is refused


def test_a_fusion_that_does_not_fire(monkeypatch):
    subject = SUBJECTS["swiglu_backward"]
    monkeypatch.setitem(SUBJECTS, "gelu_backward", subject)
    with pytest.raises(FusionError, match="expected the fusion once"):
        measure(Case("gelu_backward", 16, torch.float32, 8), CPU, gpu=contextlib.nullcontext())


@pytest.mark.parametrize("wrong", [lambda t: t * 1.01, lambda t: t * math.nan], ids=["off", "nan"])
def test_results_that_disagree(monkeypatch, wrong):
    compiled = bench_fusions._compiled

    def broken(*args, fused):
        run = compiled(*args, fused=fused)

        def last_is_wrong(inputs):
            *right, last = run(inputs)
            return [*right, wrong(last)]

        return last_is_wrong if fused else run

    monkeypatch.setattr(bench_fusions, "_compiled", broken)
    with pytest.raises(VerificationError, match="gradient 1 differs"):
        measure(SMALL, CPU, gpu=contextlib.nullcontext())


def test_one_failure_does_not_end_the_others(monkeypatch):
    def measured(case, device, **kwargs):
        if case is SMALL:
            raise RuntimeError("out of memory")
        return Row(case.fusion, case.width, "float32", case.tokens, 1.0, 2.0)

    monkeypatch.setattr(bench_fusions, "measure", measured)
    other = Case("gelu_backward", 16, torch.float32, 8)
    first, second = measure_all([SMALL, other], CPU, jobs=0)
    assert "swiglu_backward" in first and "out of memory" in first
    assert second.inductor_ms == 2.0


# --- results


def test_rows_are_added_to_a_file(tmp_path):
    path = tmp_path / "data" / "cpu.json"
    path.parent.mkdir()
    old = [Row("a", 8, "float32", 128, 1.0, 1.0), Row("a", 8, "float32", 1024, 1.0, 1.0)]
    write(path, old, CPU)
    new = [Row("a", 8, "float32", 1024, 2.0, 2.0), Row("b", 8, "float32", 1024, 1.0, 1.0)]
    write(path, new, CPU)
    content = json.loads(path.read_text())
    assert [Row(**r) for r in content["fusions"]] == [old[0], *new]
    assert content["environment"]["torch"] == torch.__version__
    path.write_text(json.dumps(content | {"gpu": "NVIDIA H200"}))
    with pytest.raises(FusedBwdError, match="NVIDIA H200"):
        write(path, new, CPU)


def test_table():
    rows = [Row("a", 8, "float32", 128, 1.0, 2.0), Row("b", 8, "float32", 128, 1.0, 0.5)]
    detail, joined = table(rows).split("\n\n")
    assert "2.0000" in detail and "0.50" in detail
    assert [line.split()[-2:] for line in joined.splitlines()[2:]] == [
        ["2.00", "yes"],
        ["0.50", "no"],
    ]
