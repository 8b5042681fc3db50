"""Fuzzing runs on what the other tests have: their references, spellings and harness."""

import os
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
for folder in ("kernels", "patterns"):
    sys.path.insert(0, str(TESTS / folder))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


# Of the whole module, since Hypothesis calls a test many times in one fixture's life.
@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """The interpreter runs programs one after another: one multiprocessor's are enough."""
    from fusedbwd.kernels import _op

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(_op, "_DEFAULT_SM_COUNT", 1)
        yield


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    """Fresh tensors are full of NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
