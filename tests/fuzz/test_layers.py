"""Random layers, fused: gradients as right as eager's, whatever is frozen or switched off."""

import contextlib
import copy
import math

import torch
from fuzzing import examples
from harness import OTHER_SIZES, SIZES, joint_graph
from hypothesis import event, example, given
from hypothesis import strategies as st
from layers import DIM, WIDTH, Layer, Part, layers
from torch import fx, nn

import fusedbwd
from fusedbwd import Config
from fusedbwd.fuse import BROKEN_OFF, fuse
from fusedbwd.numerics import budget
from fusedbwd.patterns import PATTERNS
from fusedbwd.precision import HIGHEST, MEDIUM, RoundedMatmuls, matmul_precision
from fusedbwd.schema import resolve

ROUNDS = 64
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def parameters(module: nn.Module, dtype, generator) -> dict[str, torch.Tensor]:
    """Random ones; matrices are scaled so that activations keep their size."""
    return {
        name: (torch.randn(p.shape, generator=generator) / p.shape[-1] ** (0.5 * (p.dim() - 1))).to(
            dtype
        )
        for name, p in module.named_parameters()
    }


def autograd(module, leaves, names, wanted, grad, cast, backward=contextlib.nullcontext()):  # noqa: B008
    """Eager's gradients, with every tensor cast."""
    leaves = {n: cast(t).detach().clone().requires_grad_(n in wanted) for n, t in leaves.items()}
    params = {n: t for n, t in leaves.items() if n not in names}
    out = torch.func.functional_call(module, params, tuple(leaves[n] for n in names))
    with backward:
        return torch.autograd.grad(
            out, [leaves[n] for n in wanted], cast(grad), allow_unused=True, materialize_grads=True
        )


def check(module, fused, shapes, wanted, dtype, sizes, *, rounded=False):
    """Draws until the errors of all rounds together are within the budget of eager's: one round's
    ratio is a matter of luck, that of many is not."""
    total = {name: torch.zeros(3, dtype=torch.float64) for name in wanted}
    for seed in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed)
        leaves = parameters(module, dtype, generator)
        for name, shape in shapes.items():
            leaves[name] = torch.randn(resolve(shape, sizes), generator=generator).to(dtype)
        shape = resolve(shapes["x"], sizes)
        grad = torch.randn(shape, generator=generator).to(dtype)
        right = autograd(module, leaves, shapes, wanted, grad, torch.Tensor.double)
        rounding = RoundedMatmuls() if rounded else contextlib.nullcontext()
        eager = autograd(module, leaves, shapes, wanted, grad, lambda t: t, rounding)
        actual = fused(leaves, grad)
        for name, a, e, r in zip(wanted, actual, eager, right, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            errors = [(a.double() - r).norm(), (e.double() - r).norm(), r.norm()]
            total[name] += torch.stack(errors).square()
        if seed >= 3 and not (over := beyond(total, dtype, rounded)):
            return
    raise AssertionError(f"errors, and what is allowed: {over}")


def beyond(total, dtype, rounded):
    """The gradients whose error is larger than allowed: name, error, allowance."""
    found = []
    largest = max(t[2].item() for t in total.values())
    for name, squares in total.items():
        error, eager, norm = squares.sqrt().tolist()
        if dtype == torch.float64:  # against autograd itself, so there is no error to go by
            allowed = 1e-9 * norm + 1e-13 * math.sqrt(largest)
        else:
            computed_in = torch.bfloat16 if rounded else dtype
            allowed = budget(eager / norm if norm else 0.0, dtype, computed_in) * norm
        if not error <= allowed:
            found.append((name, error, allowed))
    return found


@st.composite
def configs(draw):
    """A fusion is off in one of five cases."""
    off = [p.name for p in PATTERNS if draw(st.integers(0, 4)) == 0]
    return Config(verify=True, **dict.fromkeys(off, False))


@st.composite
def programs(draw, dtypes=DTYPES):
    """A layer, the shapes of its arguments, the leaves that want a gradient, a dtype."""
    module, dtype = Layer(draw(layers)), draw(dtypes)
    tokens = ("b", "s")
    if not module.attends:
        tokens = draw(st.sampled_from([("b", "s"), ("t",), ("b", 2, "s"), (1, 1)]))
    shapes = {"x": (*tokens, WIDTH)}
    if module.attends:
        shapes |= dict.fromkeys(("cos", "sin"), ("b", "s", DIM))
    names = ["x", *(n for n, _ in module.named_parameters())]
    often = draw(st.sampled_from([1, 5, 30]))
    wanted = [n for n in names if draw(st.integers(0, often)) > 0]
    frozen = [n for n in names if n not in (wanted or names[:1])] + list(shapes)[1:]
    return module.to(dtype), shapes, tuple(frozen), dtype


def note(report):
    for name, count in report.counts().items():
        event(f"{name} fired", min(count, 2))
    if not report.fired:
        event("nothing fired")


@examples(8, 150)
@given(programs(), configs(), st.booleans(), st.sampled_from([HIGHEST, MEDIUM]))
def test_fused_graphs(program, config, dynamic, precision):
    """Joint graphs, interpreted."""
    module, shapes, frozen, dtype = program
    gm, wanted = joint_graph(module, shapes, dtype, dynamic=dynamic, frozen=frozen)
    with matmul_precision(precision):
        report = fuse(gm.graph, config)
    note(report)
    assert not [m for m in report.missed if m.reason.startswith(BROKEN_OFF)], report
    order = [n for n, _ in module.named_parameters()] + list(shapes)

    def fused(leaves, grad):
        with torch.no_grad():
            primals = [leaves[n] for n in order]
            return fx.Interpreter(gm).run(*primals, grad, enable_io_processing=False)

    rounded = precision == MEDIUM and dtype == torch.float32
    for sizes in (SIZES, OTHER_SIZES) if dynamic else (SIZES,):
        check(module, fused, shapes, wanted, dtype, sizes, rounded=rounded)


TYPICAL = Part("Llama's", "pre", (True,) * 4, activation="NewGELU")


@examples(0, 12)
@given(programs(st.sampled_from([torch.float32, torch.bfloat16])), configs(), st.booleans())
@example(
    (Layer((TYPICAL,)), {"x": ("t", WIDTH)}, ("norms.0.0.weight",), torch.float32),
    Config(verify=True),
    True,
)
def test_compiled(program, config, dynamic):
    """Layers through torch.compile."""
    torch._dynamo.reset()
    module, shapes, frozen, dtype = program
    names = list(shapes) + [n for n, _ in module.named_parameters()]
    wanted = [n for n in names if n not in frozen]
    compiled = copy.deepcopy(module)
    for name, parameter in compiled.named_parameters():
        parameter.requires_grad_(name in wanted)
    fusedbwd.compile(compiled, dynamic=dynamic, config=config)

    def fused(leaves, grad):
        with torch.no_grad():
            for name, parameter in compiled.named_parameters():
                parameter.copy_(leaves[name])
        args = {n: leaves[n].clone().requires_grad_(n in wanted) for n in shapes}
        values = {**args, **dict(compiled.named_parameters())}
        out = compiled(*args.values())
        return torch.autograd.grad(
            out, [values[n] for n in wanted], grad, allow_unused=True, materialize_grads=True
        )

    for sizes in (SIZES, OTHER_SIZES):
        check(module, fused, shapes, wanted, dtype, sizes)
    note(fusedbwd.report(compiled))
