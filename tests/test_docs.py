"""The generated documentation is current, and the written one names what there is."""

import dataclasses
import re
import runpy
import statistics
from pathlib import Path

import torch

import fusedbwd
from fusedbwd import gate
from fusedbwd.bench_results import load
from fusedbwd.gate import Row, Table
from fusedbwd.numerics import relative_l2
from fusedbwd.patterns import PATTERNS

ROOT = Path(__file__).resolve().parents[1]


def test_generated_pages_are_current():
    script = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    assert script["main"](["--check"]) == 0


def test_a_stale_file_is_noticed(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    main = script["main"]
    main.__globals__["DOCS"] = tmp_path
    fusions = (ROOT / "docs" / "fusions.md").read_text()
    (tmp_path / "fusions.md").write_text(fusions)
    (tmp_path / "performance.md").write_text("no tables\n")
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert (tmp_path / "fusions.md").read_text() == fusions
    (tmp_path / "saved-tensors.md").write_text("old")
    assert main(["--check"]) == 1
    assert "saved-tensors.md is stale" in capsys.readouterr().err


def test_the_measured_column(monkeypatch):
    """Speed-ups over widths by dtype, where the fusion does not fire, and what lacks figures;
    in a row that had the column and in one that had not."""
    against = {14336: ("bfloat16", 1.5), 2048: ("bfloat16", 1.1), 33: ("float32", 0.5)}
    rows = [Row("swiglu_backward", w, d, 128, 1.0, gain) for w, (d, gain) in against.items()]
    monkeypatch.setattr(gate, "tables", lambda: {gate.MEASURED_GPU: Table("H200", tuple(rows))})
    script = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    page = """
| pattern | dtypes | speed against Inductor |
|---|---|---|
| [`swiglu_backward`](#swiglu_backward) | bf16 | old |
| [`gelu_backward`](#gelu_backward) | all |
"""
    assert script["fusions"](page).splitlines()[3:] == [
        "| [`swiglu_backward`](#swiglu_backward) | bf16 | 1.10 to 1.50× in bfloat16 (2 widths); "
        "0.50× in float32 (1 width); does not fire at 33 in float32 |",
        "| [`gelu_backward`](#gelu_backward) | all | not measured |",
    ]


def test_the_table_of_results(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    mark = "<!-- results: bench-decoder-h200.json -->"
    page = f"before\n\n{mark}\n| old |\n| 1 |\n\nafter\n"
    lines = script["performance"](page).splitlines()
    assert lines[:3] == ["before", "", mark] and lines[-2:] == ["", "after"]
    cases = load(ROOT / "docs" / "results" / "bench-decoder-h200.json").cases
    first, mean = ([c.strip() for c in lines[i].strip("|").split("|")] for i in (5, -3))
    for row, name, of in ((first, cases[0].name, cases[:1]), (mean, "mean of 16", cases)):
        floor = statistics.mean(c.floor_ms for c in of)
        p50 = [statistics.mean(c.p50(v) for c in of) for v in ("eager", "compile", "ours")]
        worst = max(t.worst for c in of for t in c.timings if t.variant == "ours")
        ratios = f"{min(p50[:-1]) / p50[-1]:.2f}", f"{floor / p50[-1]:.0%}", f"{worst:.2f}"
        numbers = *(f"{ms:.3f}" for ms in (floor, *p50)), *ratios
        assert [cell.replace(" %", "%") for cell in row] == [name.replace("x", "×"), *numbers]


def test_every_fusion_has_a_row_a_section_and_a_switch():
    text = (ROOT / "docs" / "fusions.md").read_text()
    names = [p.name for p in PATTERNS]
    assert re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE) == names
    assert re.findall(r"^## `(\w+)`", text, re.MULTILINE) == names
    switches = {f.name for f in dataclasses.fields(fusedbwd.Config)}
    assert set(names) <= switches


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_scripts_and_api_that_the_pages_name_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        for script in re.findall(r"scripts/(\w+\.\w+)", text):
            assert (ROOT / "scripts" / script).exists(), f"{page.name}: {script}"
        for name in re.findall(r"fusedbwd\.(\w+)\(", text):
            assert hasattr(fusedbwd, name), f"{page.name}: fusedbwd.{name}"
        for module in re.findall(r"`((?:fusedbwd|patterns|tests|examples)/[\w/]+\.py)`", text):
            assert (ROOT / module).exists(), f"{page.name}: {module}"


def test_readme_code_runs(device):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    with torch.device(device):
        for block in blocks:
            exec(block, names)
    fused = fusedbwd.report(names["block"]).counts()
    assert fused == {"gelu_backward": 1, "layer_norm_backward": 1}
    fused = names["bwd"].report.counts()
    assert fused == {"swiglu_backward": 1, "rms_norm_backward": 1}
    y = names["swiglu"](names["x"].requires_grad_())
    (expected,) = torch.autograd.grad(y.sum(), names["x"])
    assert relative_l2(names["gradients"].grad_x, expected) < 1e-5


def test_design_is_short():
    assert len((ROOT / "docs" / "design.md").read_text().splitlines()) <= 150
