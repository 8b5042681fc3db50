"""DDP and FSDP2 around and inside fusedbwd.compile: gradients as of one process in eager."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import Outcome, interpreted, train
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedbwd
from fusedbwd import Config
from fusedbwd.training import compile_with

CONFIG = Config(gate=False, verify=True)  # too narrow for some fusions to pay
BLOCKS = 3


class Block(nn.Module):
    """Pre-norm GELU feed-forward."""

    def __init__(self, hidden, intermediate):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.hidden = hidden
        self.blocks = nn.ModuleList(Block(hidden, intermediate) for _ in range(BLOCKS))
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 1.0, 0.3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def drawing(mesh, model):
    """Other data on each rank, and in each round."""

    def draw(turn, rank):
        generator = torch.Generator().manual_seed(100 * turn + rank)
        x, grad = torch.randn(2, 2, 9, model.hidden, generator=generator).to(mesh.device_type)
        return x, grad

    return draw


def ddp(mesh, order: str) -> Outcome:
    """Buckets so small that DDP's optimizer cuts the graph into one for each block."""
    model = Blocks(192, 768).to(mesh.device_type)
    first = model.blocks[0].fc1
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())  # column by column
    eager = copy.deepcopy(model)
    if order == "compile, then DDP":
        fusedbwd.compile(model, config=CONFIG)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    if order == "DDP, then compile":
        fusedbwd.compile(wrapped, fullgraph=True, config=CONFIG)
    return train(mesh, wrapped, eager, drawing(mesh, model))


# The input of the first block needs no gradient, so neither does its norm's.
COUNTS = {"gelu_backward": BLOCKS, "layer_norm_backward": BLOCKS - 1}
MISS = ("layer_norm_backward", "parameter gradients alone")


def check(outcomes, counts):
    for outcome in outcomes:
        outcome.check(counts)
        assert any(fusion == MISS[0] and MISS[1] in why for fusion, why in outcome.misses)


@pytest.mark.parametrize("order", ["compile, then DDP", "DDP, then compile"])
def test_ddp(ranks, order):
    check(ranks.run(ddp, order), COUNTS)


def fsdp(mesh, order: str, dtype: torch.dtype, offload: bool = False) -> Outcome:
    """Sharded layer by layer, with gradients reduced in float32."""
    model = Blocks(48, 96).to(mesh.device_type)
    eager = copy.deepcopy(model).to(dtype)
    inner_compile = interpreted(mesh) if dtype == torch.bfloat16 else None
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()

    def shard():
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    def compile_blocks():
        for block in model.blocks:
            compile_with(block, CONFIG, inner_compile, fullgraph=True)

    steps = {
        "shard, then compile layers": (shard, compile_blocks),
        "compile layers, then shard": (compile_blocks, shard),
        "shard, then compile all": (shard, lambda: fusedbwd.compile(model, config=CONFIG)),
    }
    for step in steps[order]:
        step()
    rounds = 4 if dtype == torch.float32 else 16
    return train(mesh, model, eager, drawing(mesh, model), rounds)


@pytest.mark.parametrize(
    "order",
    ["shard, then compile layers", "compile layers, then shard", "shard, then compile all"],
)
def test_fsdp(ranks, order):
    check(ranks.run(fsdp, order, torch.float32), per_layer(order, COUNTS))


def per_layer(order, counts):
    """Layers share their graphs. Compiled by itself, each counts what it runs; under one
    compilation of the whole model, each graph counts once: the first layer's and the others'."""
    if order != "shard, then compile all":
        return counts
    return {name: n - (BLOCKS - 2) for name, n in counts.items()}


def test_fsdp_mixed_precision(ranks):
    outcomes = ranks.run(fsdp, "shard, then compile layers", torch.bfloat16)
    check(outcomes, COUNTS | {"matmul_gelu_backward": BLOCKS})


def test_fsdp_cpu_offload(ranks):
    """Parameters and gradients on the CPU, computation on the GPU."""
    if ranks.device == "cpu":
        pytest.skip("offloading needs a GPU")
    check(ranks.run(fsdp, "shard, then compile layers", torch.float32, True), COUNTS)
