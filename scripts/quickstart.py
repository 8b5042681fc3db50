#!/usr/bin/env python
"""Trains two small decoder layers beside eager, then checks an exported backward.

Step 1 compiles the layers with fusedbwd.compile and trains them to repeat a sequence; the
losses must fall, and stay close to those of the same layers in eager PyTorch. Step 2 exports
the backward of a small reference problem and checks every gradient against float64.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fusedbwd
from fusedbwd.modules import DecoderLayer, rope_tables
from fusedbwd.problems import PROBLEMS, get_problem
from fusedbwd.verify import table, verify

BATCH, SEQ, VOCABULARY = 4, 24, 32
DIMS = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}
TOLERANCE = 1e-3  # relative difference of fused and eager losses: fp32, sums in another order


class Copier(nn.Module):
    """Predicts, at each position of a random sequence, the token two places before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIMS["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer(**DIMS, dtype=torch.float32) for _ in range(2))
        self.head = nn.Linear(DIMS["hidden_size"], VOCABULARY)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``tokens`` [B, S] -> the cross-entropy loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(x[:, 2:]).flatten(0, 1), tokens[:, :-2].flatten())


def train(model: nn.Module, device: str, steps: int, seed: int) -> list[float]:
    """The loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ), generator=generator).to(device)
    tables = rope_tables(BATCH, SEQ, DIMS["head_dim"], dtype=torch.float32, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(tokens, *tables)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_both(device: str, steps: int, seed: int) -> bool:
    """Trains a compiled model and its eager twin, prints both, and says whether all is well."""
    torch.manual_seed(seed)
    eager = Copier().to(device)
    fused = copy.deepcopy(eager)
    for layer in fused.layers:
        fusedbwd.compile(layer)

    print(f"Training {len(fused.layers)} decoder layers on {device}, {steps} steps", flush=True)
    start = time.perf_counter()
    ours = train(fused, device, steps, seed)
    seconds = time.perf_counter() - start
    theirs = train(eager, device, steps, seed)
    shown = sorted({*range(0, steps, max(1, steps // 5)), steps - 1})
    print(tabulate([(s + 1, ours[s], theirs[s]) for s in shown], ["step", "loss", "eager's loss"]))
    print(f"{seconds:.0f} s with compilation\n")
    report = fusedbwd.report(fused)
    print(report, end="\n\n")

    apart = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    checks = {
        "the loss falls": ours[-1] < 0.9 * ours[0],
        f"losses within {TOLERANCE} of eager's ({apart:.1e})": apart <= TOLERANCE,
        "SwiGLU and RMSNorm are fused": {"swiglu_backward", "rms_norm_backward"}
        <= report.counts().keys(),
    }
    return conclude(checks)


def check_export(name: str, device: str, seed: int) -> bool:
    """Exports the small problem ``name``, prints its check, and says whether all is well."""
    problem = get_problem(name)
    module = problem.build(seed=seed, device=device, **problem.small)
    print(f"Exporting the backward of {name}, small", flush=True)
    start = time.perf_counter()
    bwd = fusedbwd.export_backward(module, saved=problem.schema(module))
    print(f"{time.perf_counter() - start:.0f} s: {bwd.report.summary()}")
    print(f"{len(bwd.schema.inputs)} inputs, {len(bwd.schema.outputs)} gradients\n")
    checked = list(verify(problem, module, bwd, problem.small_cases[:1], seed=seed))
    print(table(checked), end="\n\n")
    return conclude(
        {
            "something is fused": bool(bwd.report.fired),
            "every gradient is within its error budget": all(c.ok for c in checked),
        }
    )


def conclude(checks: dict[str, bool]) -> bool:
    for what, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED'}: {what}")
    print()
    return all(checks.values())


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the losses fall, agree with eager's, and the export is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: 20)")
    parser.add_argument(
        "--problem", default="ffn_gelu_backward", choices=list(PROBLEMS), help="what to export"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps: expected at least 1, got {args.steps}")
    try:
        trained = train_both(args.device, args.steps, args.seed)
        exported = check_export(args.problem, args.device, args.seed)
    except fusedbwd.FusedBwdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if trained and exported else 1


if __name__ == "__main__":
    sys.exit(main())
