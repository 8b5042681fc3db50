"""What torch's analysis takes a kernel to write: fresh tensors, each through one argument.

A compiled graph has a kernel's results from that analysis, which sees every store, even one that
never runs.
"""

import json
from pathlib import Path

import pytest
import torch
from processes import uninterpreted
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch.utils import _pytree as pytree

from fusedbwd.launch import check_written
from fusedbwd.resources import launches, shipped

FOLDER = Path(__file__).parent
PROGRAM = "import test_written; test_written.print_shipped()"


class Driver:
    """Stands in for a GPU's driver, which the analysis asks what to compile for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def print_shipped():
    """A line of JSON for each launch: op, kernel, written arguments, the storages behind them
    and those of the op's operands."""
    from triton.runtime import driver

    driver.set_active(Driver())
    for op, launcher, operands, _ in shipped():
        tensors = [t for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)]
        for launch in launches(launcher, *operands):
            names = written(launch)
            given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
            stored = storages(given[n] for n in names)
            print(json.dumps([op, launch.kernel.__name__, names, stored, storages(tensors)]))


def written(launch):
    table, names = triton_kernel_wrap.kernel_side_table, launch.kernel.arg_names
    constants = {k: v for k, v in launch.options.items() if k in names}
    return triton_kernel_wrap.get_mutated_tensors(
        table.add_kernel(launch.kernel),
        table.add_constant_args(constants),
        dict(zip(names, launch.args, strict=False)),
        {},
    )


def storages(tensors):
    return [t.untyped_storage()._cdata for t in tensors]


def test_shipped_kernels():
    """In a process of its own, without the interpreter."""
    done = uninterpreted("-c", PROGRAM, path=[FOLDER, FOLDER.parent])
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {op for op, *_ in found} == {op for op, *_ in shipped()}
    for op, kernel, names, stored, operands in found:
        assert names, (op, kernel)
        assert len({*stored}) == len(stored), (op, kernel, names)
        assert not {*stored} & {*operands}, (op, kernel, names)


@pytest.fixture
def graph():
    """Of a launch that writes two of its three tensors."""
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    launch = graph.call_function(
        triton_kernel_wrap.triton_kernel_wrapper_functional,
        kwargs={
            "kwargs": {"x_ptr": x, "y_ptr": y, "z_ptr": z},
            "tensors_to_clone": ["y_ptr", "z_ptr"],
        },
    )
    graph.output(launch)
    return graph


def test_each_tensor_written_once(graph):
    check_written(graph, "an op")


def test_one_tensor_written_twice(graph):
    y, z = graph.find_nodes(op="placeholder")[1:]
    z.replace_all_uses_with(y)
    with pytest.raises(RuntimeError, match=r"an op to write one tensor .* \['y_ptr', 'z_ptr'\]"):
        check_written(graph, "an op")


def test_an_operand_written(graph):
    x, y, _ = graph.find_nodes(op="placeholder")
    with graph.inserting_after(y):
        graph.call_function(torch.ops.aten.copy_.default, (x, y))
    with pytest.raises(RuntimeError, match="an op to write to its operands"):
        check_written(graph, "an op")
