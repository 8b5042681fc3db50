"""How the patterns are tested: functions are traced, fused, run and compared with autograd.

A test gives a function of tensors and their shapes, which may have open sizes. Its joint graph
is built as for an export, fused under ``Config(verify=True)``, and interpreted, so that
nothing is compiled.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import fx, nn

from fusedbwd import Config, Report
from fusedbwd import schema as sch
from fusedbwd.fuse import BROKEN_OFF, fuse
from fusedbwd.numerics import budget, relative_l2, statistics_dtype, within
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, RoundedMatmuls, matmul_precision
from fusedbwd.schema import Gradient, Schema, resolve
from fusedbwd.trace import open_sizes, trace_joint

SIZES = {"b": 3, "s": 5, "t": 7}
"""The sizes that symbols have."""

OTHER_SIZES = {"b": 2, "s": 9, "t": 13}
"""More sizes, on which graphs with open sizes are run too."""

WIDTH = 33

KINDS = pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.bfloat16, False), (torch.float32, True)],
    ids=["bfloat16, static", "float32, dynamic"],
)


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of statistics: float32, or float64 where the test runs in it."""
    return x.to(statistics_dtype(x.dtype))


class _Program(nn.Module):
    def __init__(self, fn: Callable):
        super().__init__()
        self.forward = fn


def joint_graph(
    module: nn.Module | Callable,
    shapes: Mapping[str, tuple],
    dtypes: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    *,
    dynamic: bool = False,
    frozen: tuple[str, ...] = (),
) -> tuple[fx.GraphModule, list[str]]:
    """The joint graph of a function, and the names of the gradients that it gives.

    Args:
        module: a function of tensors that gives one tensor, or a module.
        shapes: of each argument, with sizes from ``SIZES`` as symbols.
        dtypes: of the arguments.
        dynamic: leaves the symbols open.
        frozen: arguments and parameters of which no gradient is wanted.
    """
    program = module if isinstance(module, nn.Module) else _Program(module)
    arguments = {
        name: sch.argument(name, shape, _dtype(dtypes, name)) for name, shape in shapes.items()
    }
    like = draw(shapes, dtypes)
    with torch.no_grad():
        out = program(**like)
    names = {size: name for name, size in SIZES.items()}
    grad = sch.grad_output("grad", tuple(names.get(d, d) for d in out.shape), out.dtype)
    leaves = {n: (a.shape, a.dtype) for n, a in arguments.items()}
    leaves |= {n: (tuple(p.shape), p.dtype) for n, p in program.named_parameters()}
    wanted = [n for n in leaves if n not in frozen]
    gradients = [Gradient(f"d_{n.replace('.', '_')}", n, *leaves[n]) for n in wanted]
    schema = Schema("test", (grad, *arguments.values()), tuple(gradients))
    shape_env, sizes = open_sizes(schema.symbols, None if dynamic else SIZES)
    sizes = {name: sizes[name] for name in schema.symbols}
    joint = trace_joint(
        program, schema, device=torch.device("cpu"), sizes=sizes, shape_env=shape_env
    )
    return joint.gm, wanted


def check(
    module: nn.Module | Callable,
    shapes: Mapping[str, tuple],
    dtypes: torch.dtype | Mapping[str, torch.dtype] = torch.float32,
    *,
    dynamic: bool = False,
    frozen: tuple[str, ...] = (),
    config: Config = Config(verify=True),  # noqa: B008
    precision: str = HIGHEST,
) -> Report:
    """Traces, fuses and runs; asserts that the gradients are as right as eager's own.

    Args:
        precision: of float32 matmuls, in force while the graph is fused. At "medium", eager
            rounds the operands of the backward's to bfloat16; under the opt-ins, to what they
            stand for.

    Returns:
        What was fused.
    """
    gm, wanted = joint_graph(module, shapes, dtypes, dynamic=dynamic, frozen=frozen)
    with matmul_precision(precision):
        report = fuse(gm.graph, config)
    assert not [m for m in report.missed if m.reason.startswith(BROKEN_OFF)], report
    for seed, sizes in enumerate((SIZES, OTHER_SIZES) if dynamic else (SIZES,)):
        values = draw(shapes, dtypes, sizes, seed)
        assert_right(gm, module, wanted, values, seed, precision=_allowed(config, precision))
    return report


def _allowed(config: Config, precision: str) -> str:
    """The rounding of matmuls' operands that our own may be compared with."""
    if config.fp16_scaled and precision != HIGHEST:
        return HIGH
    return MEDIUM if precision == MEDIUM and not config.fp16x3 else HIGHEST


def assert_right(
    gm: fx.GraphModule,
    module: nn.Module | Callable,
    wanted: list[str],
    values: Mapping[str, torch.Tensor],
    seed: int = 0,
    *,
    precision: str = HIGHEST,
) -> None:
    """The gradients that ``gm`` gives are within the budget of eager's own error; ``precision``:
    of its error with the operands of the backward's matmuls rounded as that allows."""
    program = module if isinstance(module, nn.Module) else _Program(module)
    params = {n: _random(p.shape, p.dtype, seed) for n, p in program.named_parameters()}
    with torch.no_grad():
        out = torch.func.functional_call(program, params, (), dict(values))
    grad = _random(out.shape, out.dtype, seed + 100)

    def autograd(cast, backward=contextlib.nullcontext()):  # noqa: B008
        leaves = {n: cast(t).requires_grad_(n in wanted) for n, t in (params | values).items()}
        given = {n: leaves[n] for n in values}
        out = torch.func.functional_call(program, {n: leaves[n] for n in params}, (), given)
        with backward:
            return torch.autograd.grad(out, [leaves[n] for n in wanted], cast(grad))

    expected = autograd(lambda t: t.detach().double())
    plain = eager = autograd(lambda t: t.detach().clone())
    if precision != HIGHEST:
        eager = autograd(lambda t: t.detach().clone(), RoundedMatmuls(precision))
    primals = (*params.values(), *values.values(), grad)
    actual = fx.Interpreter(gm).run(*primals, enable_io_processing=False)
    for name, a, e, own, as_ever in zip(wanted, actual, expected, eager, plain, strict=True):
        assert (a.shape, a.dtype) == (own.shape, own.dtype), name
        error, eager_error = relative_l2(a, e), relative_l2(own, e)
        computed_in = grad.dtype if torch.equal(own, as_ever) else torch.bfloat16
        allowed = budget(max(eager_error, 1e-14), a.dtype, computed_in)  # float64 rounds too
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"


def _dtype(dtypes, name: str) -> torch.dtype:
    return dtypes if isinstance(dtypes, torch.dtype) else dtypes.get(name, torch.float32)


def draw(shapes, dtypes, sizes=SIZES, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random arguments by name."""
    return {
        name: _random(resolve(shape, sizes), _dtype(dtypes, name), seed + k)
        for k, (name, shape) in enumerate(shapes.items())
    }


def _random(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments_of(fn: Callable, **shapes: tuple) -> dict[str, tuple]:
    """Shapes of ``fn``'s arguments: those given, and by their first letters else. Tokens
    (x, g, u, r) are [b, s, WIDTH], matrices (m) square, vectors (w, b) of WIDTH."""
    tokens = ("b", "s", WIDTH)
    default = dict.fromkeys("xygur", tokens) | {"m": (WIDTH, WIDTH)} | dict.fromkeys("wb", (WIDTH,))
    return {
        name: shapes[name] if name in shapes else default[name[0]]
        for name in inspect.signature(fn).parameters
    }
