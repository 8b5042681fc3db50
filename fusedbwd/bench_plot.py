"""A picture of a benchmark run: time against tokens, and the share of the limit by case."""

from __future__ import annotations

from pathlib import Path

from fusedbwd.bench_results import OURS, Results
from fusedbwd.errors import FusedBwdError


def plot(results: Results, path: Path) -> None:
    """Writes the picture; the file name's ending says in which format (svg, png, pdf).

    Left: each variant's median time by tokens (batch times length), and the least time that the
    GPU's peaks allow. Right: for each case, by tokens, that least time as a part of ours.

    Raises:
        FusedBwdError: matplotlib is missing, or ours was not among the variants.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FusedBwdError("a picture needs matplotlib: pip install 'fusedbwd[bench]'") from error
    if OURS not in results.variants():
        raise FusedBwdError(f"a picture needs timings of {OURS!r}")

    cases = sorted(results.cases, key=lambda case: (case.batch * case.seq, case.seq))
    tokens = [case.batch * case.seq for case in cases]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    times, shares = figure.subplots(1, 2)

    for name in results.variants():
        label = "fusedbwd" if name == OURS else f"torch.{name}" if name == "compile" else name
        times.plot(tokens, [case.p50(name) for case in cases], "o-", ms=4, label=label)
    times.plot(tokens, [case.floor_ms for case in cases], "k--", label="limit")
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, median")
    times.grid(alpha=0.3)
    times.legend()

    shares.bar(range(len(cases)), [100 * case.floor_ms / case.p50(OURS) for case in cases])
    names = [case.name.replace("x", "×") for case in cases]
    shares.set_xticks(range(len(cases)), names, rotation=60)
    shares.set(xlabel="batch × length", ylabel="fusedbwd, % of the limit", ylim=(0, 100))
    shares.grid(alpha=0.3, axis="y")

    env = results.environment
    precision = env["matmul_precision"] + (f", fp16 {env['fp16']}" if env.get("fp16") else "")
    figure.suptitle(
        f"{results.problem}, {results.dtype.removeprefix('torch.')}, matmul precision {precision}: "
        f"{env['device']}, torch {env['torch']}, triton {env['triton']}, {env['date'][:10]}",
        fontsize=10,
    )
    # No date of writing and no random ids, so that the same run gives the same file.
    with rc_context({"svg.hashsalt": "fusedbwd"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
