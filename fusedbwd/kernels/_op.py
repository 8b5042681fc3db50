"""How a fused op is declared: one function, used at the foot of every kernel file.

An op is a plain ``torch.library`` op with three implementations. On a CPU it runs its
reference; on a GPU its launcher, eagerly; and when Inductor compiles a graph for a GPU,
:mod:`fusedbwd.launch` traces the same launcher, so that the compiler itself launches the
Triton kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch._library.triton import is_wrap_triton_enabled, set_wrap_triton_enabled
from torch.utils import _pytree as pytree

NAMESPACE = "fusedbwd"
LAUNCHERS: dict[torch._ops.OpOverload, Callable] = {}
"""Each fused op's launcher, by overload; filled while the kernel files are imported."""

_library = torch.library.Library(NAMESPACE, "DEF")
# H200. Stands in for a GPU that is not there (the interpreter, compilation for a target).
_DEFAULT_SM_COUNT = 132


def define_op(signature: str, *, reference: Callable, launcher: Callable, fake: Callable):
    """Declares ``fusedbwd::<signature>`` and returns its default overload.

    Args:
        signature: a torch schema, ``"name(Tensor grad, ...) -> (Tensor, Tensor)"``.
        reference: plain PyTorch, the definition of what the op computes; runs on any device
            and is what the op does on a CPU.
        launcher: allocates the outputs and launches the kernels through :func:`launch`; may
            use aten ops. Traceable by ``make_fx`` with symbolic sizes.
        fake: returns empty outputs of the right shape and dtype.
    """
    name = signature.partition("(")[0]
    run = _float64_by(reference, launcher)
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(signature, tags=tags)
    _library.impl(name, _without_autocast(reference), "CPU")
    _library.impl(name, eager(run), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    LAUNCHERS[op] = run
    return op


def _without_autocast(reference: Callable) -> Callable:
    """``reference`` in the dtypes that it says, whatever autocast the caller is in."""

    def run(*args):
        with torch.autocast("cpu", enabled=False):
            return reference(*args)

    return run


def _float64_by(reference: Callable, launcher: Callable) -> Callable:
    """``launcher``, but ``reference`` for float64 tensors: the kernels compute in float32."""

    def run(*args):
        tensors = (a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor))
        double = any(t.dtype == torch.float64 for t in tensors)
        return (reference if double else launcher)(*args)

    return run


def eager(launcher: Callable) -> Callable:
    """``launcher`` with its kernels launched at once, on the device of its first tensor."""

    def allocated(*args):
        triton.set_allocator(_scratch)
        return launcher(*args)

    def run(*args):
        first = pytree.tree_leaves(args)[0]
        with set_wrap_triton_enabled(False), torch.cuda.device_of(first):
            # In a context of its own: a caller's own allocator stays set.
            return contextvars.copy_context().run(allocated, *args)

    return run


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for what a kernel asks of its launch: tensor descriptors made on the device."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher asked for: the kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple
    args: tuple
    options: dict[str, Any]


_recorded: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar(
    "recorded_launches", default=None
)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collects launches instead of making them; launchers may then run on meta tensors."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def launch(kernel, grid: tuple) -> Callable:
    """The launch of ``kernel`` over ``grid``: run when eager, traced under ``make_fx``."""
    if (launches := _recorded.get()) is not None:
        return lambda *args, **options: launches.append(Launch(kernel, grid, args, options))
    if not is_wrap_triton_enabled():
        return kernel[grid]
    return torch.library.wrap_triton(kernel)[grid]


def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``: how many programs fill it."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _DEFAULT_SM_COUNT


def next_power_of_2(n: int) -> int:
    """The least power of two not below ``n`` (Triton's tile widths must be one)."""
    return triton.next_power_of_2(n)
