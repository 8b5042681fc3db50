"""A saved-tensor schema read off one run of a module's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusedbwd import schema as sch
from fusedbwd.errors import SchemaError, UnsupportedError
from fusedbwd.schema import Gradient, Input, Schema, Shape
from fusedbwd.tagging import collect


def infer_schema(module: nn.Module, *example_args: Tensor, sizes: Mapping[str, int]) -> Schema:
    """The contract of ``module``'s backward, from a run of its forward on ``example_args``.

    Inputs, in order: ``grad_output``; the forward's arguments; the intermediates that it marks
    with :func:`fusedbwd.tag`; its parameters and buffers, with ``_`` for ``.`` in their names.
    Outputs: a gradient ``grad_<name>`` in its tensor's dtype for each argument that requires
    grad (if none does: each floating one), then for each parameter that requires grad.

    A tagged tensor that is an argument, a parameter or an earlier tagged tensor over again is
    left out: callers pass each tensor once, under its first name.

    Args:
        example_args: the forward's tensors, positionally; later arguments keep their defaults.
        sizes: what each size symbol is in this run. Dimensions of that size become the symbol;
            all others are fixed. Values have to be telling: at least 2, distinct, and unlike
            every dimension of a parameter. One that equals another constant of the module (a
            head count, say) cannot be noticed here; the export then reports the misfit.

    Raises:
        SchemaError: ``sizes`` is ambiguous or names a size that occurs nowhere; a name is
            declared twice or is no identifier.
        UnsupportedError: an example argument or the output is not one tensor.
    """
    name = type(module).__name__
    arguments = _named_arguments(module, example_args)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    symbols = _symbols(name, sizes, state)
    with torch.no_grad(), collect(module) as tagged:
        output = module(*example_args)
    if not isinstance(output, Tensor):
        raise UnsupportedError(
            f"{name}.forward must return one tensor, got {type(output).__name__}"
        )

    def shape(t: Tensor) -> Shape:
        return tuple(symbols.get(size, size) for size in t.shape)

    inputs = [sch.grad_output("grad_output", shape(output), output.dtype)]
    for key, t in arguments.items():
        inputs.append(sch.argument(key, shape(t), t.dtype, order=_order(t)))
    declared = {_identity(t) for t in (*state.values(), *arguments.values())}
    for key, t in tagged.items():
        if _identity(t) not in declared:
            declared.add(_identity(t))
            inputs.append(sch.saved(key, shape(t), t.dtype, order=_order(t)))
    for key, t in state.items():
        own = tuple(t.shape)
        inputs.append(Input(_identifier(key), sch.PARAMETER, own, t.dtype, of=key, order=_order(t)))
    unused = [s for s in sizes if not any(s in i.shape for i in inputs)]
    if unused:
        raise SchemaError(f"{name}: no dimension has the size of {', '.join(map(repr, unused))}")

    floating = {key: t for key, t in arguments.items() if t.is_floating_point()}
    wanted = {key: t for key, t in floating.items() if t.requires_grad} or floating
    outputs = [Gradient(f"grad_{key}", key, shape(t), t.dtype) for key, t in wanted.items()]
    outputs += [
        Gradient(f"grad_{_identifier(key)}", key, tuple(t.shape), t.dtype)
        for key, t in module.named_parameters()
        if t.requires_grad
    ]
    return Schema(f"{name}_backward", tuple(inputs), tuple(outputs))


def _named_arguments(module: nn.Module, example_args: tuple) -> dict[str, Tensor]:
    """The example arguments by their names in the forward's signature."""
    name = type(module).__name__
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*example_args).arguments
    except TypeError as error:
        raise SchemaError(f"{name}.forward: {error}") from None
    for key, t in bound.items():
        if not isinstance(t, Tensor):
            raise UnsupportedError(
                f"{name}.forward: expected a tensor for {key!r}, got {type(t).__name__}; leave it "
                "out for its default, or make it an attribute of the module"
            )
    return bound


def _symbols(name: str, sizes: Mapping[str, int], state: Mapping[str, Tensor]) -> dict[int, str]:
    """The symbol that each size stands for."""
    symbols: dict[int, str] = {}
    for symbol, size in sizes.items():
        if size < 2:
            raise SchemaError(f"{name}: {symbol} = {size}: an example size must be at least 2")
        if size in symbols:
            raise SchemaError(
                f"{name}: {symbols[size]} and {symbol} are both {size}: give them distinct sizes"
            )
        same = [key for key, t in state.items() if size in t.shape]
        if same:
            raise SchemaError(
                f"{name}: {symbol} = {size} is also a dimension of {', '.join(same)}: run the "
                "forward on another size"
            )
        symbols[size] = symbol
    return symbols


def _identifier(key: str) -> str:
    return key.replace(".", "_")


def _identity(t: Tensor) -> tuple:
    """Equal for two tensors exactly when they show the same memory in the same way."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


def _order(t: Tensor) -> tuple[int, ...] | None:
    """The storage order of a dense permuted tensor; None for any other, which calls copy."""
    if t.is_contiguous():
        return None
    strides = t.stride()
    order = tuple(sorted(range(t.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if t.permute(order).is_contiguous() else None
