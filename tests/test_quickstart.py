"""``make demo``: a short run succeeds, and its checks can fail."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "quickstart.py"


@pytest.fixture
def quickstart() -> dict:
    """The script's functions."""
    return runpy.run_path(str(SCRIPT))


def test_a_few_steps(quickstart, device, capsys):
    assert quickstart["main"](["--steps", "3", "--device", device]) == 0
    printed = capsys.readouterr().out
    for expected in ("swiglu_backward x2, rms_norm_backward x4", "layer_norm_backward x1"):
        assert expected in printed
    assert printed.count("ok: ") == 5 and "FAILED" not in printed


def test_one_step_shows_no_falling_loss(quickstart, device, capsys):
    assert quickstart["main"](["--steps", "1", "--device", device]) == 1
    assert "FAILED: the loss falls" in capsys.readouterr().out


def test_unknown_problem(quickstart, device, capsys):
    with pytest.raises(SystemExit):
        quickstart["main"](["--problem", "nonsense", "--device", device])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
