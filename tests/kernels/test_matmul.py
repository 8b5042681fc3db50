"""What the matmul kernels share: who may be read by descriptors, how tiles are shared out."""

import pytest
import torch
from torch._inductor import config as inductor_config

from fusedbwd import compat
from fusedbwd.kernels._matmul import describable
from fusedbwd.kernels._op import eager


def described(*operands):
    return eager(lambda *args: describable(*args))(*operands)


def test_what_descriptors_can_read(device):
    x = torch.zeros(32, 64, dtype=torch.float16, device=device)
    assert described(x, x[:, 8:], x[3:], x[:, :5])
    assert not described(x, x[:, 1:])  # starts between multiples of 16 bytes
    assert not described(x[:, :33].contiguous())  # so do its rows
    assert not described(x[0].expand(32, 64))


def test_a_wrapper_that_allocates_too_little_scratch_rules_descriptors_out(device):
    x = torch.zeros(32, 64, dtype=torch.float16, device=device)
    with inductor_config.patch(cpp_wrapper=True):
        before = compat.scratch_is_sound()
        assert described(x) == before
        with compat.scratch_by_grid():
            assert compat.scratch_is_sound()
            assert described(x)
        assert compat.scratch_is_sound() == before


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="torch 2.13 multiplies by the grid")
def test_scratch_for_the_whole_grid():
    from torch._inductor.codegen.common import TritonScratchWorkspace
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    with compat.scratch_by_grid():
        lines, name = CUDADeviceOpOverrides().cpp_scratch(
            7, TritonScratchWorkspace(256, lambda: "u8")
        )
    assert lines[0] == f"int64_t {name}_size[] = {{256 * grid_0 * grid_1 * grid_2}};"
