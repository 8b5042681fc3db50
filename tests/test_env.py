"""``python -m fusedbwd.env``."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton

import fusedbwd
from fusedbwd import env
from fusedbwd.precision import matmul_precision

ROOT = Path(__file__).parents[1]


def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "fusedbwd.env"],
        cwd=ROOT,
        env=os.environ | {"FUSEDBWD_TEST": "of the test", "SECRET_TOKEN": "do not show"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert lines["python"].startswith(platform.python_version())
    assert lines["os"] == platform.platform()
    assert lines["fusedbwd"].startswith(fusedbwd.__version__) and str(ROOT) in lines["fusedbwd"]
    assert lines["$FUSEDBWD_TEST"] == "of the test"
    assert "SECRET_TOKEN" not in done.stdout


def test_versions_and_tables():
    found = env.environment()
    for name, module in (("torch", torch), ("triton", triton)):
        assert found[name].split("+")[0] == module.__version__.split("+")[0]
    assert found["torch is tested"] == "True"
    assert {"fusions_h200.json", "matmul_h200.json"} <= set(found["tables"].split(", "))
    assert found["cuda"] == (torch.version.cuda or "not in this build of torch")
    if torch.cuda.is_available():
        assert found["gpu 0"].startswith(torch.cuda.get_device_name(0) + ", sm_")
    else:
        assert found["gpu"] == "none"


def test_settings():
    with torch._dynamo.config.patch(recompile_limit=77), matmul_precision("medium"):
        found = env.environment()
    assert found["float32 matmuls"] == "medium" and found["recompile limit"] == "77"
    assert env.environment()["float32 matmuls"] == "highest"


def test_gpus(monkeypatch):
    """Two, the second of which is in trouble."""

    class Properties:
        name, major, minor = "NVIDIA H200", 9, 0
        total_memory, multi_processor_count = 140 * 2**30, 132

    def properties(i):
        if i == 1:
            raise RuntimeError("the driver is in trouble")
        return Properties

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = env.environment()
    assert found["gpu 0"] == "NVIDIA H200, sm_90, 132 SMs, 140 GiB"
    assert found["gpu 1"] == "failed: the driver is in trouble"


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("no-such-package",))
    assert env.environment()["no-such-package"] == "not installed"
