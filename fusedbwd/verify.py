"""Checking an exported backward against the documented formulas in float64.

A case passes when every gradient is within :func:`fusedbwd.numerics.budget` and the call kept
its contract: names, shapes, dtypes, plain contiguous tensors, inputs bit-identical afterwards
and no storage shared between an output and an input or another output.

While ``torch.set_float32_matmul_precision("medium")`` or "high" is in force, eager's own error on
float32 tensors is that of the formulas with the matmuls' operands rounded to bfloat16 or to TF32
(:class:`fusedbwd.precision.RoundedMatmuls`), and the factor on it that of 16-bit types. Gradients
that no such matmul reaches are judged as ever.

Our error and eager's are random, and on a tensor of a few dozen elements their ratio strays by
chance. Small cases are therefore run several times, and the errors taken over all rounds
together, as if they were one long tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fusedbwd.errors import UnsupportedError
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.precision import HIGHEST, RoundedMatmuls, in_force, matmul_precision
from fusedbwd.problems import Case, Problem
from fusedbwd.schema import Schema, resolve

Backward = Callable[..., Sequence[Tensor]]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class GradientCheck:
    """One gradient's relative L2 errors against float64, ours and eager's, and what is allowed.

    ``scale`` is the L2 norm of the right gradient, the weight of this check among others;
    ``rounded`` says that eager's error is one of matmuls on rounded operands.
    """

    name: str
    error: float
    eager_error: float
    budget: float
    scale: float = 1.0
    rounded: bool = False

    @property
    def ok(self) -> bool:
        return within(self.error, self.budget)


@dataclass(frozen=True)
class CaseCheck:
    """One case: a check per gradient, and in words where the call broke its contract."""

    batch: int
    seq: int
    gradients: tuple[GradientCheck, ...]
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.violations and all(g.ok for g in self.gradients)


def verify(
    problem: Problem,
    module: nn.Module,
    bwd: Backward,
    cases: Iterable[Case],
    *,
    seed: int = 0,
    rounds: int = 1,
) -> Iterator[CaseCheck]:
    """Calls ``bwd`` on fresh inputs for every case and yields what was found, case by case.

    Args:
        module: what ``bwd`` is the backward of, on the device to run on.
        bwd: called as ``bwd(**inputs)``; returns the gradients in schema order.
        seed: of the first round; each further round takes the next.
        rounds: how often each case is run, on fresh inputs.

    Raises:
        UnsupportedError: the module is in float64, which leaves nothing wider to check against.
    """
    if next(module.parameters()).dtype == torch.float64:
        raise UnsupportedError("cannot verify float64: there is no wider oracle; use float32")
    for index, (batch, seq) in enumerate(cases):
        checks = [
            verify_case(problem, module, bwd, batch, seq, seed=seed + index * rounds + r)
            for r in range(rounds)
        ]
        compute_dtype = next(module.parameters()).dtype
        yield _pooled(checks, problem.schema(module), compute_dtype)


def _pooled(checks: Sequence[CaseCheck], schema: Schema, compute_dtype: torch.dtype) -> CaseCheck:
    """Several rounds of one case as one check."""
    if len(checks) == 1:
        return checks[0]
    gradients = []
    for declared, rounds in zip(
        schema.outputs, zip(*(c.gradients for c in checks), strict=True), strict=False
    ):
        scale = math.hypot(*(g.scale for g in rounds))

        def over_all(
            errors: Iterable[float], scale: float = scale, rounds: tuple = rounds
        ) -> float:
            # A scale of zero means that the right gradient is zero: any error is infinite.
            parts = [e * g.scale if g.scale else e for e, g in zip(errors, rounds, strict=True)]
            return math.hypot(*parts) / (scale or 1.0)

        error = over_all(g.error for g in rounds)
        eager_error = over_all(g.eager_error for g in rounds)
        rounded = any(g.rounded for g in rounds)
        allowed = budget(eager_error, declared.dtype, torch.bfloat16 if rounded else compute_dtype)
        gradients.append(GradientCheck(declared.name, error, eager_error, allowed, scale, rounded))
    violations = tuple(dict.fromkeys(v for c in checks for v in c.violations))
    return CaseCheck(checks[0].batch, checks[0].seq, tuple(gradients), violations)


def verify_case(
    problem: Problem, module: nn.Module, bwd: Backward, batch: int, seq: int, *, seed: int = 0
) -> CaseCheck:
    """:func:`verify` for one case. Peak memory is about six times the inputs'."""
    schema = problem.schema(module)
    inputs = problem.inputs(module, batch, seq, seed)
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, Tensor)}
    outputs = bwd(**inputs)
    changed = [
        f"input {name!r} was changed"
        for name in before
        if not _same_bits(before[name], inputs[name])
    ]
    del before
    violations = (*contract_violations(schema, inputs, outputs), *changed)
    gradients: tuple[GradientCheck, ...] = ()
    if len(outputs) == len(schema.outputs):
        gradients = check_gradients(problem, schema, inputs, outputs)
    return CaseCheck(batch, seq, gradients, violations)


