#!/usr/bin/env python
"""Trains a small Llama of Hugging Face's twice, eager and through fusedbwd.compile.

The model predicts the bytes of Python's own argparse module. Both runs see the same batches;
their losses must coincide. Prints time per step and memory, and draws the losses where
matplotlib is installed:

    pip install 'fusedbwd[transformers,bench]'
    python examples/train_llama.py --plot losses.png
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fusedbwd

TOLERANCE = 0.02  # of the loss: two runs that round differently drift apart, slowly
WARM_UP = 5  # steps that are not timed; the first one compiles


@dataclass
class Run:
    """What one training run gave: losses, the median step in ms, memory in MB."""

    losses: list[float]
    step_ms: float
    memory_mb: float


def llama(device: str) -> nn.Module:
    """A few million parameters on a GPU, a few hundred thousand on a CPU."""
    hidden = 1024 if device == "cuda" else 128
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype)


def batches(steps: int, batch: int, seq: int, device: str) -> Tensor:
    """Random passages of the text as tokens, [steps, batch, seq]."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    starts = torch.randint(len(text) - seq, (steps, batch, 1))
    return text[starts + torch.arange(seq)].to(device)


def train(model: nn.Module, data: Tensor) -> Run:
    """One step of AdamW a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for tokens in data:
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return Run(losses, 1e3 * statistics.median(seconds[WARM_UP:]), memory(model, data[0]) / 1e6)


def memory(model: nn.Module, tokens: Tensor) -> int:
    """Bytes at the peak of a step on a GPU; on a CPU, what the forward keeps for the backward."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cuda.max_memory_allocated() if tokens.is_cuda else sum(kept.values())


def plot(runs: dict[str, Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for style, (name, run) in zip(("-", "--"), runs.items(), strict=True):
        pyplot.plot(run.losses, style, label=name)
    pyplot.xlabel("step")
    pyplot.ylabel("loss [nats per byte]")
    pyplot.legend()
    pyplot.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if the loss curves coincide."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses there")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    eager = llama(args.device)
    fused = fusedbwd.compile(copy.deepcopy(eager))
    data = batches(args.steps, args.batch, args.seq, args.device)
    runs = {"eager": train(eager, data), "fusedbwd.compile": train(fused, data)}

    print(fusedbwd.report(fused).summary())
    rows = [(n, r.losses[0], r.losses[-1], r.step_ms, r.memory_mb) for n, r in runs.items()]
    kind = "peak memory" if args.device == "cuda" else "kept for backward"
    headers = ["", "first loss", "last loss", "ms per step", f"{kind} [MB]"]
    print(tabulate(rows, headers, floatfmt=("", ".4f", ".4f", ".1f", ".1f")))
    pairs = zip(*(r.losses for r in runs.values()), strict=True)
    apart = max(abs(a - b) / a for a, b in pairs)
    print(f"largest difference of the losses over {args.steps} steps: {apart:.1e} of the loss")
    if args.plot:
        plot(runs, args.plot)
    return int(apart > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
