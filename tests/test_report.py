"""What is said of fusions that were not made: in the report, the log and torch's trace."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedbwd
from fusedbwd import Report, schema
from fusedbwd.codegen import CompiledBackward
from fusedbwd.report import Fired, Missed

ROOT = Path(__file__).resolve().parents[1]


class Block(nn.Module):
    """One SwiGLU that fuses, beside a SiLU and a GELU without a bias that do not."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return F.gelu(self.fc(x)) + F.silu(x) * x + F.silu(2 * x)


SUMMARY = (
    "fused swiglu_backward x1; float32 matmuls at 'highest', 0 in bfloat16; "
    "near misses: swiglu_backward x1, gelu_backward x1"
)
GELU_REASON = re.compile(r"no bias gradient is summed from gelu_backward \(2 users: \w+, \w+\)")


def export():
    tokens = ("t", 16)
    contract = schema.Schema(
        "block",
        (
            schema.grad_output("grad_output", tokens, torch.float32),
            schema.argument("x", tokens, torch.float32),
            schema.parameter("weight", (16, 16), torch.float32, of="fc.weight"),
        ),
        (
            schema.Gradient("grad_x", "x", tokens, torch.float32),
            schema.Gradient("grad_weight", "fc.weight", (16, 16), torch.float32),
        ),
    )
    # What is said is said before code is generated, which takes its time.
    stub = CompiledBackward(lambda inputs: [], "")
    with mock.patch("fusedbwd.export.compile_backward", return_value=stub):
        return fusedbwd.export_backward(Block(), contract)


def train():
    block = fusedbwd.compile(Block())
    block(torch.randn(4, 16, requires_grad=True)).sum().backward()
    return block


@pytest.mark.parametrize("how", ["export", "compile"])
def test_what_a_compilation_says(how, fresh_dynamo, caplog):
    """Near misses in the graph's own terms; at INFO one line, at DEBUG each miss."""
    caplog.set_level(logging.DEBUG, "fusedbwd")
    report = export().report if how == "export" else fusedbwd.report(train())

    found = report.near_misses()
    assert list(found) == ["swiglu_backward", "gelu_backward"]
    assert [m for misses in found.values() for m in misses] == report.missed
    (silu,), (gelu,) = found.values()
    assert silu.anchor.startswith("silu_backward")
    assert re.match(r"\w+ is not the product of an incoming gradient", silu.reason)
    assert gelu.anchor == "gelu_backward" and GELU_REASON.fullmatch(gelu.reason)

    lines = [r for r in caplog.records if r.name == "fusedbwd"]
    assert [r.getMessage() for r in lines if r.levelno == logging.INFO] == [SUMMARY]
    debug = [r.getMessage() for r in lines if r.levelno == logging.DEBUG]
    for miss in report.missed:
        assert f"{miss.fusion} not fused at {miss.anchor}: {miss.reason}" in debug


def test_summary():
    assert Report().summary() == "fused nothing; near misses: none"
    report = Report([Fired("a", "n", ())] * 2, [Missed("b", "n", "why")] * 3, ["c"])
    assert report.summary() == "fused a x2; near misses: b x3; switched off: c"
    assert "\n" not in report.summary() and "why" in str(report)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import test_report
test_report.train()
test_report.export()
"""


def test_structured_trace(tmp_path):
    """Under TORCH_TRACE each report is an artifact, as tlparse takes them; with TORCH_LOGS the
    log's line is on the terminal."""
    about = {"TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "fusedbwd"}
    # torch refuses logs of a module that it does not find, in its own child processes too.
    about["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "tests")],
        cwd=ROOT,
        env=os.environ | about,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SUMMARY) == 2
    reports = artifacts(tmp_path, "fusedbwd_report")
    assert len(reports) == 2
    for report in reports:
        assert report.startswith(SUMMARY)
        assert GELU_REASON.search(report) and "not fused" in report


def artifacts(folder: Path, name: str) -> list[str]:
    """The payloads of that name in torch's trace: a line of JSON, then the text behind tabs."""
    found = []
    for path in folder.glob("*.log"):
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if '"artifact"' in line and not line.startswith("\t"):
                about = json.loads(line[line.index("{") :])
                if about["artifact"] == {"name": name, "encoding": "string"}:
                    end = next(
                        (j for j in range(i + 1, len(lines)) if not lines[j].startswith("\t")),
                        len(lines),
                    )
                    found.append("\n".join(text[1:] for text in lines[i + 1 : end]))
    return found
