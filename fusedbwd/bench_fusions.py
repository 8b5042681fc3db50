"""Each fusion against Inductor's own code: the measurements behind :mod:`fusedbwd.gate`.

The backward of each case of :mod:`fusedbwd.fusion_cases` is compiled twice along the same way
(traced, fused, Inductor with the Python wrapper, fixed sizes), once with the fusion and once with
every fusion off, and both are timed on the GPU: as CUDA graphs, so that the cost of launching does
not blur the kernels', in turns, each call with a cold L2, by events; the figure is the median.
Both must agree, or nothing is reported. Results stay where they fall, as the matmuls after them
would read them: halves of a packed buffer are not copied.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

from fusedbwd import gate
from fusedbwd.bench import FLUSH_BYTES, WARMUP_CALLS, environment
from fusedbwd.codegen import compile_backward
from fusedbwd.config import Config
from fusedbwd.errors import FusedBwdError, FusionError, VerificationError
from fusedbwd.fuse import fuse
from fusedbwd.fusion_cases import SUBJECTS, Case
from fusedbwd.gate import Row
from fusedbwd.graph import extract
from fusedbwd.infer import infer_schema
from fusedbwd.numerics import dtype_name, relative_l2, rounding_unit, within
from fusedbwd.patterns import PATTERNS
from fusedbwd.problems.problem import record_inputs
from fusedbwd.trace import trace_joint

_LUCK = 8  # roundings by which two right results may differ
_SUM_ERROR = 1e-5  # relative, of a float32 sum over thousands of rows


class _Program(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, fn: Callable[..., Tensor]):
        super().__init__()
        self.forward = fn


def measure(
    case: Case,
    device: torch.device,
    *,
    calls: int = 30,
    gpu: contextlib.AbstractContextManager,
) -> Row:
    """Compiles both backwards of ``case`` and times them.

    Args:
        gpu: held while the device is in use; other processes may compile meanwhile.

    Raises:
        FusionError: the fusion does not fire once and alone.
        VerificationError: the two backwards disagree.
    """
    subject = SUBJECTS[case.fusion]
    fn, shapes = subject.build(case.width, case.tokens)
    program = _Program(fn)

    def arguments(**options: Any) -> dict[str, Tensor]:
        return {n: torch.randn(s, dtype=case.dtype, **options) for n, s in shapes.items()}

    examples = arguments(device="meta")
    for name, example in examples.items():
        example.requires_grad_(name not in subject.frozen)
    schema = infer_schema(program, *examples.values(), sizes={})
    runs = [_compiled(case, program, schema, device, fused=fused) for fused in (True, False)]
    with gpu, torch.no_grad():
        generator = torch.Generator(device).manual_seed(0)
        given = arguments(device=device, generator=generator)
        inputs = list(record_inputs(schema, program, given, generator).values())
        _check_agreement(case, *(run(list(inputs)) for run in runs))
        ours, inductors = _time(runs, inputs, device, calls)
        del given, inputs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    times = (round(t, 5) for t in (ours, inductors))
    return Row(case.fusion, case.width, dtype_name(case.dtype), case.tokens, *times)


def _compiled(case: Case, program: nn.Module, schema, device: torch.device, *, fused: bool):
    """The backward of ``program``: takes the list of the schema's inputs."""
    switches = {p.name: fused and p.name == case.fusion for p in PATTERNS}
    config = Config(**switches, gate=False, cpp_wrapper=False)
    joint = trace_joint(program, schema, device=device, sizes={})
    report = fuse(joint.gm.graph, config)
    if report.counts() != ({case.fusion: 1} if fused else {}):
        raise FusionError(f"{case}: expected the fusion once and nothing else\n{report}")
    graph = extract(joint.gradients, joint.inputs, [i.name for i in schema.inputs])
    return compile_backward(fx.GraphModule(joint.gm, graph), joint.fake_mode, config).run


