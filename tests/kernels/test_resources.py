import json
import re

import pytest
from processes import ROOT, uninterpreted

RECORD = ROOT / "docs" / "kernel-resources.json"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The figures of a fresh compilation."""
    path = tmp_path_factory.mktemp("resources") / "resources.json"
    done = uninterpreted(ROOT / "scripts" / "kernel_resources.py", "--json", path)
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


TTIR = """
from fusedbwd.resources import compile_launch, launches, shipped
args = {name: (launcher, args) for name, launcher, args, _ in shipped()}["fp16_matmul, fp16x3"]
print(compile_launch(launches(args[0], *args[1])[0], "sm_90").ttir)
"""


def test_the_tensor_core_adds_up_one_step_of_fp16x3():
    """Triton turns acc + dot(x, y) into a dot that adds to acc. The sum over all steps would then
    be the tensor core's, which is not exact enough: no dot on float16 adds to what a loop carries.
    """
    done = uninterpreted("-c", TTIR)
    assert done.returncode == 0, done.stderr
    ttir = done.stdout
    dots = re.findall(r"tt\.dot %\w+, %\w+, (%\w+)\b.*xf16> \*", ttir)
    assert len(dots) == 3
    for acc in dots:
        defined = [line for line in ttir.splitlines() if line.lstrip().startswith(f"{acc} = ")]
        assert len(defined) == 1 and "scf.for" not in defined[0], acc
