"""``fusedbwd.compile``: a module trained as before, with its backward fused.

The module is compiled by torch.compile with Inductor; our passes run inside, on the joint
graph (fusion) and on the backward's final graph (kernel launches). Nothing outside these
compilations is changed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
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
    modules are not compiled; compile them in turn.

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
    backend = Backend(config or Config())
    compiled = torch.compile(
        _framed(module._call_impl), backend=backend, dynamic=dynamic, fullgraph=fullgraph
    )
    module._compiled_call_impl = _raising_ours(compiled)
    _backends[module] = backend
    return module


def _framed(call: Callable) -> Callable:
    """``call`` behind a frame of our own: Dynamo does not look into frames of torch.nn, where
    modules such as nn.TransformerEncoderLayer begin. The frame also reads the precision of
    float32 matmuls, so that Dynamo compiles anew where it changes; its own guard, on whether
    TF32 is allowed, takes "high" and "medium" for the same."""

    @functools.wraps(call)
    def inner(precision: str, *args, **kwargs):
        assert precision is not None  # only what is read is guarded on
        return call(*args, **kwargs)

    return inner


def _raising_ours(call: Callable) -> Callable:
    """``call``, from :func:`_framed`, with the precision in force as its first argument, and with
    our own exceptions freed from Dynamo's wrapper around a backend's errors."""

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        try:
            return call(in_force(), *args, **kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, FusedBwdError):
                raise error.inner_exception from None
            raise

    return wrapped


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
    merged = Report()
    for backend in backends:
        for one in backend.reports:
            merged = merged.merged(one)
    return merged


class Backend:
    """A torch.compile backend: Inductor, with the fusions in its joint-graph pass.

    Attributes:
        config: what to fuse.
        reports: one report per joint graph, in the order of compilation.
        inner_compile: what compiles the partitioned graphs; inspection puts itself before it.
    """

    def __init__(self, config: Config):
        self.config = config
        self.reports: list[Report] = []
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
                inner_compile=self.inner_compile,
                config_patches=settings,
                decompositions=compat.decompositions(),
            )
        return compiled

    def _fuse(self, graph: fx.Graph) -> None:
        if gradient_nodes(graph):
            self.reports.append(fuse(graph, self.config))
        else:  # no backward is wanted of this graph
            expand_pass(graph)
