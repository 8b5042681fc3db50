import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "kernel-resources.json"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The figures of a fresh compilation: a process of its own, without the interpreter."""
    path = tmp_path_factory.mktemp("resources") / "resources.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = ROOT / "scripts" / "kernel_resources.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json", str(path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def test_no_spills_on_either_target(compiled):
    assert {k["target"] for k in compiled["kernels"]} == {"sm_90", "sm_100"}
    assert [k for k in compiled["kernels"] if k["spill_bytes"]] == []


def test_they_fit_a_multiprocessor(compiled):
    for kernel in compiled["kernels"]:
        assert 0 < kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        assert kernel["shared_bytes"] <= 227 * 1024, kernel


def test_the_record_covers_the_same_kernels(compiled):
    def names(record):
        return [(k["kernel"], k["target"]) for k in record["kernels"]]

    recorded = json.loads(RECORD.read_text())
    assert names(recorded) == names(compiled)
    if recorded["triton"] == compiled["triton"]:  # figures change with the compiler
        assert recorded == compiled
