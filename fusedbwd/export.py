"""The backward of a module as a plain callable over documented saved tensors."""

from __future__ import annotations

import copy
import logging
import threading
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import nn

from fusedbwd import schema as sch
from fusedbwd.codegen import CompiledBackward, compile_backward
from fusedbwd.config import Config
from fusedbwd.errors import InputError, SchemaError, UnsupportedError
from fusedbwd.fuse import fuse
from fusedbwd.kernels._routes import EDGES
from fusedbwd.limits import warn_if_untested
from fusedbwd.partition import backward_graph, unread
from fusedbwd.precision import HIGHEST, in_force
from fusedbwd.problems import get_problem
from fusedbwd.report import Report
from fusedbwd.schema import Schema, resolve
from fusedbwd.trace import open_sizes, trace_joint

log = logging.getLogger("fusedbwd")

_MAX_VARIANTS = 16

_COMPILE_LOCK = threading.Lock()  # FX tracing and Inductor keep state of the process


def export_backward(
    module: nn.Module | str,
    saved: Schema | None = None,
    *,
    dynamic: bool = True,
    sizes: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
) -> ExportedBackward:
    """Compiles the backward of ``module`` as a function of the tensors that ``saved`` names.

    Args:
        module: a module whose forward returns one tensor and marks its intermediates with
            :func:`fusedbwd.tag`; or the name of a reference problem, whose module is then
            built with its own dimensions.
        saved: the contract. May be left out for a reference problem; for other modules see
            :func:`fusedbwd.infer_schema`.
        dynamic: one compilation serves every value of the schema's size symbols. Sizes of 1,
            and sizes beyond what 32-bit indices reach, are compiled apart when first met, and so
            are ranges of tokens with other routes and each precision of float32 matmuls (at most
            sixteen variants in all). False: compile for ``sizes`` alone.
        sizes: a value for each size symbol; needed when ``dynamic`` is False.
        device: where the backward is to run; by default where the module's parameters are.
        config: what to fuse.

    Returns:
        A callable; see :class:`ExportedBackward`.

    Raises:
        SchemaError: the schema does not fit the module.
        UnsupportedError: a module or device that cannot be exported.
        FusionError: ``config.strict`` and nothing was fused.
    """
    warn_if_untested()
    if isinstance(module, str):
        problem = get_problem(module)
        module = problem.build(device=device)
        saved = saved or problem.schema(module)
    if saved is None:
        raise SchemaError("saved=None: give a schema, for example from fusedbwd.infer_schema")
    if dynamic and sizes is not None:
        raise SchemaError("sizes are given, but dynamic=True leaves them open")
    if not dynamic and set(sizes or ()) != set(saved.symbols):
        raise SchemaError(f"dynamic=False needs sizes for exactly {list(saved.symbols)}")
    where = torch.device(device) if device is not None else _device_of(module)
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"fusedbwd runs on cpu and cuda devices, not on {where}")
    if where.type == "cpu":
        where = torch.device("cpu")
    elif not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"there is no device {where}")
    elif where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return ExportedBackward(module, saved, where, config or Config(), sizes)


@dataclass
class _Variant:
    """One compilation: fit for the sizes that satisfy ``guards`` and equal ``fixed``, and for the
    precisions of float32 matmuls in its report, or for any if there are none."""

    compiled: CompiledBackward
    report: Report
    fixed: dict[str, int]
    guards: list
    symbols: dict[str, object]
    unread: set[str]

    def allows(self, precision: str) -> bool:
        return precision in (self.report.precisions or [precision])

    def fits(self, sizes: Mapping[str, int]) -> bool:
        if any(sizes[name] != size for name, size in self.fixed.items()):
            return False
        values = {symbol: sizes[name] for name, symbol in self.symbols.items()}
        if any(v < 2 for v in values.values()):
            return False
        return all(bool(guard.xreplace(values)) for guard in self.guards)

    def token_ranges(self) -> list[str]:
        """The guards that routes of matmuls left, in the names of the schema's sizes."""
        names = {symbol: sympy.Symbol(name) for name, symbol in self.symbols.items()}
        edges = (g for g in self.guards if any(n in EDGES for n in g.atoms(sympy.Integer)))
        return sorted({str(g.xreplace(names)) for g in edges})


@dataclass
class _Plan:
    """What a call with certain sizes needs, worked out once."""

    variant: _Variant | None
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]


