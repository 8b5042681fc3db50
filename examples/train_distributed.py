#!/usr/bin/env python
"""Trains a small Llama on 1 to N GPUs or CPUs: data parallel, fully sharded or tensor parallel.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp --backend fusedbwd

Prints the median time of a step and the peak memory of the worst rank; run it with
``--backend compile`` and ``--backend eager`` to compare. Weights and tokens are random.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a checkout, uninstalled
import fusedbwd
from fusedbwd.modules import rope_tables

WARMUP_STEPS = 3


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE by halves; two query heads to a kv head."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden // 2, bias=False)
        self.v = nn.Linear(hidden, hidden // 2, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1 heads: as many as this rank has.
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 3 * hidden, bias=False)
        self.up = nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, head_dim), FeedForward(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, hidden: int, head_dim: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, head_dim) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` [B, S] -> logits [B, S, vocabulary]."""
        dtype = self.norm.weight.dtype
        tables = rope_tables(1, tokens.shape[1], self.head_dim, dtype=dtype, device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, *tables)
        return self.head(self.norm(x))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` [B, heads, S, D] by the tables [1, S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def shard_tensors(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallel, with the sequence sharded between attention and feed-forward blocks.

    The input of q, k and v (and of gate and up) is gathered once for all, by PrepareModuleInput:
    their input gradients are then added up before they are communicated.
    """
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    tables = (None, None)
    inner = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), *tables), desired_input_layouts=(Replicate(), *tables)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, outer)
    # torch.compile has no gradient for an input that is still under way (torch 2.13).
    model.embedding.register_forward_hook(lambda module, args, out: wait_tensor(out))
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)


def shard_parameters(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2, layer by layer: weights and communication as in mixed precision training."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def compile_layers(model: Llama, backend: str) -> None:
    """Layer by layer: what is compiled for one layer serves all."""
    for layer in model.layers:
        if backend == "fusedbwd":
            fusedbwd.compile(layer, fullgraph=True)
        elif backend == "compile":
            layer.compile(fullgraph=True)


def train(args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Trains, and prints time and memory on rank 0."""
    rank, device = mesh.get_rank(), torch.device(mesh.device_type)
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)  # the same weights everywhere
    model = Llama(args.hidden, args.head_dim, args.layers, args.vocabulary).to(device)
    if args.parallel == "fsdp":
        shard_parameters(model, mesh, dtype)
    else:
        model.to(dtype)
    if args.parallel == "tp":
        shard_tensors(model, mesh)
    compile_layers(model, args.backend)
    wrapped = DistributedDataParallel(model) if args.parallel == "ddp" else model

    # Wide layers diverge at the rate that suits the narrow ones of a CPU.
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.128 / args.hidden)
    # Other data on each rank, but for tensor parallel ranks, which share each sequence.
    generator = torch.Generator().manual_seed(0 if args.parallel == "tp" else rank)
    times, losses = [], []
    for step in range(WARMUP_STEPS + args.steps):
        shape = (args.batch, args.seq + 1)
        tokens = torch.randint(args.vocabulary, shape, generator=generator).to(device)
        start = now(device)
        logits = wrapped(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(now(device) - start)
        losses.append(loss.detach())
        if step == WARMUP_STEPS - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    worst = torch.tensor([statistics.median(times[WARMUP_STEPS:]), peak_memory(device)])
    worst = worst.to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        seconds, peak = worst.tolist()
        print(
            f"{args.parallel} on {mesh.size()} x {device.type}, {args.dtype}, {args.backend}: "
            f"{seconds * 1e3:.1f} ms a step, peak {peak / 2**20:.0f} MiB, "
            f"first call {times[0]:.1f} s, loss {losses[0]:.4f} to {losses[-1]:.4f}"
        )
        if args.backend == "fusedbwd":
            print(fusedbwd.report(model).summary())


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> float:
    """Bytes: allocated on the GPU after the first steps, or ever resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse(argv: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tp"], default="ddp")
    parser.add_argument("--backend", choices=["fusedbwd", "compile", "eager"], default="fusedbwd")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU"
    )
    small = {"hidden": 128, "head_dim": 16, "layers": 2, "vocabulary": 512, "batch": 2, "seq": 64}
    large = {
        **{"hidden": 4096, "head_dim": 128, "layers": 8, "vocabulary": 32000},
        **{"batch": 2, "seq": 2048},
    }
    for name, size in small.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=int, help=f"default: {large[name]} on a GPU, {size} on a CPU"
        )
    parser.add_argument("--steps", type=int, default=10, help=f"timed, after {WARMUP_STEPS}")
    args = parser.parse_args(argv)
    sizes, dtype = (large, "bfloat16") if args.device == "cuda" else (small, "float32")
    for name, default in {**sizes, "dtype": dtype}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if "RANK" not in os.environ:  # python instead of torchrun: one process
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        train(args, init_device_mesh(args.device, (dist.get_world_size(),)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
