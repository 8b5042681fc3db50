"""What a measurement must not be fooled by, and how exports behave while they are measured."""

import threading

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fusedbwd import bench, export_backward
from fusedbwd.problems import PROBLEMS
from fusedbwd.verify import contract_violations, verify

pytestmark = pytest.mark.gpu


@pytest.fixture(params=PROBLEMS)
def exported(request):
    problem = PROBLEMS[request.param]
    module = problem.build(device="cuda", **problem.small)
    return problem, module, export_backward(module, saved=problem.schema(module))


def test_one_variant_against_itself():
    """The ratio of two medians of one variant is 1; anything else would be the clock's doing."""
    problem = PROBLEMS["ffn_gelu_backward"]
    module = problem.build(device="cuda")
    bwd = export_backward(module, saved=problem.schema(module))
    fns = {name: lambda inputs: bwd(**inputs) for name in ("first", "second")}
    result = bench.bench_case(problem, module, fns, (16, 919), calls=100)
    first, second = result.timings
    assert first.ok and second.ok
    assert abs(first.p50_ms / second.p50_ms - 1) <= 0.03


def kernels_of(call) -> list[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profiled.events() if e.device_type == DeviceType.CUDA]


def test_a_call_does_not_depend_on_addresses_or_calls_before(exported):
    """Over a hundred calls on moving tensors: plain tensors, the same kernels, no new threads."""
    problem, module, bwd = exported
    moving = bench._MovingInputs(inputs := problem.inputs(module, 2, 33))
    first = bwd(**moving.next())
    threads, kernels = threading.active_count(), kernels_of(lambda: bwd(**moving.next()))
    for call in range(110):
        given = moving.next()
        with torch.set_grad_enabled(call % 2 == 0):
            outputs = bwd(**given)
        assert all(map(torch.equal, outputs, first))
    assert all(type(o) is Tensor and o.isfinite().all() for o in outputs)
    assert not contract_violations(bwd.schema, given, outputs)
    assert all(torch.equal(t, inputs[n]) for n, t in given.items() if isinstance(t, Tensor))
    assert threading.active_count() == threads
    assert kernels_of(lambda: bwd(**moving.next())) == kernels
    assert all(check.ok for check in verify(problem, module, bwd, [(2, 33)], seed=7, rounds=10))
