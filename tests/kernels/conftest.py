import pytest
import torch

from fusedbwd.kernels import _op


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another: three multiprocessors are enough."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(_op, "_DEFAULT_SM_COUNT", 3)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh tensors are full of NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
