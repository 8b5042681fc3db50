"""Whole models train as in eager: the loss and every gradient, and what was fused on the way.

In CI each family runs once, in float32, and its fused graphs run as they were traced; the slow
tests compile them, in either dtype and with each attention implementation.
"""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch
from comparison import compare
from families import CONFIGURATIONS, FAMILIES

import fusedbwd

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "models.json"
MATRIX = pytest.mark.parametrize(("name", "attention", "dtype"), CONFIGURATIONS)


def committed(name, attention, dtype):
    """How often each fusion fires, by the results that docs/models.md shows."""
    key = [name, attention, dtype]
    rows = json.loads(RESULTS.read_text())["rows"]
    (row,) = (r for r in rows if [r["model"], r["attention"], r["dtype"]] == key)
    return row["counts"]


UNFUSED = fusedbwd.Config(**{f.name: False for f in dataclasses.fields(fusedbwd.Config)})


def over_budget(comparison):
    return {n: (e, a) for n, (e, a) in comparison.errors.items() if not e <= a}


def assert_right(comparison):
    assert not over_budget(comparison)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name):
    attention = FAMILIES[name].attentions[0]
    found = compare(name, attention, torch.float32, inductor=False)
    assert_right(found)
    assert found.report.counts() == committed(name, attention, "float32"), found.report


@pytest.mark.slow
@MATRIX
def test_compiled(name, attention, dtype):
    found = compare(name, attention, getattr(torch, dtype))
    assert_right(found)
    assert found.report.counts() == committed(name, attention, dtype), found.report


@pytest.mark.gpu
@pytest.mark.slow
@MATRIX
def test_on_a_gpu(name, attention, dtype):
    """What fires there is up to the gate too. Inductor's own float32 code for Qwen2's q and k is up
    to 2.6 times as far off as eager's: where these are over, they are held to that."""
    over = over_budget(compare(name, attention, getattr(torch, dtype), device="cuda"))
    if over and (name, dtype) == ("Qwen2", "float32"):
        assert all("q_proj" in n or "k_proj" in n for n in over), over
        unfused = compare(name, attention, torch.float32, device="cuda", config=UNFUSED).errors
        over = {n: (e, unfused[n][0]) for n, (e, _) in over.items() if not e <= 1.5 * unfused[n][0]}
    assert not over


def test_the_page_is_current():
    script = runpy.run_path(str(ROOT / "scripts" / "models.py"))
    assert script["main"](["--check"]) == 0


@pytest.mark.slow
def test_the_example(capsys, device):
    """Losses of few steps coincide, and what it prints says what was fused."""
    example = runpy.run_path(str(ROOT / "examples" / "train_llama.py"))
    arguments = ["--steps", "8", "--batch", "2", "--seq", "16", "--device", device]
    assert example["main"](arguments) == 0
    assert "rms_norm_backward x9" in capsys.readouterr().out