def _check_agreement(case: Case, ours: Sequence[Tensor], inductors: Sequence[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(ours, inductors, strict=True)):
        allowed = max(_LUCK * rounding_unit(a.dtype), _SUM_ERROR)
        error = relative_l2(a, b)
        if not within(error, allowed):
            raise VerificationError(
                f"{case}: gradient {index} differs from Inductor's by {error:.1e}, "
                f"expected at most {allowed:.1e}"
            )


def _time(runs: Sequence[Callable], inputs: list, device: torch.device, calls: int) -> list[float]:
    """The median milliseconds of each run; in turns, with the caches flushed before each call."""
    on_gpu = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
    calling = [_captured(run, inputs) if on_gpu else partial(_call, run, inputs) for run in runs]
    elapsed: list[list[Callable[[], float]]] = [[] for _ in runs]
    for turn in range(calls):
        for k in range(len(runs)):
            index = (turn + k) % len(runs)
            flush.zero_()
            elapsed[index].append(timed(calling[index], device))
    # Read only now: waiting for each call would leave the GPU idle before the next.
    return [statistics.median(read() for read in reads) for reads in elapsed]


def _call(run: Callable, inputs: list) -> None:
    run(list(inputs))


def _captured(run: Callable, inputs: list) -> Callable[[], None]:
    """A call as a CUDA graph, after some that tune and load what it launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            run(list(inputs))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(list(inputs))
    graph.replay()
    return graph.replay


def timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Calls ``call``, on a GPU between two events; returns what gives its milliseconds, for which a
    GPU is waited for."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - begin) * 1e3
        return lambda: elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()

    def milliseconds() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return milliseconds


# --- many cases at once


def measure_all(
    wanted: Sequence[Case], device: torch.device, *, jobs: int, calls: int = 30
) -> Iterator[Row | str]:
    """A row for each case, in order, or what went wrong with it.

    Args:
        jobs: processes that compile side by side; one at a time has the GPU. 0: none but this.
    """
    if jobs == 0:
        for case in wanted:
            yield _attempt(case, device, calls, contextlib.nullcontext())
        return
    spawn = get_context("spawn")  # a fork would not have CUDA
    with ProcessPoolExecutor(jobs, spawn, _take_lock, (spawn.Lock(),)) as pool:
        yield from pool.map(
            _attempt_in_worker, wanted, [device] * len(wanted), [calls] * len(wanted)
        )


_gpu_lock: Any = None  # in a worker: held by the one that uses the GPU


def _take_lock(lock) -> None:
    global _gpu_lock
    _gpu_lock = lock


def _attempt_in_worker(case: Case, device: torch.device, calls: int) -> Row | str:
    return _attempt(case, device, calls, _gpu_lock)


def _attempt(case: Case, device: torch.device, calls: int, gpu) -> Row | str:
    try:
        return measure(case, device, calls=calls, gpu=gpu)
    except Exception as error:  # one case that fails does not end the others
        return f"{case}: {type(error).__name__}: {error}"


# --- results


def table(rows: Sequence[Row], fmt: str = "simple") -> str:
    """One line per measurement, then what the gate makes of each size."""
    head = ["fusion", "width", "dtype", "tokens", "ours ms", "Inductor ms", "speed-up"]
    lines = []
    for r in rows:
        times = f"{r.ours_ms:.4f}", f"{r.inductor_ms:.4f}", f"{r.inductor_ms / r.ours_ms:.2f}"
        lines.append([r.fusion, r.width, r.dtype, r.tokens, *times])
    joined = []
    for size, gained in gate.speedups(rows).items():
        joined.append([*size, f"{gained:.2f}", "yes" if gained >= gate.THRESHOLD else "no"])
    return "\n\n".join(
        tabulate(body, headers=names, tablefmt=fmt, disable_numparse=True)
        for body, names in ((lines, head), (joined, [*head[:3], "speed-up", "fires"]))
    )


def write(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """Writes the table of this GPU to ``path``; rows that are there already and were not
    measured again stay. ``measured`` dates each fusion, ``environment`` is that of the last run.

    Raises:
        FusedBwdError: the file holds another GPU's measurements.
    """
    about = environment(device)
    old = json.loads(path.read_text()) if path.exists() else {"gpu": about["device"]}
    if old["gpu"] != about["device"]:
        raise FusedBwdError(f"{path} holds the measurements of {old['gpu']}")
    found = {_key(r): r for r in (*(Row(**r) for r in old.get("fusions", ())), *rows)}
    lines = ",\n".join(f"  {json.dumps(asdict(r))}" for r in found.values())
    dates = old.get("measured", {}) | {r.fusion: about["date"] for r in rows}
    rest = {k: v for k, v in old.items() if k != "fusions"}
    rest |= {"environment": about, "measured": dates}
    head = json.dumps(rest, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "fusions": [\n{lines}\n ]\n}}\n')


def _key(row: Row) -> tuple:
    return row.fusion, row.width, row.dtype, row.tokens
