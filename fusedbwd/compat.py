"""Everything that differs between torch releases (2.11 to 2.14), each with its release."""

from __future__ import annotations

import contextlib
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._dynamo import eval_frame
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, graph_break_reasons
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa, memory
from torch._inductor.codecache import FxGraphCache
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten

KEPT_WHOLE = (
    aten.silu.default,
    aten.silu_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
)
"""Composite ops that tracing keeps as single nodes, forward beside backward."""

TESTED = (2, 11), (2, 14)
"""The oldest and the newest release of torch that the tests are run with."""


def tested() -> bool:
    """Whether this torch is between those, development versions of them included."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return TESTED[0] <= release <= TESTED[1]


def graph_breaks() -> list[GraphCompileReason]:
    """Why Dynamo has broken graphs, since it was last reset: reasons with the user's stack."""
    return graph_break_reasons


def recompile_limits_hit() -> int:
    """How often Dynamo has given up on a frame because it was compiled too often."""
    return sum(n for why, n in counters["unimplemented"].items() if why.startswith(_LIMIT))


def given_up() -> Counter[str]:
    """How often Dynamo has met what it cannot trace, by reason. Where that is in a loop it leaves
    the whole frame to eager PyTorch, and :func:`graph_breaks` has no entry."""
    found = counters["unimplemented"].items()
    return Counter({why: n for why, n in found if not why.startswith(_LIMIT)})


_LIMIT = "Dynamo recompile limit exceeded"


def under_function_transform() -> bool:
    """Whether a transform of ``torch.func`` is active, under which Dynamo compiles nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def compiling() -> bool:
    """Whether Dynamo is not switched off."""
    return not torch._dynamo.config.disable and eval_frame._stance.stance != "force_eager"


def has_compiled(code: object) -> bool:
    """Whether Dynamo has something compiled for ``code``, since it was last reset."""
    if not isinstance(code, types.CodeType):
        return False
    return bool(eval_frame._debug_get_cache_entry_list(code))


def is_batched(argument: object) -> bool:
    """Whether ``argument`` is a tensor that autograd's own vmap runs over."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return isinstance(argument, torch.Tensor) and is_batched(argument)


class _Decompositions(dict):
    """A decomposition table that pickles as how it is made.

    From 2.13 on the table is part of Inductor's cache key, and a table of functions, which
    cannot be pickled, turns the cache off. What is in it, our passes' identities tell.
    """

    def __reduce__(self):
        return decompositions, ()


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Inductor's decomposition table without the ops of :data:`KEPT_WHOLE`."""
    table = select_decomp_table()
    return _Decompositions((op, fn) for op, fn in table.items() if op not in KEPT_WHOLE)


def size_source(name: str) -> ConstantSource:
    """A source that names an open size in error messages."""
    return ConstantSource(name)


def full_decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Inductor's own decomposition table."""
    return select_decomp_table()


def remove_noop_ops(graph: torch.fx.Graph) -> None:
    """Inductor's removal of clones, same-dtype casts and slices that do nothing."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops as remove

    remove(graph)


def drop_asserts(graph: torch.fx.Graph) -> None:
    """Removes metadata assertions, which tracing leaves behind ``Tensor.to`` and keep it alive."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def trace_structured(name: str, text: str) -> None:
    """Hands ``text`` to torch's structured trace, where tlparse shows it under ``name``."""
    from torch._logging import trace_structured as emit

    emit(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
    )


def scratch_is_sound() -> bool:
    """Whether a Triton kernel launched by Inductor's code gets the scratch memory it asks for.

    The C++ wrapper of torch 2.11 allocates one program's share for a whole grid, and kernels
    that make tensor descriptors then write past it. 2.13 multiplies by the grid.
    """
    return not inductor_config.cpp_wrapper or _allocates_scratch_by_grid()


