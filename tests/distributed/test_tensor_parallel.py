"""Tensor parallel through DTensor: our graphs are of local tensors and collectives."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from ranks import Outcome, interpreted, train
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from fusedbwd import Config
from fusedbwd.training import compile_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_distributed.py"
CONFIG = Config(gate=False, verify=True)  # too narrow for some fusions to pay
VOCABULARY = 64


def build(mesh, dtype):
    """The example's functions, its model in ``dtype``, and a copy."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    model = example.Llama(64, head_dim=8, layers=1, vocabulary=VOCABULARY)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    model.to(mesh.device_type, dtype)
    return example, model, copy.deepcopy(model)


def drawing(mesh):
    """The same data on both ranks, which share each sequence."""

    def draw(turn, rank):
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(VOCABULARY, (2, 10), generator=generator)
        grad = torch.randn(2, 10, VOCABULARY, generator=generator)
        return tokens.to(mesh.device_type), grad.to(mesh.device_type)

    return draw


def sequence_parallel(mesh) -> Outcome:
    """The example's plan: norms on a shard of the sequence, their weights DTensors."""
    example, model, eager = build(mesh, torch.float32)
    example.shard_tensors(model, mesh)
    assert isinstance(model.layers[0].norm1.weight, DTensor)
    compile_with(model.layers[0], CONFIG, interpreted(mesh), fullgraph=True)
    return train(mesh, model, eager, drawing(mesh))


def test_sequence_parallel(ranks):
    for outcome in ranks.run(sequence_parallel):
        outcome.check({"rope_backward": 1, "swiglu_backward": 1, "rms_norm_backward": 2})


def column_and_row_parallel(mesh, gathered: bool) -> Outcome:
    """Projections alone are sharded, in 16 bits."""
    _, model, eager = build(mesh, torch.bfloat16)
    (layer,) = model.layers
    tables = (None, None)
    blocks = {
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), *tables), desired_input_layouts=(Replicate(), *tables)
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
    }
    columns = [*(f"attention.{name}" for name in "qkv"), "feed_forward.gate", "feed_forward.up"]
    rows = ["attention.o", "feed_forward.down"]
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows} | (blocks if gathered else {})
    parallelize_module(layer, mesh, plan)

    compile_with(layer, CONFIG, interpreted(mesh), fullgraph=True)
    return train(mesh, model, eager, drawing(mesh), rounds=16)


COUNTS = {
    "rope_backward": 1,
    "swiglu_backward": 1,
    "rms_norm_backward": 2,
    "matmul_swiglu_backward": 1,
}


def test_column_and_row_parallel(ranks):
    """Each projection's input gradient is communicated by itself, and then added up."""
    for outcome in ranks.run(column_and_row_parallel, False):
        outcome.check(COUNTS)


def test_gathered_inputs(ranks):
    """Input gradients are added up first, in a matmul of ours, and communicated together."""
    for outcome in ranks.run(column_and_row_parallel, True):
        outcome.check(COUNTS | {"sum_matmul": 2})
