"""Backward graph → compiled code, by Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from fusedbwd import compat, passes
from fusedbwd.config import Config
from fusedbwd.graph import value


@dataclass
class CompiledBackward:
    """What Inductor made of a backward graph.

    Attributes:
        run: takes the list of input tensors (and empties it), returns the gradients.
        source: the generated wrapper with the kernels in it.
    """

    run: Callable[[list], list]
    source: str


def compile_backward(gm: fx.GraphModule, fake_mode, config: Config) -> CompiledBackward:
    """Compiles a backward graph for the sizes, open or fixed, in its placeholders' metadata."""
    fakes = [value(n) for n in gm.graph.find_nodes(op="placeholder")]
    settings = passes.launching(config)
    on_gpu = any(t.device.type == "cuda" for t in fakes)
    cpp_wrapper = on_gpu and (inductor_config.cpp_wrapper or config.cpp_wrapper)
    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(cpp_wrapper=cpp_wrapper, **settings))
        if cpp_wrapper:
            stack.enter_context(inductor_config.patch(get_cpp_wrapper_config()))
            stack.enter_context(compat.scratch_by_grid())
            stack.enter_context(compat.no_vector_probes())
        stack.enter_context(compat.sizes_guarded_in_cache())
        stack.enter_context(compat.late_allocations())
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(fake_mode)))
        stack.enter_context(V.set_fake_mode(fake_mode))
        stack.enter_context(torch.no_grad())
        joint_graph_passes(gm)
        compiled = compile_fx_inner(
            gm, fakes, static_input_idxs=(), cpp_wrapper=cpp_wrapper, is_inference=True
        )
    return CompiledBackward(compiled, getattr(compiled, "source_code", ""))
