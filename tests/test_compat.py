"""What is changed in torch for a while is as before afterwards, and in other threads meanwhile."""

import contextlib
import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._inductor import cpu_vec_isa, memory
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.utils import run_and_get_code

from fusedbwd import compat


def test_vector_instructions_are_not_asked_for_in_this_thread(monkeypatch):
    """And nothing remembers so: an instruction set that was told to be absent stays absent."""
    asked = []

    class Set(cpu_vec_isa.VecISA):
        def __bool__(self):
            asked.append(threading.get_ident())
            return True

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [s for s in [Set()] if s])
    with compat.no_vector_probes():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
        assert not asked
        other = threading.Thread(target=cpu_vec_isa.valid_vec_isa_list)
        other.start()
        other.join()
        assert asked == [other.ident]
    assert len(cpu_vec_isa.valid_vec_isa_list()) == 1 and len(asked) == 2


def test_no_cache_is_filled():
    caches = [
        c
        for c in (cpu_vec_isa.VecAVX512.__bool__, cpu_vec_isa.VecAMX.__bool__,
                  cpu_vec_isa.valid_vec_isa_list)
        if hasattr(c, "cache_info")
    ]  # fmt: skip
    assert cpu_vec_isa.valid_vec_isa_list in caches
    before = [c.cache_info().currsize for c in caches]
    with compat.no_vector_probes():
        cpu_vec_isa.pick_vec_isa()
    assert [c.cache_info().currsize for c in caches] == before


def test_threads_that_overlap_leave_all_as_before():
    """Whichever leaves first; and a thread that is not inside is not concerned."""
    owner = types.SimpleNamespace(name=lambda: "as it was")
    original = owner.name
    changed = compat._InTheseThreads(owner, "name", lambda was: f"not {was()}")
    first, second = changed(), changed()
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        assert other.submit(owner.name).result() == "as it was"
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert owner.name() == "as it was"
        assert other.submit(owner.name).result() == "not as it was"
        other.submit(second.__exit__, None, None, None).result()
    assert owner.name is original


@torch.library.custom_op("fusedbwd_test::fill", mutates_args={"out"})
def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x[0].expand_as(out))


def filled(x):
    results = []
    for size in (9, 7, 5):
        results.append(torch.empty(size))
        fill(results[-1], x)
        x = results[-1]
    return results


@pytest.mark.parametrize("late", [False, True])
def test_allocations_are_made_when_they_are_needed(monkeypatch, late):
    """Where Inductor's order has them all first."""

    def allocations_first(nodes, *args, **kwargs):
        return sorted(nodes, key=lambda n: not isinstance(n, NopKernelSchedulerNode))

    monkeypatch.setattr(memory, "reorder_for_peak_memory", allocations_first)
    fill.register_fake(lambda out, x: None)
    torch._dynamo.reset()
    compiled = torch.compile(filled, options={"fx_graph_cache": False})
    with compat.late_allocations() if late else contextlib.nullcontext():
        results, (source,) = run_and_get_code(compiled, torch.ones(4))
    assert [r.tolist() for r in results] == [[1.0] * n for n in (9, 7, 5)]
    found = re.findall(r"= empty_strided_cpu\(|fill\.default\(", source)
    allocations = [f.startswith("=") for f in found]
    assert allocations == ([True, False] * 3 if late else [True] * 3 + [False] * 3)
