"""The measurement of layouts: on a CPU the path is run, and the times mean nothing."""

import runpy
from pathlib import Path

import pytest
import torch

from fusedbwd.errors import FusedBwdError
from fusedbwd.precision import HIGH, HIGHEST

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_layouts.py"


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


def test_script(script, capsys):
    assert script["main"](["--device", "cpu", "--small", "--calls", "2"]) == 0
    printed = capsys.readouterr().out
    for name in ("fc1 input", "fc2 input", "fc1 weight", "fc2 weight"):
        assert printed.count(name) == 2 * 2  # by precision and number of tokens
    assert "a copy of a weight [16, 24] pays:" in printed
    assert "a copy of a weight [24, 16] pays:" in printed
    assert script["main"](["--device", "cpu", "--small", "--out", "nowhere.json"]) == 2


@pytest.mark.parametrize("way", ["transposed", "copy, transposed"])
def test_results_that_disagree(script, way):
    right = script["matmuls"]

    def wrong(*args):
        found = right(*args)
        run = found["fc1 input"][way]
        found["fc1 input"][way] = lambda: run() * 1.01
        return found

    script["main"].__globals__["matmuls"] = wrong
    with pytest.raises(FusedBwdError, match=f"fc1 input, 7 tokens, {way}: differs by 1.0e-02"):
        script["measure"](HIGH, 7, (16, 24), 1, torch.empty(1))


def test_what_is_written(script):
    """Rows for the routes: only "high", only input gradients, and the copy is in the time."""
    ways = ("as it lies", "transposed", "copy, transposed")

    def row(tokens, copying, precision=HIGH, matmul="fc1 input"):
        us = dict(zip(ways, (2.0, 1.0, copying), strict=True))
        return script["Row"](precision, tokens, matmul, 1.0, us)

    rows = [row(613, 3), row(2984, 1.9), row(7184, 1.9), row(17312, 1), row(17312, 9, HIGHEST)]
    fc2, fc1 = script["rows_of"]([*rows, row(613, 1, matmul="fc2 weight")], (512, 2048))
    assert (fc1["depth"], fc1["width"]) == (2048, 512) and fc2["tokens"] == []
    assert fc1["tokens"] == [613, 2984, 7184, 17312]
    assert fc1["routes"] == [{"layout": "copy, transposed", "ms": [0.003, 0.0019, 0.0019, 0.001]}]
    assert script["where_it_pays"](fc1) == "a copy of a weight [2048, 512] pays: 768 < tokens"
    nowhere, _ = script["rows_of"]([row(613, 3, matmul="fc2 input")], (512, 2048))
    assert script["where_it_pays"](nowhere).endswith("[512, 2048] pays: nowhere")
