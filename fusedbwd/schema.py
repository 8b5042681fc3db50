"""Saved-tensor schemas: what an exported backward takes and returns, declared once, in code.

From one :class:`Schema` come the exported callable's signature, its validation, its
documentation (:meth:`Schema.table`) and the byte count that benchmarks use as the
memory floor (:meth:`Schema.bytes`).

Shapes are tuples of integers and of symbol names: ``("batch_size", "seq_len", 5120)``.
A symbol stands for one size, the same wherever it appears; which sizes are symbols is
what an export with ``dynamic=True`` leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate

from fusedbwd.errors import SchemaError
from fusedbwd.numerics import dtype_name

Shape = tuple[int | str, ...]

# Where an input of the backward comes from in the forward.
GRAD_OUTPUT = "grad_output"  # the incoming gradient
ARGUMENT = "argument"  # an argument of the module's forward
PARAMETER = "parameter"  # a parameter or buffer of the module
SAVED = "saved"  # an intermediate that the forward names with fusedbwd.tag
SCALAR = "scalar"  # a Python float kept as an attribute of the module
_KINDS = (GRAD_OUTPUT, ARGUMENT, PARAMETER, SAVED, SCALAR)


@dataclass(frozen=True)
class Input:
    """One input of an exported backward. Build it with the functions below.

    Attributes:
        name: the keyword under which callers pass it.
        kind: one of ``grad_output``, ``argument``, ``parameter``, ``saved``, ``scalar``.
        shape: sizes and symbols; ``()`` for a scalar.
        dtype: the dtype it must have.
        meaning: one line for the documentation.
        of: the forward argument, ``state_dict`` key, tag or attribute that it stands for.
        order: the storage order of its dimensions, outermost first (``(0, 2, 1, 3)`` is a
            [B, S, N, D] buffer seen as [B, N, S, D]); ``None`` means contiguous. Tensors with
            other strides are accepted and copied.
        derived_from: set when the backward is allowed not to read it, because the named
            tensors determine it: it is then accepted, checked and ignored.
        default: a scalar's value when a call leaves it out.
    """

    name: str
    kind: str
    shape: Shape
    dtype: torch.dtype
    meaning: str = ""
    of: str = ""
    order: tuple[int, ...] | None = None
    derived_from: str = ""
    default: float | None = None

    @property
    def read(self) -> bool:
        """Whether the backward reads it (False: accepted and ignored)."""
        return not self.derived_from

    @property
    def layout(self) -> str:
        """The layout in words."""
        if self.kind == SCALAR:
            return "python float"
        return "contiguous" if self.order is None else f"stored in dim order {self.order}"

    def strides(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The strides, in elements, of a dense tensor of ``sizes`` in this layout."""
        strides = [0] * len(sizes)
        step = 1
        for dim in reversed(self.order or range(len(sizes))):
            strides[dim] = step
            step = step * sizes[dim]
        return tuple(strides)


def grad_output(name: str, shape: Shape, dtype: torch.dtype, meaning: str = "") -> Input:
    """The gradient that comes in: of the module's (single) output."""
    return Input(name, GRAD_OUTPUT, shape, dtype, meaning, of=name)


def argument(
    name: str, shape: Shape, dtype: torch.dtype, meaning: str = "", *, of: str = "", **kw
) -> Input:
    """An argument of the module's forward, called ``of`` there (default: ``name``)."""
    return Input(name, ARGUMENT, shape, dtype, meaning, of=of or name, **kw)


def parameter(
    name: str, shape: Shape, dtype: torch.dtype, meaning: str = "", *, of: str = ""
) -> Input:
    """A parameter or buffer, under its ``state_dict`` key ``of`` (default: ``name``)."""
    return Input(name, PARAMETER, shape, dtype, meaning, of=of or name)


def saved(
    name: str, shape: Shape, dtype: torch.dtype, meaning: str = "", *, of: str = "", **kw
) -> Input:
    """An intermediate that the forward marks with ``fusedbwd.tag(tensor, of)``."""
    return Input(name, SAVED, shape, dtype, meaning, of=of or name, **kw)


