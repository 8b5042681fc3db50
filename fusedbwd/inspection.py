"""What fusion and the compiler made of one backward, as text and files.

Shows the fusions, then what each generated backward calls in order, then the sources; and
what the GPU compiler makes of our own Triton kernels for a named target, which needs no GPU.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fusedbwd import training
from fusedbwd.codegen import compile_backward
from fusedbwd.config import Config
from fusedbwd.errors import UnsupportedError
from fusedbwd.fuse import fuse
from fusedbwd.graph import value
from fusedbwd.kernels._op import LAUNCHERS, Launch
from fusedbwd.partition import backward_graph
from fusedbwd.problems import get_problem
from fusedbwd.report import Report
from fusedbwd.resources import Resources, compile_launch, launches
from fusedbwd.trace import open_sizes, trace_joint
from fusedbwd.wrapper import Kernel, KernelCall, read_calls, read_kernels


@dataclass(frozen=True)
class Backward:
    """One compiled backward graph.

    Attributes:
        name: what its files are called.
        source: Inductor's wrapper, with the kernels in it.
        launches: what its fused ops launch on a GPU: (op, launch), in order. Open sizes have
            the values that compilation assumed for them.
    """

    name: str
    source: str
    launches: list[tuple[str, Launch]]

    @property
    def calls(self) -> list[KernelCall]:
        """What one call of it runs, in order."""
        return read_calls(self.source)

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that Inductor generated or took over, in order of definition."""
        return read_kernels(self.source)


@dataclass(frozen=True)
class Inspection:
    """A module's backwards: one as exported, or one per graph that torch.compile made."""

    title: str
    report: Report
    backwards: list[Backward]

    def fused_kernels(self) -> list[Kernel]:
        """The Triton kernels of the fused ops, as written; on a CPU their reference runs."""
        found = {
            launch.kernel.__name__: inspect.getsource(launch.kernel.fn)
            for backward in self.backwards
            for _, launch in backward.launches
        }
        return [Kernel(name, "Triton, fusedbwd", source) for name, source in found.items()]

    def resources(self, target: str) -> list[Resources]:
        """The fused ops' kernels compiled for ``target``, each specialisation once.

        Raises:
            UnsupportedError: an unknown target, or TRITON_INTERPRET is set.
        """
        compiled: dict[str, Resources] = {}
        for backward in self.backwards:
            for op, launch in backward.launches:
                made = compile_launch(launch, target, f"{op}: {launch.kernel.__name__}")
                compiled.setdefault(made.ptx, made)
        return list(compiled.values())

    def overview(self) -> str:
        """The fusions, and what each backward calls."""
        parts = [self.title, str(self.report)]
        for backward in self.backwards:
            rows = [(i, c.name, c.kind, c.origin) for i, c in enumerate(backward.calls)]
            head = ["", "call", "by", "computes"]
            parts.append(f"{backward.name}: {len(rows)} calls")
            parts.append(tabulate(rows, headers=head))
        return "\n\n".join(parts) + "\n"

    def sources(self) -> str:
        """The fused kernels as written, then each generated wrapper."""
        parts = [f"# {k.name} ({k.kind})\n{k.source}" for k in self.fused_kernels()]
        parts += [f"# {b.name}, as generated\n{b.source}" for b in self.backwards]
        return "\n\n".join(parts)

    def write(self, folder: Path) -> list[Path]:
        """Writes ``report.txt``, each wrapper and each kernel's source; returns the paths."""
        files = {"report.txt": self.overview()}
        for backward in self.backwards:
            files[f"{backward.name}.py"] = backward.source
            for k in backward.kernels:
                suffix = "cpp" if k.kind.startswith("C++") else "py"
                files[f"kernels/{backward.name}/{k.name}.{suffix}"] = k.source
        files |= {f"kernels/{k.name}.py": k.source for k in self.fused_kernels()}
        return [_write(folder / name, text) for name, text in files.items()]


