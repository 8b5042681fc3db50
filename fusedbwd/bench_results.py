"""What a benchmark run found: kept as JSON, printed, and compared with an earlier run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fusedbwd.errors import FusedBwdError

OURS = "ours"
TOLERANCE = 0.05  # the part of a case's speed-up that may be lost to noise


@dataclass(frozen=True)
class Timing:
    """One variant on one case; milliseconds but for ``first_call_s``, which compiles.

    ``share`` is the floor over the median. ``worst`` is, over the gradients of the last timed
    call, the largest ratio of the error to its budget; above 1, or NaN, the output is wrong.
    ``peak_bytes``: what one call allocates at its peak, outputs included; None if not measured.
    """

    variant: str
    calls: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    first_call_s: float
    share: float | None
    worst: float
    ok: bool
    peak_bytes: int | None = None


@dataclass(frozen=True)
class CaseTimings:
    """One case: the least time the H200's peaks allow, the clocks seen, and the variants."""

    batch: int
    seq: int
    flops: int
    bytes: int
    floor_ms: float
    sm_clocks_mhz: tuple[int | None, int | None]
    timings: tuple[Timing, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.seq}"

    def p50(self, variant: str) -> float:
        """The median milliseconds of ``variant``.

        Raises:
            FusedBwdError: it was not timed.
        """
        for timing in self.timings:
            if timing.variant == variant:
                return timing.p50_ms
        raise FusedBwdError(f"case {self.name} has no timing of {variant!r}")

    def speed_up(self) -> float:
        """The fastest other variant's time over ours.

        Raises:
            FusedBwdError: ours was not timed, or nothing else was.
        """
        stock = [t.p50_ms for t in self.timings if t.variant != OURS]
        if not stock:
            raise FusedBwdError(f"case {self.name} has nothing to compare {OURS!r} with")
        return min(stock) / self.p50(OURS)


@dataclass(frozen=True)
class Results:
    """One run of ``scripts/bench.py``."""

    problem: str
    dtype: str
    export_s: float
    environment: dict[str, Any]
    cases: tuple[CaseTimings, ...]

    def variants(self) -> list[str]:
        """Their names, in the order in which they were given."""
        return list(dict.fromkeys(t.variant for case in self.cases for t in case.timings))

    def save(self, path: Path) -> None:
        """Writes the run as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load(path: Path) -> Results:
    """A run that :meth:`Results.save` wrote.

    Raises:
        FusedBwdError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text())
        cases = [
            CaseTimings(
                **case
                | {
                    "timings": tuple(Timing(**t) for t in case["timings"]),
                    "sm_clocks_mhz": tuple(case["sm_clocks_mhz"]),
                }
            )
            for case in content["cases"]
        ]
        results = Results(**content | {"cases": tuple(cases)})
        if not cases:
            raise ValueError("no cases")
        dict(results.environment)
        return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FusedBwdError(f"{path} holds no benchmark results: {error!r}") from error


def table(cases: Sequence[CaseTimings], fmt: str = "simple") -> str:
    """One row per case and variant."""
    head = [
        "case", "floor ms", "variant", "p20", "p50", "p80", "share", "first call s", "peak MiB",
        "error/budget", "",
    ]  # fmt: skip
    rows = [
        [
            case.name,
            f"{case.floor_ms:.3f}",
            t.variant,
            f"{t.p20_ms:.3f}",
            f"{t.p50_ms:.3f}",
            f"{t.p80_ms:.3f}",
            "" if t.share is None else f"{t.share:.0%}",
            f"{t.first_call_s:.2f}",
            "" if t.peak_bytes is None else f"{t.peak_bytes / 2**20:.0f}",
            f"{t.worst:.2f}",
            "ok" if t.ok else "WRONG",
        ]
        for case in cases
        for t in case.timings
    ]
    return tabulate(rows, headers=head, tablefmt=fmt, disable_numparse=True)


