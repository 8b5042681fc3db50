"""The measurement of layouts: on a CPU the path is run, and the times mean nothing."""

import runpy
from pathlib import Path

import pytest
import torch

from fusedbwd.errors import FusedBwdError
from fusedbwd.kernels._routes import EDGES
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
    assert "copying the weight is faster under 'high':" in printed


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


def test_the_edge_that_is_printed(script):
    """Slower anywhere beyond an edge is slower beyond it; only "high" and the copy count."""
    ways = ("as it lies", "transposed", "copy, transposed")

    def row(tokens, copying, precision=HIGH):
        us = dict(zip(ways, (2.0, 9.0, copying), strict=True))
        return script["Row"](precision, tokens, "fc1 input", 1.0, us)

    beyond = script["pays_beyond"]
    few, some, many = 613, 2984, 17312
    assert beyond([row(few, 1), row(some, 1), row(many, 1)]) == EDGES[0]
    assert beyond([row(few, 3), row(some, 1), row(many, 1)]) == EDGES[1]
    assert beyond([row(few, 1), row(some, 3), row(many, 1)]) == EDGES[2]
    assert beyond([row(few, 1), row(some, 1), row(many, 3)]) is None
    assert beyond([row(few, 3, HIGHEST), row(few, 1)]) == EDGES[0]