def inspect_problem(
    name: str,
    *,
    small: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: Config | None = None,
    case: tuple[int, int] | None = None,
) -> Inspection:
    """Compiles the backward of a reference problem for open sizes, without running it.

    Args:
        small: test dimensions instead of the problem's own; neither allocates the weights.
        case: batch size and sequence length, for the variant that an export would use there:
            routes of matmuls depend on the number of tokens. By default the first one compiled.
        dtype: of the parameters; by default the problem's own.
        device: what it is compiled for; "cuda" needs a GPU.

    Raises:
        UnsupportedError: there is no such problem.
    """
    problem = get_problem(name)
    dtype = dtype or problem.dtype
    module = problem.build(device="meta", dtype=dtype, **(problem.small if small else {}))
    config = replace(config or Config(), cpp_wrapper=False)
    schema = problem.schema(module)
    hints = dict(zip(schema.symbols, case, strict=True)) if case else None
    ones = {name: 1 for name, size in (hints or {}).items() if size == 1}
    shape_env, sizes = open_sizes(schema.symbols, ones, hints)
    joint = trace_joint(
        module, schema, device=torch.device(device), sizes=sizes, shape_env=shape_env
    )
    report = fuse(joint.gm.graph, config)
    graph = backward_graph(joint)
    launched = fused_launches(graph.graph)
    with inductor_config.patch(cpp_wrapper=False):
        compiled = compile_backward(graph, joint.fake_mode, config)
    title = f"{name}{', small' if small else ''}, {dtype}, compiled for {device}"
    if case:
        title += f", {case[0]}x{case[1]} tokens"
    return Inspection(title, report, [Backward("backward", compiled.source, launched)])


def inspect_module(
    module: nn.Module, example_args: Sequence[Any], *, config: Config | None = None
) -> Inspection:
    """Compiles ``module`` with :func:`fusedbwd.compile` and runs it forward and backward once.

    Args:
        module: on its device; it stays compiled, and its parameters get gradients.
        example_args: the forward's arguments, positionally.

    Raises:
        UnsupportedError: no result of the forward requires grad.
    """
    backwards: list[Backward] = []

    @functools.wraps(compile_fx_inner)
    def recording(gm: fx.GraphModule, example_inputs, **kwargs):
        launched = fused_launches(gm.graph)
        compiled: Any = compile_fx_inner(gm, example_inputs, **kwargs)
        if kwargs.get("is_backward"):
            name = f"backward_{len(backwards)}"
            backwards.append(Backward(name, compiled.source_code, launched))
        return compiled

    training.compile_with(module, config or Config(), recording)
    with inductor_config.patch(cpp_wrapper=False):
        leaves = pytree.tree_leaves(module(*example_args))
        outputs = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            raise UnsupportedError(
                f"{type(module).__name__}: expected a result that requires grad, got none"
            )
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    title = f"{type(module).__name__}, compiled for training on {outputs[0].device}"
    return Inspection(title, training.report(module), list(backwards))


def fused_launches(graph: fx.Graph) -> list[tuple[str, Launch]]:
    """What the fused ops of ``graph`` launch on a GPU, as (op, launch), in order.

    Args:
        graph: with fake values in its metadata; open sizes count as their hints.
    """
    return [
        (node.target.name().partition("::")[2], launch)
        for node in graph.nodes
        if node.op == "call_function" and node.target in LAUNCHERS
        for launch in launches(LAUNCHERS[node.target], *map_aggregate(node.args, _example))
    ]


def write_resources(
    folder: Path, resources: Sequence[Resources], *, ptx: bool, sass: bool
) -> list[Path]:
    """Writes ``resources.json`` and, as asked, the code of each kernel; returns the paths."""
    figures = [r.summary() for r in resources]
    paths = [_write(folder / "resources.json", json.dumps(figures, indent=1) + "\n")]
    for index, r in enumerate(resources):
        stem = f"{index}-{r.kernel.partition(': ')[2]}.{r.target}"
        if ptx:
            paths.append(_write(folder / "kernels" / f"{stem}.ptx", r.ptx))
        if sass:
            paths.append(_write(folder / "kernels" / f"{stem}.sass", r.sass()))
    return paths


def _example(argument: Any) -> Any:
    """A meta tensor, or the number, that stands for an argument of a fused op."""
    if isinstance(argument, (list, tuple)):
        return [_example(a) for a in argument]
    val = value(argument)
    if isinstance(val, torch.Tensor):
        sizes, strides = (tuple(map(_hint, x)) for x in (val.shape, val.stride()))
        return torch.empty_strided(sizes, strides, dtype=val.dtype, device="meta")
    return _hint(val)


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
