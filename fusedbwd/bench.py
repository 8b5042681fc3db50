"""Timing an exported backward beside eager PyTorch and torch.compile.

Every timed call finds a cold L2 (a large buffer is written just before it) and its inputs at
addresses that no recent call used. The variants take turns, so that a clock that drifts does so
for all of them, and what the last timed call returned is checked against float64.
"""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor, nn

from fusedbwd.bench_results import CaseTimings, Timing
from fusedbwd.errors import FusedBwdError
from fusedbwd.problems import Case, Problem
from fusedbwd.schema import GRAD_OUTPUT, Schema
from fusedbwd.verify import Backward, GradientCheck, check_gradients

# NVIDIA's data sheet for the H200: dense bf16 FLOP/s, and HBM3e bytes/s.
PEAK_FLOPS = 989e12
PEAK_BANDWIDTH = 4.8e12

FLUSH_BYTES = 256 << 20
WARMUP_CALLS = 3
_SHIFT = 256  # bytes between the addresses of two calls; Triton and cuBLAS like 16 and more
_ADDRESSES = 16
# torch.compile takes an offset that equals a size for that size, and compiles anew when they part:
# offsets are larger than sizes are, and never 0.
_FIRST = 4 << 20

Variant = Callable[[Mapping[str, Any]], Sequence[Tensor]]


def variants(
    problem: Problem, module: nn.Module, names: Sequence[str], export: Callable[[], Backward]
) -> dict[str, Variant]:
    """The variants called ``names``: ``eager``, ``compile``, ``max-autotune`` or ``ours``.

    ``export`` makes ours. The others are the problem's reference as it is, through
    ``torch.compile(dynamic=True)``, and with max-autotune for each case's static sizes, which
    takes minutes a case. No variant captures CUDA graphs: the inputs' addresses change. What
    ``names`` leaves out is not made.
    """
    reference = problem.reference
    makers: dict[str, Callable[[], Variant]] = {
        "eager": lambda: _values(reference),
        "compile": lambda: _values(torch.compile(reference, dynamic=True, fullgraph=True)),
        # With fullgraph, the limit of recompilations is an error and not eager's time.
        "max-autotune": lambda: _values(
            torch.compile(
                reference, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"
            )
        ),
        "ours": lambda: _by_keyword(export()),
    }
    for name in names:
        if name not in makers:
            raise FusedBwdError(f"no variant is called {name!r}; there are: {', '.join(makers)}")
    return {name: makers[name]() for name in names}


def first_calls(
    problem: Problem, module: nn.Module, fns: Mapping[str, Variant], case: Case, *, seed: int = 0
) -> dict[str, float]:
    """Calls every variant once, as :func:`bench_case` does; seconds each, compiling included."""
    moving = _MovingInputs(problem.inputs(module, *case, seed))
    stopwatch = _Stopwatch(next(module.parameters()).device, 0)
    return {name: stopwatch.wall(fn, moving.next())[0] for name, fn in fns.items()}


def bench_case(
    problem: Problem,
    module: nn.Module,
    fns: Mapping[str, Variant],
    case: Case,
    *,
    first: Mapping[str, float] | None = None,
    calls: int = 30,
    seed: int = 0,
    flush_bytes: int = FLUSH_BYTES,
) -> CaseTimings:
    """Times every variant on fresh inputs of one case and checks what it returned.

    On a GPU a call is timed by CUDA events around it. The host has the flush's 60 µs or so to
    prepare the first launch; gaps between kernels count. On a CPU it is wall-clock time.

    Args:
        fns: the variants; each takes the inputs by name and returns the gradients in order.
        first: what :func:`first_calls` returned for this case; called now if None. Better before
            any case is timed: compiling starts processes that still run when it has ended.
        calls: timed calls of each variant, after ``WARMUP_CALLS`` that are not.
        flush_bytes: size of the buffer written before each call.
    """
    batch, seq = case
    schema = problem.schema(module)
    first = first or first_calls(problem, module, fns, case, seed=seed)
    inputs = problem.inputs(module, batch, seq, seed)
    device = next(module.parameters()).device
    stopwatch = _Stopwatch(device, flush_bytes)
    moving = _MovingInputs(inputs)

    peaks = {}
    for name, fn in fns.items():
        for _ in range(WARMUP_CALLS - 1):
            fn(moving.next())
        peaks[name] = _peak_bytes(fn, moving.next(), device)
    times: dict[str, list[float]] = {name: [] for name in fns}
    outputs: dict[str, Sequence[Tensor]] = {}
    clock = sm_clock(device)
    for turn in range(calls):
        names = list(fns)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            outputs.pop(name, None)
            elapsed, outputs[name] = stopwatch.cold(fns[name], moving.next())
            times[name].append(elapsed * 1e3)
    clocks = (clock, sm_clock(device))
    del moving, stopwatch

    sizes = sizes_of(schema, batch, seq)
    flops, moved = problem.flops(module, batch, seq), schema.bytes(**sizes)
    floor_ms = 1e3 * max(flops / PEAK_FLOPS, moved / PEAK_BANDWIDTH)
    timings = []
    for name in fns:
        p20, p50, p80 = percentiles(times[name])
        checks = check_gradients(problem, schema, inputs, outputs.pop(name))
        timings.append(
            Timing(
                variant=name,
                calls=calls,
                p20_ms=p20,
                p50_ms=p50,
                p80_ms=p80,
                first_call_s=first[name],
                share=floor_ms / p50 if device.type == "cuda" else None,
                peak_bytes=peaks[name],
                worst=_worst(checks),
                ok=all(check.ok for check in checks),
            )
        )
    return CaseTimings(batch, seq, flops, moved, floor_ms, clocks, tuple(timings))


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: date, hardware, versions and matmul precision."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile, linearly interpolated."""
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist()
    return p20, p50, p80


