"""``fusedbwd.compile``: a module trained as before, with its backward fused.

The module is compiled by torch.compile with Inductor; our passes run inside, on the joint
graph (fusion) and on the backward's final graph (kernel launches). Nothing outside these
compilations is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.nn.parallel import DistributedDataParallel

from fusedbwd import compat, passes
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError, UnsupportedError
from fusedbwd.fuse import expand_pass, fuse
from fusedbwd.graph import gradient_nodes, lay_as_before, results
from fusedbwd.limits import Limits, hooks_guarded, unbatched, warn_if_untested
from fusedbwd.precision import in_force
from fusedbwd.report import Report


@dataclass
class Record:
    """What is known of one compiled module, for :func:`report`.

    Attributes:
        limits: what Dynamo gave up on.
        graphs: the reports of each graph that has run in the module, by the graph's identity, in
            the order of first runs; none in that of a graph without a backward.
    """

    limits: Limits
    graphs: dict[int, list[Report]] = field(default_factory=dict)


_running: ContextVar[Record | None] = ContextVar("fusedbwd_running", default=None)
"""The record of the compiled module whose forward is running."""


def compile(
    module: nn.Module,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    config: Config | None = None,
) -> nn.Module:
    """Compiles ``module`` in place, with a fused backward, and returns it.

    The module keeps its class, parameters and ``state_dict`` keys. Copies and unpickled
    modules are not compiled; compile them in turn. Modules of one class and configuration,
    such as the layers of a model, share what is compiled, as under ``nn.Module.compile``. Of a
    ``DistributedDataParallel``, the module that it wraps is compiled. Where part of it runs as
    eager PyTorch, or torch is untested, a :class:`FusedBwdWarning` says so once
    (:mod:`fusedbwd.limits`).

    Args:
        module: any module that torch.compile takes.
        dynamic, fullgraph: as for ``torch.compile``.
        config: what to fuse; by default everything.

    Raises:
        UnsupportedError: ``module`` is not an ``nn.Module``.
        FusionError, VerificationError: from the first call or backward, as ``config`` asks.
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedError(f"fusedbwd.compile takes an nn.Module, got {type(module).__name__}")
    warn_if_untested()
    inner = module
    while isinstance(inner, DistributedDataParallel):  # whose own forward never is in a graph
        inner = inner.module
    compile_with(inner, config or Config(), dynamic=dynamic, fullgraph=fullgraph)
    return module


def compile_with(
    module: nn.Module, config: Config, inner_compile: Callable | None = None, **options: Any
) -> None:
    """Compiles ``module`` in place through :class:`Backend`; ``options`` are torch.compile's."""
    call = _compilable(module)

    @functools.cache
    def compiled(precision: str) -> Callable:
        return torch.compile(call, backend=Backend(config, precision, inner_compile), **options)

    frame = getattr(module.forward, "__code__", type(module))
    record = Record(Limits(type(module).__name__, frame))

    @torch.compiler.assume_constant_result  # so that it is run, not traced
    def note_traced() -> None:
        record.limits.traced()

    @functools.wraps(call)
    def recorded(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():  # a part of another module's graph
            note_traced()
            return call(*args, **kwargs)
        token = _running.set(record)
        try:
            with hooks_guarded, record.limits.watching():
                return compiled(in_force())(*args, **kwargs)
        except BackendCompilerFailed as error:  # Dynamo's wrapper
            if isinstance(error.inner_exception, FusedBwdError):
                raise error.inner_exception from None
            raise
        finally:
            _running.reset(token)

    recorded.record = record  # type: ignore[attr-defined]
    module._compiled_call_impl = recorded


def _record_of(module: nn.Module) -> Record | None:
    return getattr(module._compiled_call_impl, "record", None)


def _compilable(module: nn.Module) -> Callable:
    """The call of ``module`` as Dynamo is to see it.

    Dynamo passes over ``nn.Module``'s own frame, so that hooks (FSDP's, say) run outside any
    graph, and begins at the forward. It does not begin at a forward defined in torch.nn, that of
    nn.TransformerEncoderLayer for one: such a call gets a frame of ours.
    """
    call = module._call_impl
    if not trace_rules.check(module.forward):
        return call

    def framed(*args, **kwargs):
        return call(*args, **kwargs)

    # Dynamo counts recompilations by code object; modules that have nothing else in common
    # would share this one.
    framed.__code__ = framed.__code__.replace()
    return framed


def report(module: nn.Module) -> Report:
    """What has been fused so far in ``module`` and its compiled submodules, and what not.

    Complete after the first backward; graphs compiled later, for other shapes, are added. A
    graph that several submodules share counts for each.

    Raises:
        UnsupportedError: neither the module nor a submodule was compiled by fusedbwd.
    """
    records = [record for m in module.modules() if (record := _record_of(m)) is not None]
    if not records:
        raise UnsupportedError(
            f"{type(module).__name__} was not compiled: call fusedbwd.compile(module) first"
        )
    graphs = {graph for record in records for graph in record.graphs}
    merged = Report(notes=[_compiled(len(graphs))])
    for record in records:
        for reports in record.graphs.values():
            for one in reports:
                merged = merged.merged(one)
        merged = merged.merged(Report(notes=record.limits.notes))
    return merged


def _compiled(graphs: int) -> str:
    if not graphs:
        return (
            "nothing is compiled: there was no call, or only one as a part of another compiled "
            "module or past the recompile limit, or torch.compile is switched off"
        )
    return f"{graphs} graph{'s' * (graphs != 1)} compiled"


@dataclass(frozen=True)
class Backend:
    """A torch.compile backend: Inductor, with the fusions in its joint-graph pass.

    Dynamo reuses code that an equal backend has compiled, and compiles anew for another.

    Attributes:
        config: what to fuse.
        precision: of float32 matmuls, in force while it compiles. Dynamo's own guard, on
            whether TF32 is allowed, takes "high" and "medium" for the same.
        inner_compile: compiles the partitioned graphs, instead of Inductor's compile_fx_inner.
    """

    config: Config
    precision: str
    inner_compile: Callable | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        reports: list[Report] = []

        def fuse_pass(graph: fx.Graph) -> None:
            if gradient_nodes(graph):
                before = results(graph)
                reports.append(fuse(graph, self.config))
                lay_as_before(graph, before)
            else:  # no backward is wanted of this graph
                expand_pass(graph)

        fusing = passes.Pass("fuse", fuse_pass, self.config.key())
        settings = {
            "joint_custom_pre_pass": passes.after_users("joint_custom_pre_pass", fusing),
            **passes.launching(self.config),
        }
        # AOTAutograd's own cache would skip the joint pass, and with it the report and the
        # checks; Inductor's cache of compiled graphs, which is where the time goes, stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Any = compile_fx(
                gm,
                example_inputs,
                inner_compile=self._compile_inner,
                config_patches=settings,
                decompositions=compat.decompositions(),
            )

        @functools.wraps(compiled)
        def recorded(*args):
            if (record := _running.get()) is not None:
                record.graphs[id(reports)] = reports
                record.limits.graph_runs += 1
            return compiled(*args)

        return recorded

    def _compile_inner(self, gm: fx.GraphModule, example_inputs: Sequence, **options) -> Any:
        with compat.late_allocations():
            compiled = (self.inner_compile or compile_fx_inner)(gm, example_inputs, **options)
        return unbatched(compiled, gm) if options.get("is_backward") else compiled
