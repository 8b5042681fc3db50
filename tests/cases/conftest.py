"""The cases run on what the other tests have: their models, harness and kernel checks."""

import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func

TESTS = Path(__file__).resolve().parents[1]
for folder in ("kernels", "patterns"):
    sys.path.insert(0, str(TESTS / folder))


@pytest.fixture
def interpreted(monkeypatch, fresh_dynamo):
    """Graphs that fusedbwd.compile makes on a CPU are run as they are, not compiled.

    Returns:
        The backward graphs, as they come.
    """
    backwards = []

    def inner(gm, inputs, is_backward=False, **options):
        if is_backward:
            backwards.append(gm)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr("fusedbwd.training.compile_fx_inner", inner)
    return backwards


@pytest.fixture
def kernels(monkeypatch):
    """Few programs for the interpreter, and fresh memory full of NaN."""
    from fusedbwd.kernels import _op

    if not torch.cuda.is_available():
        monkeypatch.setattr(_op, "_DEFAULT_SM_COUNT", 3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