def sizes_of(schema: Schema, batch: int, seq: int) -> dict[str, int]:
    """Values for the schema's two symbols, read off the incoming gradient's shape."""
    shape = next(i.shape for i in schema.inputs if i.kind == GRAD_OUTPUT)
    return {str(shape[0]): batch, str(shape[1]): seq}


def sm_clock(device: torch.device) -> int | None:
    """The SM clock in MHz; None on a CPU or where nvidia-smi does not answer."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    command += [f"--id=GPU-{uuid}"] if uuid else []
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(answer.stdout.split()[0])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def _peak_bytes(fn: Variant, inputs: Mapping[str, Any], device: torch.device) -> int | None:
    """The most that one call, a warm one, holds at a time beside its inputs; None on a CPU."""
    if device.type != "cuda":
        fn(inputs)
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fn(inputs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _MovingInputs:
    """Copies of a case's tensors whose addresses move by 256 bytes from call to call."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._step = 0
        self._arenas = {
            name: t.new_empty(
                _FIRST + t.numel() * t.itemsize + _ADDRESSES * _SHIFT, dtype=torch.uint8
            )
            for name, t in inputs.items()
            if isinstance(t, Tensor)
        }

    def next(self) -> dict[str, Any]:
        """The inputs, freshly copied to the next addresses; the last call's are overwritten."""
        offset = _FIRST + self._step % _ADDRESSES * _SHIFT
        self._step += 1
        moved = dict(self._inputs)
        for name, arena in self._arenas.items():
            t = self._inputs[name]
            flat = arena[offset : offset + t.numel() * t.itemsize].view(t.dtype)
            moved[name] = flat.as_strided(t.shape, t.stride(), flat.storage_offset()).copy_(t)
        return moved


class _Stopwatch:
    """Times one call at a time, in seconds, and returns what it returned."""

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        self._device = device
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def wall(self, fn: Variant, inputs: Mapping[str, Any]) -> tuple[float, Sequence[Tensor]]:
        """From before the host enters ``fn`` until the device has finished."""
        self._synchronize()
        start = time.perf_counter()
        outputs = fn(inputs)
        self._synchronize()
        return time.perf_counter() - start, outputs

    def cold(self, fn: Variant, inputs: Mapping[str, Any]) -> tuple[float, Sequence[Tensor]]:
        """On the device, with the caches flushed."""
        if self._device.type != "cuda":
            self._flush.zero_()
            return self.wall(fn, inputs)
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for event in (start, end):  # an event is made when it is first recorded
                event.record()
            self._synchronize()
            self._flush.zero_()
            start.record()
            outputs = fn(inputs)
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, outputs

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _values(reference: Callable[[Mapping[str, Any]], dict[str, Tensor]]) -> Variant:
    return lambda inputs: tuple(reference(inputs).values())


def _by_keyword(bwd: Backward) -> Variant:
    return lambda inputs: bwd(**inputs)


def _worst(checks: Sequence[GradientCheck]) -> float:
    # max() would drop a NaN that does not come first.
    ratios = torch.tensor([check.error / check.budget for check in checks], dtype=torch.float64)
    return ratios.max().item()
