"""Two ranks for every test here: gloo on the CPU, and NCCL where there are two GPUs."""

import pytest
import torch
from ranks import Ranks

TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def ranks(request, tmp_path_factory):
    """Two processes that run a job each; started once, because importing torch takes longest."""
    running = Ranks(request.param, tmp_path_factory)
    yield running
    running.stop()
