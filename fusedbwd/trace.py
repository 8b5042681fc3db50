"""Module → joint graph: AOTAutograd's forward and backward of a module in one FX graph.

Composite backward ops (``silu_backward``, ``native_layer_norm_backward``, …) are kept
whole: they are the anchors that the patterns match. :mod:`fusedbwd.fuse` expands whatever
no pattern took.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fusedbwd import compat
from fusedbwd import schema as sch
from fusedbwd.errors import SchemaError, UnsupportedError
from fusedbwd.schema import Schema, resolve
from fusedbwd.tagging import collect

aten = torch.ops.aten

# Sizes assumed while compiling with open sizes: they steer heuristics, not results. Distinct
# and unlike any width, so that no size is mistaken for another.
_SIZE_HINTS = (8, 251, 13, 17, 19, 23)

_TRACE_LOCK = threading.Lock()  # scalars are swapped on the module while it is traced


@dataclass
class JointGraph:
    """A traced module.

    Attributes:
        gm: forward and backward in one graph; its output is the forward's outputs, then one
            gradient (or None) per primal.
        inputs: the node of each schema input that the graph has, by name.
        gradients: the node of each schema output, by name.
        fake_mode: the mode whose fake tensors the graph's metadata holds.
        sizes: the value of each size symbol while tracing: SymInt (open) or int (fixed).
    """

    gm: fx.GraphModule
    inputs: dict[str, fx.Node]
    gradients: dict[str, fx.Node]
    fake_mode: FakeTensorMode
    sizes: dict[str, int | torch.SymInt]


def trace_joint(
    module: nn.Module,
    schema: Schema,
    *,
    device: torch.device,
    sizes: Mapping[str, int] | None = None,
) -> JointGraph:
    """Traces ``module``'s forward and backward under ``schema``.

    Args:
        module: its forward returns one tensor and tags the intermediates that the schema saves.
        schema: names what the backward gets and gives.
        device: where the traced program is to run.
        sizes: a value for each size symbol to compile for these sizes alone; None leaves every
            symbol open.

    Raises:
        SchemaError: the schema names something that the module does not have, or says a shape
            or dtype that differs from the module's.
        UnsupportedError: the forward does not return one tensor.
    """
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False)
    values = dict(sizes) if sizes is not None else _open_sizes(shape_env, schema.symbols)
    wanted = {g.of for g in schema.outputs}

    with fake_mode:
        params = {
            key: torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=device, requires_grad=key in wanted
            )
            for key, t in (*module.named_parameters(), *module.named_buffers())
        }
        arguments = _fake_arguments(module, schema, values, device, wanted)
        scalars = {
            i.name: torch.empty((), dtype=i.dtype, device=device)
            for i in schema.inputs
            if i.kind == sch.SCALAR
        }
    unknown = wanted - params.keys() - arguments.keys()
    if unknown:
        raise SchemaError(
            f"{schema.name}: gradients are declared of {sorted(unknown)}, which are neither "
            f"parameters nor arguments of {type(module).__name__}"
        )

    tags: list[str] = []
    attributes = {i.name: i.of for i in schema.inputs if i.kind == sch.SCALAR}
    names = [*params, *arguments, *scalars]

    def run(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(names, primals, strict=True))
        with (
            _swapped_attributes(module, {attributes[n]: given[n] for n in scalars}),
            collect() as named,
        ):
            out = functional_call(
                module, {k: given[k] for k in params}, tuple(given[k] for k in arguments)
            )
        if not isinstance(out, torch.Tensor):
            raise UnsupportedError(
                f"{type(module).__name__}.forward must return one tensor to export its backward, "
                f"got {type(out).__name__}"
            )
        tags[:] = named
        # A clone, because AOTAutograd treats outputs that are views of one another specially;
        # the clones themselves are dropped below.
        return (out, *(t.detach().clone() for t in named.values()))

    primals = (*params.values(), *arguments.values(), *scalars.values())
    with (
        _TRACE_LOCK,
        torch.enable_grad(),
        torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
        contextlib.ExitStack() as stack,
    ):
        gm = aot_export_joint_with_descriptors(
            stack, _Program(run), primals, decompositions=compat.decompositions()
        ).graph_module

    placeholders = gm.graph.find_nodes(op="placeholder")
    by_name = dict(zip(names, placeholders, strict=False))
    results = list(gm.graph.output_node().args[0])
    tagged = dict(zip(tags, map(_saved_node, results[1 : 1 + len(tags)]), strict=True))
    grads = dict(zip(names, results[1 + len(tags) :], strict=True))
    inputs = _input_nodes(schema, by_name, tagged, placeholders[len(names) :])
    _check_inputs(schema, inputs, values)
    for g in schema.outputs:
        if grads[g.of] is None:
            raise SchemaError(f"{schema.name}: the output does not depend on {g.of!r}")
    gradients = {g.name: grads[g.of] for g in schema.outputs}
    return JointGraph(gm, inputs, gradients, fake_mode, values)


class _Program(nn.Module):
    """A function as a module without parameters, so that its arguments keep their order."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(*primals)