def check_gradients(
    problem: Problem, schema: Schema, inputs: Mapping[str, Any], outputs: Sequence[Tensor]
) -> tuple[GradientCheck, ...]:
    """Each output's error, beside eager's own, against the reference in float64."""
    expected = oracle(problem, inputs)
    eager, rounded = baseline(problem, inputs)
    compute_dtype = inputs[schema.inputs[0].name].dtype
    checks = []
    for gradient, actual in zip(schema.outputs, outputs, strict=True):
        right = expected[gradient.name]
        # A wrong shape is reported among the violations; here it is merely not a number.
        error = relative_l2(actual, right) if actual.shape == right.shape else float("nan")
        eager_error = relative_l2(eager[gradient.name], right)
        name, scale = gradient.name, torch.linalg.vector_norm(right).item()
        computed_in = torch.bfloat16 if name in rounded else compute_dtype
        allowed = budget(eager_error, gradient.dtype, computed_in)
        checks.append(GradientCheck(name, error, eager_error, allowed, scale, name in rounded))
    return tuple(checks)


def baseline(problem: Problem, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """The documented formulas in the dtypes of ``inputs``, at the precision in force, and the
    names of the gradients that matmuls on rounded operands took part in."""
    if (precision := in_force()) == HIGHEST:
        return problem.reference(inputs), set()
    with matmul_precision(HIGHEST):
        unrounded = problem.reference(inputs)
        with RoundedMatmuls(precision):
            eager = problem.reference(inputs)
    return eager, {name for name in eager if not torch.equal(eager[name], unrounded[name])}


def oracle(problem: Problem, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The documented formulas on ``inputs`` in float64."""
    return problem.reference(
        {name: t.double() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    )


def contract_violations(
    schema: Schema, inputs: Mapping[str, Any], outputs: Sequence[Tensor]
) -> tuple[str, ...]:
    """In words, where ``outputs`` differ in form from what ``schema`` promises for ``inputs``."""
    names = tuple(gradient.name for gradient in schema.outputs)
    if len(outputs) != len(names):
        return (f"expected {len(names)} gradients, got {len(outputs)}",)
    found = []
    fields = getattr(outputs, "_fields", names)
    if fields != names:
        found.append(f"expected the gradients {names}, got {fields}")

    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    sizes = {
        symbol: size
        for name, t in tensors.items()
        for symbol, size in zip(schema.input(name).shape, t.shape, strict=True)
        if isinstance(symbol, str)
    }
    owners = {_storage(t): f"input {name!r}" for name, t in tensors.items() if t.numel()}
    for gradient, output in zip(schema.outputs, outputs, strict=True):
        shape = resolve(gradient.shape, sizes)
        if type(output) is not Tensor:
            found.append(f"{gradient.name}: expected a torch.Tensor, got {type(output).__name__}")
        if output.shape != shape:
            found.append(f"{gradient.name}: expected shape {shape}, got {tuple(output.shape)}")
        if output.dtype != gradient.dtype:
            found.append(f"{gradient.name}: expected {gradient.dtype}, got {output.dtype}")
        if not output.is_contiguous():
            found.append(f"{gradient.name}: not contiguous, strides {output.stride()}")
        if output.numel():
            owner = owners.setdefault(_storage(output), f"output {gradient.name!r}")
            if owner != f"output {gradient.name!r}":
                found.append(f"{gradient.name}: shares its storage with {owner}")
    return tuple(found)


def table(checks: Iterable[CaseCheck], fmt: str = "simple") -> str:
    """One row per case and gradient, then the violations (``fmt``: a tabulate format)."""
    checks = list(checks)
    rows = [
        [f"{c.batch}x{c.seq}", g.name, g.error, g.eager_error, g.budget, "ok" if g.ok else "OVER"]
        for c in checks
        for g in c.gradients
    ]
    head = ["case", "gradient", "error", "eager's", "budget", ""]
    lines = [tabulate(rows, headers=head, floatfmt=".2e", tablefmt=fmt)]
    lines += [f"{c.batch}x{c.seq}: {violation}" for c in checks for violation in c.violations]
    return "\n".join(lines)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # As integers, because a NaN does not equal itself.
    bits = _BITS[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
