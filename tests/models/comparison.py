"""A compiled model against eager: its loss and every gradient, by the error budget."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from dataclasses import dataclass
from unittest import mock

import torch
from families import FAMILIES, LAYERS, build, loss_of
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fusedbwd
from fusedbwd.numerics import budget, relative_l2
from fusedbwd.report import Report

LOSS = "loss"
ROUNDS = 16  # batches, judged together: the error of a short vector is a matter of luck
LOSSES = 256  # of a loss in 16 bits, which is one number a batch


@dataclass(frozen=True)
class Comparison:
    """One compiled model beside eager.

    Attributes:
        report: what was fused in it.
        errors: of the loss and of each gradient, by the parameter's name: relative L2 against
            float64 over all rounds together, and what the budget allows.
    """

    report: Report
    errors: dict[str, tuple[float, float]]

    def worst(self) -> tuple[str, float]:
        """The gradient whose error is the largest part of its budget, and that part."""
        parts = {name: e / allowed for name, (e, allowed) in self.errors.items() if name != LOSS}
        return max(parts.items(), key=lambda item: item[1])


class InFloat64(TorchFunctionMode):
    """Turns float32 into float64 wherever a model asks for it: Hugging Face's norms and losses
    compute in float32 whatever the model's dtype is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(x):
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def compare(
    name: str,
    attention: str,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    seq: int = 16,
    rounds: int = ROUNDS,
    inductor: bool = True,
    layers: int = LAYERS,
    device: str = "cpu",
    config: fusedbwd.Config | None = None,
) -> Comparison:
    """Trains a model of the family ``name`` for a step, compiled and eager, on several batches.

    Args:
        inductor: False runs the fused graphs as they are, uncompiled, which takes a tenth of the
            time.
    """
    torch._dynamo.reset()
    eager = build(name, attention, dtype, layers).to(device)
    exact = copy.deepcopy(eager).double()
    with contextlib.nullcontext() if inductor else as_traced():
        compiled = fusedbwd.compile(copy.deepcopy(eager), config=config)
    found = defaultdict(list)
    torch.manual_seed(1)
    for _ in range(rounds):
        inputs = {k: t.to(device) for k, t in FAMILIES[name].inputs(batch, seq).items()}
        ours, theirs = (results(m, inputs, dtype) for m in (compiled, eager))
        with InFloat64():
            right = results(exact, inputs, torch.float64)
        assert ours.keys() == theirs.keys() == right.keys()
        for key, grad in ours.items():
            assert grad.dtype == theirs[key].dtype, key
            found[key].append((grad, theirs[key], right[key]))
    for _ in range(LOSSES - rounds if dtype.itemsize == 2 and inductor else 0):
        inputs = {k: t.to(device) for k, t in FAMILIES[name].inputs(batch, seq).items()}
        ours, theirs = (loss(m, inputs, dtype) for m in (compiled, eager))
        with InFloat64():
            found[LOSS].append((ours, theirs, loss(exact, inputs, torch.float64)))
    errors = {}
    for key, all_rounds in found.items():
        grad, eager_grad, expected = (torch.stack(t) for t in zip(*all_rounds, strict=True))
        allowed = budget(relative_l2(eager_grad, expected), grad.dtype, dtype)
        errors[key] = relative_l2(grad, expected), allowed
    return Comparison(fusedbwd.report(compiled), errors)


def as_traced():
    """Inside, models are compiled without code generation at the end."""

    def run(gm, inputs, **_):
        return make_boxed_func(gm.forward)

    return mock.patch.object(fusedbwd.training, "compile_fx_inner", run)


def given_in(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with floats in ``dtype``; the activation ``x``, if any, requires grad."""
    given = {}
    for name, t in inputs.items():
        given[name] = t.detach().to(dtype) if t.is_floating_point() else t
        given[name].requires_grad_(name == "x")
    return given


def loss(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The loss alone, by the forward that :func:`results` runs."""
    return loss_of(model, given_in(inputs, dtype)).detach()


def results(model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss, the gradients of the parameters that have one, and of an activation given."""
    given = given_in(inputs, dtype)
    model.zero_grad(set_to_none=True)
    value = loss_of(model, given)
    value.backward()
    leaves = {**given, **dict(model.named_parameters())}
    return {LOSS: value.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}}


def per_layer(name: str, attention: str, dtype: torch.dtype, counts: dict[str, int]) -> dict:
    """How often each fusion fires in a layer of the family, and outside the layers: a model of
    one layer less has so many less. ``counts``: of the model with ``LAYERS`` layers."""
    small = compare(name, attention, dtype, rounds=1, inductor=False, layers=LAYERS - 1)
    found = {}
    for fusion, count in counts.items():
        each = count - small.report.counts().get(fusion, 0)
        found[fusion] = each, count - each * LAYERS
    return found
