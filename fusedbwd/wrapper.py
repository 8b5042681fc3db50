"""Reading what Inductor generated: the kernels in a wrapper, and the order of its calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from triton.runtime.jit import KernelInterface

from fusedbwd import kernels
from fusedbwd.errors import UnsupportedError

_FUSED_KERNELS = {
    name
    for module in vars(kernels).values()
    if isinstance(module, ModuleType)
    for name, value in vars(module).items()
    if isinstance(value, KernelInterface)
}
"""Names of the Triton functions under fusedbwd.kernels."""

_CUBLAS = {"mm", "mm_dtype", "bmm", "bmm_dtype", "addmm", "baddbmm", "_scaled_mm", "_int_mm"}
_ORIGIN = re.compile(r"Original ATen: \[(.*?)\]")


@dataclass(frozen=True)
class Kernel:
    """A kernel that the wrapper defines.

    Attributes:
        name: what the wrapper calls it.
        kind: "Triton, fusedbwd", "Triton, Inductor", "Triton, user" or "C++, Inductor".
        source: its own source text.
    """

    name: str
    kind: str
    source: str


@dataclass(frozen=True)
class KernelCall:
    """One call, of a kernel, a library routine or an op.

    Attributes:
        name: what is called.
        kind: a kernel's kind, or "library (…)", "op, fusedbwd" or "op".
        origin: the aten ops that it computes, where the wrapper says.
    """

    name: str
    kind: str
    origin: str = ""


def read_kernels(source: str) -> list[Kernel]:
    """The kernels defined in ``source``, a Python wrapper that Inductor generated.

    Raises:
        UnsupportedError: ``source`` is not Python.
    """
    found = []
    for node in _parse(source).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        compiler = _dotted(node.value.func)
        texts = [a.value for a in node.value.args if isinstance(a, ast.Constant)]
        if compiler.startswith("async_compile.") and isinstance(node.targets[0], ast.Name):
            text = str(texts[-1]) if texts else ""
            kind = "C++, Inductor"
            if compiler == "async_compile.triton":
                kind = f"Triton, {_author(str(texts[0]), text)}"
            found.append(Kernel(node.targets[0].id, kind, text.strip() + "\n"))
    return found


def read_calls(source: str) -> list[KernelCall]:
    """What one call of the wrapper ``source`` runs, in order.

    Raises:
        UnsupportedError: ``source`` is not Python.
    """
    tree, lines = _parse(source), source.splitlines()
    kinds = {kernel.name: kernel.kind for kernel in read_kernels(source)}
    aliases = {
        target.id: _dotted(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    on_gpu = "empty_strided_cuda(" in source or "get_raw_stream(" in source
    calls = []
    for node in _calls_in_order(tree):
        head, dot, tail = _dotted(node.func).partition(".")
        name = aliases.get(head, head) + dot + tail
        if head in kinds and tail in ("", "run"):
            calls.append(KernelCall(head, kinds[head], _origin(lines, node)))
        elif head == "extern_kernels":
            library = "cuBLAS" if on_gpu and tail in _CUBLAS else "ATen"
            calls.append(KernelCall(tail, f"library ({library})", _origin(lines, node)))
        elif name.startswith("torch.ops."):
            op = name.removeprefix("torch.ops.")
            author = {"aten": "library (ATen)", "fusedbwd": "op, fusedbwd"}
            kind = author.get(op.partition(".")[0], "op")
            calls.append(KernelCall(op, kind, _origin(lines, node)))
    return calls


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise UnsupportedError(
            f"expected Inductor's Python wrapper, got text that is not Python: {error}"
        ) from None


def _calls_in_order(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls in the wrapper's entry point and, before it, in the parts that it is cut into."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (
            function.name == "call" or function.name.startswith("partition_")
        ):
            found = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
            yield from sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; "" for anything else."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _author(function: str, source: str) -> str:
    if function in _FUSED_KERNELS:
        return "fusedbwd"
    return "user" if "user_autotune" in source else "Inductor"


def _origin(lines: list[str], node: ast.Call) -> str:
    """The ops named in the comment right above the call."""
    above = [line for line in lines[: node.lineno - 1] if "get_raw_stream(" not in line][-1:]
    match = _ORIGIN.search(above[0]) if above else None
    return match.group(1).replace("aten.", "") if match else ""