def scalar(name: str, default: float, meaning: str = "", *, of: str = "") -> Input:
    """A float attribute of the module (``of``, dotted for submodules), given anew at each call."""
    return Input(name, SCALAR, (), torch.float32, meaning, of=of or name, default=default)


@dataclass(frozen=True)
class Gradient:
    """One output of an exported backward: the gradient of argument or parameter ``of``.

    ``dtype`` may be wider than the parameter's (a bf16 norm weight whose gradient is wanted
    in fp32): the sum is then returned as accumulated, before autograd's final cast.
    """

    name: str
    of: str
    shape: Shape
    dtype: torch.dtype
    meaning: str = ""


@dataclass(frozen=True)
class Schema:
    """The contract of one exported backward: its inputs and gradients, both in order."""

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        for what, items in (("input", self.inputs), ("output", self.outputs)):
            names = [item.name for item in items]
            for name in names:
                if not name.isidentifier():
                    raise SchemaError(f"{self.name}: {what} name {name!r} is not an identifier")
                if names.count(name) > 1:
                    raise SchemaError(f"{self.name}: {what} {name!r} is declared twice")
        for i in self.inputs:
            if i.kind not in _KINDS:
                raise SchemaError(f"{self.name}: input {i.name!r} has unknown kind {i.kind!r}")
            if i.order is not None and sorted(i.order) != list(range(len(i.shape))):
                raise SchemaError(
                    f"{self.name}: input {i.name!r} has order {i.order}, "
                    f"not a permutation of its {len(i.shape)} dimensions"
                )
        if sum(i.kind == GRAD_OUTPUT for i in self.inputs) != 1:
            raise SchemaError(f"{self.name}: exactly one grad_output input must be declared")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The size symbols, in order of first appearance."""
        shapes = [i.shape for i in self.inputs] + [o.shape for o in self.outputs]
        return tuple(dict.fromkeys(d for shape in shapes for d in shape if isinstance(d, str)))

    def input(self, name: str) -> Input:
        """The input called ``name``; KeyError when there is none."""
        for i in self.inputs:
            if i.name == name:
                return i
        raise KeyError(name)

    def with_unread(self, unread: Mapping[str, str]) -> Schema:
        """A copy in which each input named in ``unread`` is accepted only; values say why."""
        return replace(
            self,
            inputs=tuple(
                replace(i, derived_from=unread[i.name]) if i.name in unread else i
                for i in self.inputs
            ),
        )

    def bytes(self, **sizes: int) -> int:
        """Least bytes a call must move: each input that is read once, each output once.

        Args:
            sizes: a value for every symbol, e.g. ``batch_size=8, seq_len=256``.
        """
        moved = [(i.shape, i.dtype) for i in self.inputs if i.read and i.kind != SCALAR]
        moved += [(o.shape, o.dtype) for o in self.outputs]
        return sum(math.prod(resolve(shape, sizes)) * dtype.itemsize for shape, dtype in moved)

    def table(self, fmt: str = "github") -> str:
        """The documentation of the contract as two tables (``fmt``: a tabulate format)."""
        ins = [
            [
                i.name,
                _shape_text(i.shape),
                dtype_name(i.dtype),
                i.layout,
                i.kind if i.of == i.name else f"{i.kind} {i.of}",
                "read" if i.read else f"accepted, not read (follows from {i.derived_from})",
                i.meaning,
            ]
            for i in self.inputs
        ]
        outs = [
            [o.name, _shape_text(o.shape), dtype_name(o.dtype), o.of, o.meaning]
            for o in self.outputs
        ]
        head_in = ["input", "shape", "dtype", "layout", "producer", "use", "meaning"]
        head_out = ["output", "shape", "dtype", "gradient of", "meaning"]
        return "\n\n".join(
            tabulate(rows, headers=head, tablefmt=fmt)
            for rows, head in ((ins, head_in), (outs, head_out))
        )


def resolve(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """``shape`` with every symbol replaced by its value; SchemaError when one has none."""
    try:
        return tuple(sizes[d] if isinstance(d, str) else d for d in shape)
    except KeyError as missing:
        raise SchemaError(f"no value given for the size {missing.args[0]!r}") from None


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]" if shape else "scalar"