class ExportedBackward:
    """A compiled backward: ``bwd(**inputs)`` or ``bwd(*inputs)``, in the schema's order.

    Returns a named tuple of the gradients in the schema's order: fresh contiguous tensors that
    share no storage with the inputs or with one another. Inputs are never written to. Tensors
    may have any strides (others than the documented ones are copied first) and require grad or
    not; nothing is recorded for autograd. Scalars are floats and may be left out for their
    defaults. Inputs that the schema calls unread are checked and ignored. Float32 matmuls have
    the precision that ``torch.set_float32_matmul_precision`` gives at the time of the call.

    Attributes:
        schema: the contract, ``print(bwd.schema.table())``.
        report: what was fused and what was not, and why.
    """

    def __init__(self, module, schema: Schema, device: torch.device, config: Config, sizes):
        self.schema = schema
        self.device = device
        self.config = config
        self._module = _skeleton(module)
        self._fixed = dict(sizes) if sizes is not None else None
        self._lock = threading.Lock()
        self._variants: list[_Variant] = []
        self._plans: dict[tuple, _Plan] = {}
        self._scalars: dict[tuple[str, float], torch.Tensor] = {}
        self._names = [i.name for i in schema.inputs]
        self._name_set = set(self._names)
        self._result = namedtuple(  # type: ignore[misc]
            f"{schema.name}_gradients", [o.name for o in schema.outputs]
        )
        self._specs = [(k, i.dtype, i.kind == sch.SCALAR) for k, i in enumerate(schema.inputs)]
        self._sources = [self._source(symbol) for symbol in schema.symbols]
        self._compile(self._fixed, hints=None)

    @property
    def report(self) -> Report:
        """What was fused, of the first variant compiled for the precision in force, or of the
        first at all."""
        precision = in_force()
        found = (v.report for v in self._variants if v.allows(precision))
        return next(found, self._variants[0].report)

    @property
    def variants(self) -> list[str]:
        """The variants compiled so far, in words."""
        return [
            ", ".join(
                [f"{k}={v.fixed.get(k, 'any')}" for k in self.schema.symbols]
                + v.token_ranges()
                + [f"float32 matmuls at {p!r}" for p in v.report.precisions if p != HIGHEST]
            )
            for v in self._variants
        ]

    @property
    def unread(self) -> set[str]:
        """The names of the inputs that no compiled variant reads."""
        return set.intersection(*(v.unread for v in self._variants))

    def kernels(self) -> list[str]:
        """The generated source of each variant: Inductor's wrapper with the kernels in it."""
        return [v.compiled.source for v in self._variants]

    def run(self, *inputs):
        """Positional form of the call, every input in the schema's order."""
        return self(*inputs)

    def __call__(self, *inputs, **named):
        """See the class. Raises InputError for inputs that do not fit the schema."""
        if named or len(inputs) != len(self._names):
            inputs = self._bind(inputs, named)
        plan = self._plan(inputs)
        args = []
        for k, dtype, is_scalar in self._specs:
            t = inputs[k]
            if is_scalar:
                args.append(self._scalar(k, t))
            elif (
                isinstance(t, torch.Tensor)
                and t.dtype is dtype
                and t.device == self.device
                and t.shape == plan.shapes[k]
            ):
                if t.stride() != plan.strides[k]:
                    t = _laid_out(t, plan.strides[k])
                args.append(t)
            else:
                raise self._misfit(k, t, plan.shapes[k])
        if plan.variant is None:
            return self._zeros(inputs)
        with torch.no_grad():
            return self._result(*plan.variant.compiled.run(args))

    # --- binding and checking

    def _bind(self, inputs: tuple, named: Mapping) -> tuple:
        if len(inputs) > len(self._names):
            raise InputError(
                f"{self.schema.name} takes {len(self._names)} inputs, got {len(inputs)}"
            )
        if not inputs and named.keys() == self._name_set:
            return tuple(map(named.__getitem__, self._names))
        given = dict(zip(self._names, inputs, strict=False))
        for name, t in named.items():
            if name not in self._names:
                raise InputError(f"{self.schema.name} has no input {name!r}; it has {self._names}")
            if name in given:
                raise InputError(f"input {name!r} is given twice")
            given[name] = t
        for i in self.schema.inputs:
            if i.name not in given:
                if i.default is None:
                    raise InputError(f"input {i.name!r} ({i.dtype}, {list(i.shape)}) is missing")
                given[i.name] = i.default
        return tuple(given[name] for name in self._names)

    def _source(self, symbol: str) -> tuple[int, int]:
        """Which input and dimension a size symbol is read from."""
        for k, i in enumerate(self.schema.inputs):
            if symbol in i.shape:
                return k, i.shape.index(symbol)
        raise SchemaError(f"no input has the size {symbol!r}")

    def _plan(self, inputs: tuple) -> _Plan:
        sizes = []
        for k, dim in self._sources:
            t = inputs[k]
            if not isinstance(t, torch.Tensor) or t.dim() != len(self.schema.inputs[k].shape):
                raise self._misfit(k, t, self.schema.inputs[k].shape)
            sizes.append(t.shape[dim])
        precision = in_force()
        key = (precision, *sizes)
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans[key] = self._make_plan(sizes, precision)
        return plan

    def _make_plan(self, sizes: Sequence[int], precision: str) -> _Plan:
        values = dict(zip(self.schema.symbols, sizes, strict=True))
        shapes = [resolve(i.shape, values) for i in self.schema.inputs]
        strides = [i.strides(shape) for i, shape in zip(self.schema.inputs, shapes, strict=True)]
        if self._fixed is not None and values != self._fixed:
            raise InputError(
                f"{self.schema.name} was exported for {self._fixed} alone, got {values}"
            )
        if 0 in sizes:
            return _Plan(None, shapes, strides)
        for variant in self._variants:
            if variant.allows(precision) and variant.fits(values):
                return _Plan(variant, shapes, strides)
        fixed = self._fixed or {name: 1 for name, size in values.items() if size == 1}
        return _Plan(self._compile(fixed, hints=values), shapes, strides)

    def _misfit(self, k: int, t: object, shape: tuple) -> InputError:
        i = self.schema.inputs[k]
        expected = f"{i.dtype} {list(shape)} on {self.device}"
        if i.shape != tuple(shape):
            expected += f" (declared {list(i.shape)})"
        if isinstance(t, torch.Tensor):
            return InputError(
                f"input {i.name!r}: expected {expected}, "
                f"got {t.dtype} {list(t.shape)} on {t.device}"
            )
        return InputError(f"input {i.name!r}: expected {expected}, got {type(t).__name__}")

    def _scalar(self, k: int, number: object) -> torch.Tensor:
        """A 0-d tensor on the device; each value is copied there once."""
        name = self._names[k]
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InputError(f"input {name!r}: expected a float, got {type(number).__name__}")
        key = (name, float(number))
        if key not in self._scalars:
            self._scalars[key] = torch.tensor(
                float(number), dtype=self.schema.inputs[k].dtype, device=self.device
            )
        return self._scalars[key]

    def _zeros(self, inputs: tuple):
        """The gradients of an empty batch."""
        values = {
            symbol: inputs[k].shape[dim]
            for symbol, (k, dim) in zip(self.schema.symbols, self._sources, strict=True)
        }
        return self._result(
            *(
                torch.zeros(resolve(o.shape, values), dtype=o.dtype, device=self.device)
                for o in self.schema.outputs
            )
        )

    # --- compilation

    def __reduce__(self):
        raise UnsupportedError(
            f"{self.schema.name}: a compiled backward cannot be copied or pickled; export it again"
        )

    def _compile(self, fixed: Mapping[str, int] | None, hints) -> _Variant:
        with _COMPILE_LOCK:
            return self._compile_variant(fixed, hints)

    def _compile_variant(self, fixed: Mapping[str, int] | None, hints) -> _Variant:
        if len(self._variants) >= _MAX_VARIANTS:
            raise UnsupportedError(
                f"{self.schema.name}: more than {_MAX_VARIANTS} variants were needed; the last "
                f"sizes were {dict(hints)}"
            )
        fixed = dict(fixed or {})
        shape_env, sizes = open_sizes(self.schema.symbols, fixed, hints)
        joint = trace_joint(
            self._module, self.schema, device=self.device, sizes=sizes, shape_env=shape_env
        )
        report = fuse(joint.gm.graph, self.config)
        backward = backward_graph(joint)
        ignored = unread(backward.graph)
        compiled = compile_backward(backward, joint.fake_mode, self.config)
        symbols = {n: s.node.expr for n, s in sizes.items() if isinstance(s, torch.SymInt)}
        for name, symbol in symbols.items():
            if not symbol.is_Symbol:
                raise UnsupportedError(
                    f"{self.schema.name}: tracing fixed the size {name!r} to {symbol}"
                )
        variant = _Variant(
            compiled, report, fixed, [g.expr for g in shape_env.guards], symbols, ignored
        )
        self._variants.append(variant)
        log.debug("%s compiled for %s", self.schema.name, self.variants[-1])
        return variant


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of ``module`` without its weights. Variants are traced from it when they are first
    needed: what happens to the module meanwhile, in other threads too, does not matter."""
    tensors = (*module.parameters(), *module.buffers())
    empty = {
        id(t): nn.Parameter(torch.empty_like(t, device="meta"), requires_grad=t.requires_grad)
        if isinstance(t, nn.Parameter)
        else torch.empty_like(t, device="meta")
        for t in tensors
    }
    try:
        return copy.deepcopy(module, empty)
    except Exception as error:
        raise UnsupportedError(f"{type(module).__name__} cannot be copied: {error}") from error


def _device_of(module: nn.Module) -> torch.device:
    devices = {p.device for p in module.parameters()}
    if len(devices) > 1:
        raise UnsupportedError(f"the module's parameters are on several devices: {devices}")
    return devices.pop() if devices else torch.device("cpu")


def _laid_out(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``t`` with the strides that the compiled code expects, copied unless only those of
    dimensions of size 1 differ."""
    pairs = zip(t.shape, t.stride(), strides, strict=True)
    if all(size == 1 or have == want for size, have, want in pairs):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t.detach())