def _open_sizes(shape_env: ShapeEnv, symbols: tuple[str, ...]) -> dict[str, torch.SymInt]:
    if len(symbols) > len(_SIZE_HINTS):
        raise UnsupportedError(f"at most {len(_SIZE_HINTS)} size symbols, got {symbols}")
    sizes = {}
    for name, hint in zip(symbols, _SIZE_HINTS, strict=False):
        source = compat.size_source(name)
        symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        sizes[name] = shape_env.create_symintnode(symbol, hint=hint, source=source)
    return sizes


def _fake_arguments(module, schema, sizes, device, wanted) -> dict[str, torch.Tensor]:
    """A fake tensor for each argument of the forward, in the forward's order."""
    declared = {i.of: i for i in schema.inputs if i.kind == sch.ARGUMENT}
    parameters = inspect.signature(module.forward).parameters
    unknown = declared.keys() - parameters.keys()
    if unknown:
        raise SchemaError(
            f"{schema.name}: {sorted(unknown)} are not arguments of {type(module).__name__}.forward"
        )
    fakes = {}
    for name, p in parameters.items():
        if name in declared:
            i = declared[name]
            shape = resolve(i.shape, sizes)
            fakes[name] = torch.empty_strided(
                shape, i.strides(shape), dtype=i.dtype, device=device, requires_grad=name in wanted
            )
        elif p.default is inspect.Parameter.empty:
            raise SchemaError(
                f"{schema.name}: argument {name!r} of {type(module).__name__}.forward is not declared"
            )
        else:
            break  # from here on the forward's own defaults
    missing = declared.keys() - fakes.keys()
    if missing:
        raise SchemaError(f"{schema.name}: {sorted(missing)} follow an undeclared argument")
    return fakes


@contextlib.contextmanager
def _swapped_attributes(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """``module``'s float attributes replaced by tensors, and put back."""
    undo = []
    try:
        for path, value in values.items():
            owner_path, _, attribute = path.rpartition(".")
            owner = operator.attrgetter(owner_path)(module) if owner_path else module
            if attribute not in vars(owner):
                raise SchemaError(f"{type(module).__name__} has no attribute {path!r}")
            undo.append((owner, attribute, vars(owner)[attribute]))
            vars(owner)[attribute] = value
        yield
    finally:
        for owner, attribute, value in undo:
            vars(owner)[attribute] = value


def _saved_node(node: fx.Node) -> fx.Node:
    """The intermediate behind the detached clone that the traced forward returns."""
    while node.op == "call_function" and node.target in (
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
    ):
        node = node.all_input_nodes[0]
    return node


def _input_nodes(schema, by_name, tagged, tangents) -> dict[str, fx.Node]:
    if len(tangents) != 1:
        raise UnsupportedError(f"{schema.name}: expected one differentiable output")
    nodes = {}
    for i in schema.inputs:
        source = tagged if i.kind == sch.SAVED else by_name
        if i.kind == sch.GRAD_OUTPUT:
            nodes[i.name] = tangents[0]
        elif i.kind == sch.SCALAR:
            nodes[i.name] = by_name[i.name]
        elif i.of in source:
            nodes[i.name] = source[i.of]
        else:
            raise SchemaError(
                f"{schema.name}: {i.kind} {i.name!r} stands for {i.of!r}, which the module does "
                f"not have; it has {sorted(source)}"
            )
    return nodes


def _check_inputs(schema, nodes, sizes) -> None:
    for i in schema.inputs:
        val = nodes[i.name].meta["val"]
        shape = resolve(i.shape, sizes)
        if val.dtype != i.dtype or len(val.shape) != len(shape) or tuple(val.shape) != shape:
            raise SchemaError(
                f"{schema.name}: {i.name!r} is declared {i.dtype} {list(i.shape)}, "
                f"but in the module it is {val.dtype} {list(val.shape)}"
            )
