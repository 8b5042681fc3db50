import pytest
import torch

from fusedbwd.kernels import _matmul, _op


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


@pytest.fixture(params=["descriptors", "pointers"])
def loads(request, monkeypatch):
    """Matmul operands read by tensor descriptors where their layout allows, or never."""
    if request.param == "pointers":
        monkeypatch.setattr(_matmul, "_describable", lambda operand: False)
    return request.param