def by_case(results: Results, fmt: str = "simple") -> str:
    """One row per case, and one of means: each variant's median, and how ours stands.

    The last column is the worst of our gradients: its error as a part of its budget.
    """
    cases, names = results.cases, results.variants()
    others = [_TITLES.get(name, name) for name in names if name != OURS]
    head = ["case", "floor", *others, "fusedbwd", "speed-up", "share", "error / budget"]

    def row(name: str, floor: float, times: dict[str, float], gain: float, worst: float):
        ours = times.pop(OURS)
        ms = [f"{t:.3f}" for t in (floor, *times.values(), ours)]
        return [name, *ms, f"{gain:.2f}", f"{floor / ours:.0%}".replace("%", " %"), f"{worst:.2f}"]

    def worst(case: CaseTimings) -> float:
        return next(t.worst for t in case.timings if t.variant == OURS)

    rows = [
        row(
            case.name.replace("x", "×"),
            case.floor_ms,
            {name: case.p50(name) for name in names},
            case.speed_up(),
            worst(case),
        )
        for case in cases
    ]
    means = {name: _mean([case.p50(name) for case in cases]) for name in names}
    gain = min(t for name, t in means.items() if name != OURS) / means[OURS]
    floor = _mean([case.floor_ms for case in cases])
    rows.append(row(f"mean of {len(cases)}", floor, means, gain, max(map(worst, cases))))
    return tabulate(rows, headers=head, tablefmt=fmt, disable_numparse=True)


def summary(results: Results) -> str:
    """A line per variant: the mean of its medians, what part of that the mean floor is, and the
    mean SOL score with eager as its baseline; then how our cases stand to the fastest other.

    The score of a case is ``1 / (1 + (t - floor) / (t_eager - floor))`` (SOL-ExecBench): 0.5 is
    eager's speed, 1 the hardware's limit.
    """
    cases, names = results.cases, results.variants()
    floor = _mean([case.floor_ms for case in cases])
    on_gpu = all(t.share is not None for case in cases for t in case.timings)
    lines = []
    for name in names:
        mean = _mean([case.p50(name) for case in cases])
        line = f"mean p50 of {len(cases)} cases, {name}: {mean:.3f} ms"
        if on_gpu:
            line += f", {floor / mean:.0%} of the limit"
            if "eager" in names:
                score = _mean([_sol_score(case, name) for case in cases])
                line += f", SOL score {score:.2f}"
        lines.append(line)
    if OURS in names and len(names) > 1:
        ratios = [case.speed_up() for case in cases]
        worst = min(cases, key=CaseTimings.speed_up)
        lines.append(
            f"ours against the fastest other, case by case: {min(ratios):.2f} ({worst.name}) "
            f"to {max(ratios):.2f}"
        )
    return "\n".join(lines)


def regressions(new: Results, old: Results, tolerance: float = TOLERANCE) -> list[str]:
    """The cases whose speed-up over the same variants fell by more than ``tolerance``.

    Ratios within each run are compared, not times, so that a slower clock is no regression.

    Returns:
        One line for each such case; none if all is well.

    Raises:
        FusedBwdError: the runs differ in problem, dtype, GPU, precision or variants, or share
            no case.
    """
    for what, now, then in [
        ("problem", new.problem, old.problem),
        ("dtype", new.dtype, old.dtype),
        ("variants", sorted(new.variants()), sorted(old.variants())),
        *((key, new.environment.get(key), old.environment.get(key)) for key in _SAME),
    ]:
        if now != then:
            raise FusedBwdError(f"cannot compare the runs: {what} is {now!r}, expected {then!r}")
    before = {case.name: case.speed_up() for case in old.cases}
    shared = [case for case in new.cases if case.name in before]
    if not shared:
        raise FusedBwdError("cannot compare the runs: they have no case in common")
    return [
        f"{case.name}: {case.speed_up():.3f} times the fastest other's speed, was "
        f"{before[case.name]:.3f}"
        for case in shared
        if not case.speed_up() >= (1 - tolerance) * before[case.name]  # nor NaN
    ]


_SAME = ("device", "matmul_precision", "fp16")
_TITLES = {"compile": "torch.compile"}


def _sol_score(case: CaseTimings, variant: str) -> float:
    return 1 / (1 + (case.p50(variant) - case.floor_ms) / (case.p50("eager") - case.floor_ms))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
