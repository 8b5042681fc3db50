"""Where the time of one call goes: its kernels, in order, with the gaps between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fusedbwd.bench import FLUSH_BYTES, WARMUP_CALLS, Variant
from fusedbwd.errors import FusedBwdError, UnsupportedError

_NAME_WIDTH = 100


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill of a call: its time and the wait before it, in µs."""

    name: str
    us: float
    gap_us: float


def kernels(
    fn: Variant,
    inputs: Mapping[str, Any],
    device: torch.device,
    *,
    calls: int = 7,
    flush_bytes: int = FLUSH_BYTES,
) -> list[Kernel]:
    """What ``fn`` runs on the GPU: medians over ``calls`` calls, each with a cold L2.

    Raises:
        UnsupportedError: ``device`` is no GPU.
        FusedBwdError: two calls ran different kernels.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"kernels are timed on a GPU, not on {device}")
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    for _ in range(WARMUP_CALLS):
        fn(inputs)
    runs = []
    for _ in range(calls):
        flush.zero_()
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            fn(inputs)
            torch.cuda.synchronize(device)
        runs.append(
            [
                (event.name, event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if event.device_type == DeviceType.CUDA
            ]
        )
    return medians(runs)


def medians(runs: Sequence[Sequence[tuple[str, float, float]]]) -> list[Kernel]:
    """Folds several calls' events (name, start, end in µs) into one list of kernels."""
    ordered = [sorted(run, key=lambda event: event[1]) for run in runs]
    names = [name for name, _, _ in ordered[0]]
    if any([name for name, _, _ in run] != names for run in ordered):
        raise FusedBwdError("two calls ran different kernels, expected the same in each")
    result = []
    for i, name in enumerate(names):
        us = statistics.median(run[i][2] - run[i][1] for run in ordered)
        gap = statistics.median(run[i][1] - run[i - 1][2] for run in ordered) if i else 0.0
        result.append(Kernel(name, us, gap))
    return result


def table(found: Sequence[Kernel]) -> str:
    """A line per kernel, and the sums."""
    rows = [[k.name[:_NAME_WIDTH], f"{k.us:.1f}", f"{k.gap_us:.1f}"] for k in found]
    total, gaps = sum(k.us for k in found), sum(k.gap_us for k in found)
    rows.append([f"{len(found)} in all", f"{total:.1f}", f"{gaps:.1f}"])
    return tabulate(rows, headers=["kernel", "µs", "gap before, µs"], disable_numparse=True)
