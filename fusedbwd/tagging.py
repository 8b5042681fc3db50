"""Naming intermediates: how a forward tells which of its tensors a backward is given.

``tag`` is the identity. Only while :func:`collect` is active does it also record the tensor
under its name, so a tagged forward costs nothing and compiles as if it were not tagged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from fusedbwd.errors import SchemaError

_collected: ContextVar[dict[str, Tensor] | None] = ContextVar("fusedbwd_collected", default=None)


def tag(tensor: Tensor, name: str) -> Tensor:
    """Returns ``tensor`` itself; an active :func:`collect` records it as ``name``.

    Raises:
        SchemaError: ``name`` was already tagged within this collection.
    """
    if torch.compiler.is_dynamo_compiling():
        return tensor
    collected = _collected.get()
    if collected is not None:
        if name in collected:
            raise SchemaError(f"the intermediate {name!r} is tagged twice in one forward")
        collected[name] = tensor
    return tensor


@contextmanager
def collect(module: nn.Module | None = None) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that fills with the intermediates tagged inside the block, by name.

    Args:
        module: called eagerly inside the block, with its submodules, even where it was
            compiled in place: a compiled forward tags nothing.
    """
    collected: dict[str, Tensor] = {}
    token = _collected.set(collected)
    modules = module.modules() if module is not None else ()
    compiled = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    for m, _ in compiled:
        m._compiled_call_impl = None
    try:
        yield collected
    finally:
        _collected.reset(token)
        for m, call in compiled:
            m._compiled_call_impl = call
