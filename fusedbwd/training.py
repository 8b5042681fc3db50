"""``fusedbwd.compile``: a module trained as before, with its backward fused.

The module is compiled by torch.compile with Inductor; our passes run inside, on the joint
graph (fusion) and on the backward's final graph (kernel launches). Nothing outside these
compilations is changed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from fusedbwd import compat, passes
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError, UnsupportedError
from fusedbwd.fuse import expand_pass, fuse
from fusedbwd.graph import gradient_nodes
from fusedbwd.limits import Limits, hooks_guarded, unbatched, warn_if_untested
from fusedbwd.precision import in_force
from fusedbwd.report import Report

_backends: weakref.WeakKeyDictionary[nn.Module, Backend] = weakref.WeakKeyDictionary()
"""The backend of each compiled module, for :func:`report`."""


def compile(
    module: nn.Module,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    config: Config | None = None,
) -> nn.Module:
    """Compiles ``module`` in place, with a fused backward, and returns it.

    The module keeps its class, parameters and ``state_dict`` keys. Copies and unpickled
    modules are not compiled; compile them in turn. Where part of it runs as eager PyTorch, or
    torch is untested, a :class:`FusedBwdWarning` says so once (:mod:`fusedbwd.limits`).

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
    backend = Backend(config or Config(), type(module).__name__)
    compiled = torch.compile(
        _framed(module._call_impl), backend=backend, dynamic=dynamic, fullgraph=fullgraph
    )
    module._compiled_call_impl = _watched(compiled, backend.limits, module._call_impl)
    _backends[module] = backend
    return module


def _framed(call: Callable) -> Callable:
    """``call`` behind a frame of our own: Dynamo does not look into frames of torch.nn, where
    modules such as nn.TransformerEncoderLayer begin. The frame also reads the precision of
    float32 matmuls, so that Dynamo compiles anew where it changes; its own guard, on whether
    TF32 is allowed, takes "high" and "medium" for the same."""

    def inner(precision: str, *args, **kwargs):
        assert precision is not None  # only what is read is guarded on
        return call(*args, **kwargs)

    # Dynamo limits compilations per code object: of one that all modules shared, the layers of a
    # deep model, compiled one by one, would use up the limit.
    inner.__code__ = inner.__code__.replace()
    return functools.update_wrapper(inner, call)


def _watched(compiled: Callable, limits: Limits, call: Callable) -> Callable:
    """``compiled``, from :func:`_framed`, with the precision in force as its first argument, with
    what Dynamo gives up on noted, and with our own exceptions freed from Dynamo's wrapper around
    a backend's errors. Within another compilation it is ``call``, a part of what that compiles."""

    @torch.compiler.assume_constant_result  # so that it is run, not traced
    def note_traced() -> None:
        limits.traced()

    @functools.wraps(call)
    def watched(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            note_traced()
            return call(*args, **kwargs)
        try:
            with hooks_guarded, limits.watching():
                return compiled(in_force(), *args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, FusedBwdError):
                raise error.inner_exception from None
            raise

    return watched


def report(module: nn.Module) -> Report:
    """What has been fused so far in ``module`` and its compiled submodules, and what not.

    Complete after the first backward; graphs compiled later, for other shapes, are added.

    Raises:
        UnsupportedError: neither the module nor a submodule was compiled by fusedbwd.
    """
    backends = [_backends[m] for m in module.modules() if m in _backends]
    if not backends:
        raise UnsupportedError(
            f"{type(module).__name__} was not compiled: call fusedbwd.compile(module) first"
        )
    merged = Report(notes=[_graphs(sum(backend.graphs for backend in backends))])
    for backend in backends:
        for one in (*backend.reports, Report(notes=backend.limits.notes)):
            merged = merged.merged(one)
    return merged


def _graphs(count: int) -> str:
    if not count:
        return (
            "nothing is compiled: there was no call, or only one as a part of another compiled "
            "module, or torch.compile is switched off"
        )
    return f"{count} graph{'s' * (count != 1)} compiled"


class Backend:
    """A torch.compile backend: Inductor, with the fusions in its joint-graph pass.

    Attributes:
        config: what to fuse.
        reports: one report per joint graph, in the order of compilation.
        graphs: how many graphs Dynamo has had compiled: one for each piece between graph breaks,
            and for each set of sizes, modes and settings that was called for.
        limits: what Dynamo gave up on.
        inner_compile: what compiles the partitioned graphs; inspection puts itself before it.
    """

    def __init__(self, config: Config, module: str = ""):
        self.config = config
        self.reports: list[Report] = []
        self.graphs = 0
        self.limits = Limits(module)
        self.inner_compile: Callable = compile_fx_inner

    def __call__(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        fusing = passes.Pass("fuse", self._fuse, self.config.key())
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
        self.graphs += 1  # only now: Dynamo may have broken off, to start once more
        return compiled

    def _compile_inner(self, gm: fx.GraphModule, example_inputs: Sequence, **options) -> Any:
        compiled = self.inner_compile(gm, example_inputs, **options)
        return unbatched(compiled, gm) if options.get("is_backward") else compiled

    def _fuse(self, graph: fx.Graph) -> None:
        if gradient_nodes(graph):
            self.reports.append(fuse(graph, self.config))
        else:  # no backward is wanted of this graph
            expand_pass(graph)
