"""What a reference problem is, and how a case's tensors are made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedbwd import schema as s
from fusedbwd.errors import FusedBwdError, SchemaError
from fusedbwd.numerics import statistics_dtype
from fusedbwd.schema import Schema
from fusedbwd.tagging import collect

Case = tuple[int, int]  # batch, sequence length


@dataclass(frozen=True)
class Problem:
    """A module, the contract of its backward, and the cases on which it is judged.

    Attributes:
        name: the problem's name in :data:`fusedbwd.problems.PROBLEMS`.
        dtype: the parameters' dtype by definition.
        build: ``build(*, seed=None, device=None, dtype=..., **dims)`` makes the module, its
            weights drawn from ``seed`` (``None``: the global generator), norm weights random.
        small: ``dims`` for a module of test size.
        schema: the saved-tensor contract of a module that ``build`` made.
        arguments: ``arguments(module, batch, seq, generator)`` draws the forward's arguments.
        reference: the documented formulas in plain PyTorch, on the tensors given: schema
            inputs by name -> gradients by name. It computes in the tensors' own dtypes, so on
            them it is the eager baseline and on their float64 copies the oracle.
        flops: ``flops(module, batch, seq)``, floating-point operations of the backward's
            matmuls, two per multiply-add.
        cases, small_cases: the (batch, seq) pairs, for full and test size.
    """

    name: str
    dtype: torch.dtype
    build: Callable[..., nn.Module]
    small: Mapping[str, int]
    schema: Callable[[nn.Module], Schema]
    arguments: Callable[[nn.Module, int, int, torch.Generator], dict[str, Tensor]]
    reference: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    flops: Callable[[nn.Module, int, int], int]
    cases: tuple[Case, ...]
    small_cases: tuple[Case, ...]

    def inputs(self, module: nn.Module, batch: int, seq: int, seed: int = 0) -> dict[str, Any]:
        """One case's schema inputs, in order and in their documented layouts.

        The arguments and the incoming gradient are drawn from ``seed`` on the module's device,
        and the forward is run once for the intermediates.
        """
        parameter = next(module.parameters())
        generator = torch.Generator(parameter.device).manual_seed(seed)
        arguments = self.arguments(module, batch, seq, generator)
        return record_inputs(self.schema(module), module, arguments, generator)

    def select_cases(self, text: str, *, small: bool = False) -> tuple[Case, ...]:
        """The cases that ``text`` names: ``all``, or a comma list of numbers and ``BxS``.

        Raises:
            FusedBwdError: an item is neither, or no case has that number.
        """
        cases = self.small_cases if small else self.cases
        if text == "all":
            return cases
        return tuple(self._case(item.strip(), cases) for item in text.split(","))

    def _case(self, item: str, cases: tuple[Case, ...]) -> Case:
        batch, cross, seq = item.partition("x")
        if cross and batch.isdecimal() and seq.isdecimal():
            return int(batch), int(seq)
        if item.isdecimal() and int(item) < len(cases):
            return cases[int(item)]
        raise FusedBwdError(
            f"{self.name}: case {item!r} is neither a number below {len(cases)} nor BxS, like 8x256"
        )


def record_inputs(
    schema: Schema,
    module: nn.Module,
    arguments: Mapping[str, Tensor],
    generator: torch.Generator,
) -> dict[str, Any]:
    """Runs ``module(**arguments)`` and gathers what ``schema`` asks for, by input name.

    The incoming gradient is standard normal, from ``generator``. Tensors come detached; those
    not in their documented layout are copied into it.

    Raises:
        SchemaError: the schema names an argument, parameter or tag that is not there.
    """
    with torch.no_grad(), collect(module) as tagged:
        output = module(**arguments)
    grad = torch.randn(
        output.shape,
        generator=generator,
        device=output.device,
        dtype=statistics_dtype(output.dtype),
    ).to(output.dtype)
    sources: dict[str, Mapping[str, Tensor]] = {
        s.ARGUMENT: arguments,
        s.PARAMETER: module.state_dict(),
        s.SAVED: tagged,
        s.GRAD_OUTPUT: {i.of: grad for i in schema.inputs if i.kind == s.GRAD_OUTPUT},
    }

    def value(i: s.Input) -> Any:
        if i.kind == s.SCALAR:
            return operator.attrgetter(i.of)(module)
        if i.of not in sources[i.kind]:
            raise SchemaError(f"{schema.name}: input {i.name!r}: no {i.kind} is called {i.of!r}")
        return _in_layout(sources[i.kind][i.of].detach(), i)

    return {i.name: value(i) for i in schema.inputs}


def random_normal(
    shape: tuple[int, ...], std: float, module: nn.Module, generator: torch.Generator
) -> Tensor:
    """N(0, std²) of ``shape``, in the dtype and on the device of the module's parameters."""
    like = next(module.parameters())
    draw = torch.randn(
        shape, generator=generator, device=like.device, dtype=statistics_dtype(like.dtype)
    )
    return (draw * std).to(like.dtype)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Of ``linear(x, weight)``'s weight: [..., out] and [..., in] -> [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _in_layout(tensor: Tensor, i: s.Input) -> Tensor:
    order = i.order or tuple(range(tensor.dim()))
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)