@contextlib.contextmanager
def scratch_by_grid() -> Iterator[None]:
    """Makes the C++ wrapper generated inside the block allocate scratch for the whole grid."""
    if _allocates_scratch_by_grid():
        yield
        return
    original = CUDADeviceOpOverrides.cpp_scratch

    def cpp_scratch(self, idx, workspace, prefix=None):
        lines, name = original(self, idx, workspace, prefix)
        share = f"{{{workspace.size}}}"
        return [line.replace(share, share[:-1] + _BY_GRID) for line in lines], name

    with mock.patch.object(CUDADeviceOpOverrides, "cpp_scratch", cpp_scratch):
        yield


_BY_GRID = " * grid_0 * grid_1 * grid_2}"


def _allocates_scratch_by_grid() -> bool:
    scratch = CUDADeviceOpOverrides().cpp_scratch(0, TritonScratchWorkspace(1, lambda: ""))
    return scratch is not None and any("grid_0" in line for line in scratch[0])


class _InTheseThreads:
    """A context in which ``owner.name(...)`` is ``around(original, ...)`` in the threads that are
    inside. After it, after the last one's if they overlap, all is as before."""

    def __init__(self, owner: object, name: str, around: Callable) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._inside: list[int] = []
        self._changing = threading.Lock()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        here = threading.get_ident()
        with self._changing:
            if not self._inside:
                self._original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._call)
            self._inside.append(here)
        try:
            yield
        finally:
            with self._changing:
                self._inside.remove(here)
                if not self._inside:
                    setattr(self._owner, self._name, self._original)

    def _call(self, *args, **kwargs):
        if threading.get_ident() in self._inside:
            return self._around(self._original, *args, **kwargs)
        return self._original(*args, **kwargs)


no_vector_probes = _InTheseThreads(cpu_vec_isa, "valid_vec_isa_list", lambda original: [])
"""Keeps Inductor from finding out what vector instructions the CPU has, in this thread.

For any C++ it builds, 2.11 to 2.14 first start a Python that imports torch for each instruction
set, ten of them, once a process and even on a hit in the cache: up to half a minute for a wrapper
around GPU kernels, which has no use for them. Setting ``cpp.vec_isa_ok`` would do, but the answers
are cached in several places for good.
"""


def _allocated_late(reorder: Callable, *args, **kwargs) -> list[BaseSchedulerNode]:
    waiting: dict[str, BaseSchedulerNode] = {}
    order = []
    for node in reorder(*args, **kwargs):
        if isinstance(node, NopKernelSchedulerNode) and not node.unmet_dependencies:
            waiting |= dict.fromkeys(node.get_buffer_names(), node)
            continue
        for name in sorted(dep.name for dep in node.unmet_dependencies):
            if name in waiting:
                order.append(waiting.pop(name))
        order.append(node)
    return order + list(waiting.values())


late_allocations = _InTheseThreads(memory, "reorder_for_peak_memory", _allocated_late)
"""Makes Inductor allocate an uninitialized tensor just before what first needs it, in this thread.

2.11 to 2.14 order operations for the least peak memory that they estimate. An allocation is an
operation that needs nothing, so that the results of our kernels are often all allocated first,
while the GPU waits for the first launch, and take memory from then on.
"""


@contextlib.contextmanager
def sizes_guarded_in_cache() -> Iterator[None]:
    """Makes Inductor's cache keep and check guards on the sizes of the graph's inputs.

    2.11 to 2.14 keep those on integer inputs alone, which AOTAutograd's graphs have for every
    open size. Ours take tensors only: an entry made for one range of sizes would be handed out
    for another, and its guards lost.
    """

    def symints(inputs) -> list[torch.SymInt]:
        found: dict[object, torch.SymInt] = {}
        for t in inputs:
            for size in t.shape if isinstance(t, torch.Tensor) else (t,):
                if not isinstance(size, torch.SymInt) or free_unbacked_symbols(size):
                    continue
                if size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, size)
        return list(found.values())

    with mock.patch.object(FxGraphCache, "_filter_backed_symints", staticmethod(symints)):
        yield
