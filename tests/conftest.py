"""Test setup: without a GPU, Triton kernels run in the interpreter, on CPU tensors."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: no more threads than that
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" for the interpreter."""
    return DEVICE


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before counts, and nothing stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny():
    """A block that compiles quickly; copy it."""
    from trained import TinyBlock, make

    return make(TinyBlock)


def pytest_collection_modifyitems(items):
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
