#!/usr/bin/env python
"""Measures what it costs to launch a fused op on a GPU, by the route it takes there.

A chain of small fused ops is compiled three ways: as opaque custom ops, and as kernels that
the compiler launches itself from a Python or a C++ wrapper. Also saves a compiled artefact and
loads and runs it in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner, get_cpp_wrapper_config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusedbwd import Config, passes
from fusedbwd.kernels import swiglu_backward

CHAIN = 20
WIDTH = 64


def chain(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor]:
    """``CHAIN`` fused ops, each on the result of the one before."""
    for _ in range(CHAIN):
        x = swiglu_backward(grad, x, x)[:, :WIDTH]
    return (x,)


def traced(inputs: list[torch.Tensor]) -> fx.GraphModule:
    """The chain as a graph that Inductor takes."""
    # A lambda, because torch's cache keys cannot hold a return annotation that is a string.
    return make_fx(
        lambda *a: chain(*a), decomposition_table=select_decomp_table(), tracing_mode="fake"
    )(*inputs)


def compiled(route: str, inputs: list[torch.Tensor]) -> tuple[Callable, float]:
    """The chain compiled for one route, and the seconds that took."""
    settings: dict[str, object] = {"fx_graph_cache": False}
    if route != "custom op":
        settings |= passes.launching(Config())
    cpp = route == "kernel, C++ wrapper"
    if cpp:
        settings |= {"cpp_wrapper": True, **get_cpp_wrapper_config()}
    graph = traced(inputs)
    fakes = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    start = time.perf_counter()
    with inductor_config.patch(settings), torch.no_grad():
        run = compile_fx_inner(graph, fakes, static_input_idxs=(), cpp_wrapper=cpp)
    return run, time.perf_counter() - start


def microseconds_per_op(run: Callable, inputs: list[torch.Tensor], calls: int = 200) -> float:
    """CPU time per fused op of a call that does not wait for the GPU."""
    for _ in range(20):
        run(list(inputs))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run(list(inputs))
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls / CHAIN * 1e6


def artefact(inputs: list[torch.Tensor]) -> str:
    """Saves the compiled chain, runs it in a fresh process; says how that went."""
    graph = traced(inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "chain.bin")
        expected = str(Path(folder) / "expected.pt")
        with inductor_config.patch(passes.launching(Config())), torch.no_grad():
            saved = torch._inductor.standalone_compile(graph, inputs, dynamic_shapes="from_graph")
            saved.save(path=path, format="binary")
            torch.save((inputs, *chain(*inputs)), expected)
        code = (
            "import sys, torch, fusedbwd.kernels\n"
            "run = torch._inductor.CompiledArtifact.load(path=sys.argv[1], format='binary')\n"
            "inputs, expected = torch.load(sys.argv[2])\n"
            "y = run(*inputs)\n"
            "y = y[0] if isinstance(y, (tuple, list)) else y\n"
            "print('same result' if torch.equal(y, expected) else 'WRONG RESULT')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, path, expected], capture_output=True, text=True
        )
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return f"exit {done.returncode}: {' '.join(last)}"


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    inputs = [torch.randn(8, WIDTH, device="cuda"), torch.ones(8, WIDTH, device="cuda")]
    figures: dict[str, object] = {"eager": microseconds_per_op(lambda a: chain(*a), inputs)}
    seconds = {}
    for route in ("custom op", "kernel, Python wrapper", "kernel, C++ wrapper"):
        run, seconds[route] = compiled(route, inputs)
        (y,) = run(list(inputs))
        if not torch.equal(y, *chain(*inputs)):
            print(f"error: {route} gives another result", file=sys.stderr)
            return 1
        figures[route] = microseconds_per_op(run, inputs)
    rows = [
        [k, f"{v:.1f}", f"{seconds[k]:.1f}" if k in seconds else ""] for k, v in figures.items()
    ]
    print(tabulate(rows, headers=["route", "CPU us per op", "compile s"], floatfmt=".1f"))
    figures["artefact in a fresh process"] = artefact(inputs)
    print("artefact in a fresh process:", figures["artefact in a fresh process"])
    if args.json:
        versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
        args.json.write_text(json.dumps({**versions, **figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
