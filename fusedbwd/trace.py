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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fusedbwd.graph import SAVED_KEY
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
        gm: forward and backward in one graph. It gives the gradients, then the saved
            intermediates, each in the schema's order.
        schema: the contract that it was traced under.
        placeholders: by name, the schema's inputs that are inputs of this graph too.
        fake_mode: the mode whose fake tensors the graph's metadata holds.
    """

    gm: fx.GraphModule
    schema: Schema
    placeholders: dict[str, fx.Node]
    fake_mode: FakeTensorMode

    @property
    def gradients(self) -> list[fx.Node]:
        """The gradients' nodes, in the schema's order."""
        return list(self.gm.graph.output_node().args[0][: len(self.schema.outputs)])

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes of the schema's inputs, in order."""
        results = self.gm.graph.output_node().args[0]
        saved = iter(results[len(self.schema.outputs) :])
        return [
            next(saved) if i.kind == sch.SAVED else self.placeholders[i.name]
            for i in self.schema.inputs
        ]


@torch.inference_mode(False)  # the caller's modes are not the module's
def trace_joint(
    module: nn.Module,
    schema: Schema,
    *,
    device: torch.device,
    sizes: Mapping[str, int | torch.SymInt] | None = None,
    shape_env: ShapeEnv | None = None,
) -> JointGraph:
    """Traces ``module``'s forward and backward under ``schema``.

    Args:
        module: its forward returns one tensor and tags the intermediates that the schema saves.
        schema: names what the backward gets and gives.
        device: where the traced program is to run.
        sizes, shape_env: from :func:`open_sizes`; by default every size is open.

    Raises:
        SchemaError: the schema names something that the module does not have, or says a shape
            or dtype that differs from the module's.
        UnsupportedError: the forward does not return one tensor.
    """
    if sizes is None:
        shape_env, sizes = open_sizes(schema.symbols)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False)
    wanted = {g.of for g in schema.outputs}

    with fake_mode:
        params = {
            key: torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=device, requires_grad=key in wanted
            )
            for key, t in (*module.named_parameters(), *module.named_buffers())
        }
        arguments = _fake_arguments(module, schema, sizes, device, wanted)
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
            collect(module) as named,
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
        torch.autocast(device.type, enabled=False),
        torch.enable_grad(),
        torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
        contextlib.ExitStack() as stack,
    ):
        gm = aot_export_joint_with_descriptors(
            stack, _Program(run), primals, decompositions=compat.decompositions()
        ).graph_module

    return _joint_graph(gm, schema, names, tags, sizes, fake_mode)


def _joint_graph(gm, schema, names, tags, sizes, fake_mode) -> JointGraph:
    """The traced graph with its results arranged as :class:`JointGraph` says."""
    primals = gm.graph.find_nodes(op="placeholder")
    placeholders = dict(zip(names, primals, strict=False))
    output = gm.graph.output_node()
    _out, *results = output.args[0]
    if len(results) != len(tags) + len(names):
        raise UnsupportedError(
            f"{schema.name}: the forward changes a buffer or an argument in place; an export "
            f"cannot (a norm that tracks statistics: call .eval())"
        )
    tagged = dict(zip(tags, results, strict=False))
    grads = dict(zip(names, results[len(tags) :], strict=True))
    tangents = primals[len(names) :]
    if len(tangents) != 1:
        raise UnsupportedError(f"{schema.name}: expected one differentiable output")

    inputs: dict[str, fx.Node] = {}
    saved = []
    for i in schema.inputs:
        source = tagged if i.kind == sch.SAVED else placeholders
        key = i.name if i.kind == sch.SCALAR else i.of
        if i.kind == sch.GRAD_OUTPUT:
            inputs[i.name] = tangents[0]
        elif key not in source:
            raise SchemaError(
                f"{schema.name}: {i.kind} {i.name!r} stands for {i.of!r}, which the module does "
                f"not have; it has {sorted(source)}"
            )
        elif i.kind == sch.SAVED:
            saved.append(_saved_node(source[key]))
        else:
            inputs[i.name] = source[key]
    for g in schema.outputs:
        if grads[g.of] is None:
            raise SchemaError(f"{schema.name}: the output does not depend on {g.of!r}")
        shape = tuple(grads[g.of].meta["val"].shape)
        if shape != resolve(g.shape, sizes):
            raise SchemaError(
                f"{schema.name}: {g.name!r} is declared {list(g.shape)}, "
                f"but the gradient of {g.of!r} is {list(shape)}"
            )
    output.args = ((*(grads[g.of] for g in schema.outputs), *saved),)
    compat.drop_asserts(gm.graph)
    gm.graph.eliminate_dead_code()
    compat.remove_noop_ops(gm.graph)

    joint = JointGraph(gm, schema, inputs, fake_mode)
    for i, node in zip(schema.inputs, joint.inputs, strict=True):
        if i.kind == sch.SAVED and i.read:
            node.meta[SAVED_KEY] = i.name
        val = node.meta["val"]
        shape = resolve(i.shape, sizes)
        if val.dtype != i.dtype or tuple(val.shape) != shape:
            raise SchemaError(
                f"{schema.name}: {i.name!r} is declared {i.dtype} {list(i.shape)}, "
                f"but in the module it is {val.dtype} {list(val.shape)}"
            )
    return joint


class _Program(nn.Module):
    """A function as a module without parameters, so that its arguments keep their order."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(*primals)


def open_sizes(
    symbols: Sequence[str],
    fixed: Mapping[str, int] | None = None,
    hints: Mapping[str, int] | None = None,
) -> tuple[ShapeEnv, dict[str, int | torch.SymInt]]:
    """A value for each size symbol: that of ``fixed``, else an open size.

    Args:
        hints: values that open sizes are assumed to have where a heuristic needs one.

    Raises:
        UnsupportedError: too many symbols.
    """
    if len(symbols) > len(_SIZE_HINTS):
        raise UnsupportedError(f"at most {len(_SIZE_HINTS)} size symbols, got {list(symbols)}")
    shape_env = ShapeEnv()
    sizes: dict[str, int | torch.SymInt] = dict(fixed or {})
    for name, hint in zip(symbols, _SIZE_HINTS, strict=False):
        if name not in sizes:
            hint = hints[name] if hints else hint
            source = compat.size_source(name)
            symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            sizes[name] = shape_env.create_symintnode(symbol, hint=hint, source=source)
    return shape_env, sizes


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
                f"{schema.name}: argument {name!r} of {type(module).__name__}.forward "
                "is not declared"
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
