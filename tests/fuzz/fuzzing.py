"""What the fuzz tests share: how many examples, operands of every layout, and the judge.

``make fuzz`` draws many examples, anew each time; CI draws few, always the same.
"""

import math
import os
from collections.abc import Callable

import torch
from checks import run
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fusedbwd.kernels._op import LAUNCHERS
from fusedbwd.numerics import rounding_unit

LONG = os.environ.get("FUSEDBWD_FUZZ") == "long"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, FP16 = torch.float32, torch.float16


def examples(short: int, long: int):
    """Hypothesis's settings for so many random examples in CI and in a long run."""
    return settings(
        max_examples=long if LONG else max(1, short),
        derandomize=not LONG,
        deadline=None,
        database=None,
        print_blob=True,
        # To make an example smaller takes hundreds of runs: worth it by hand, not in CI.
        phases=list(Phase) if LONG else [Phase.explicit, Phase.generate][: 1 + bool(short)],
        suppress_health_check=list(HealthCheck),
    )


dtypes = st.sampled_from([FP32, FP16])  # the interpreter's bfloat16 is not a GPU's
rows = st.one_of(st.integers(0, 9), st.integers(10, 70), st.sampled_from([127, 128, 129, 300]))
widths = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 160, 257, 513]))


def _seeded(shape, dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, drawn in float64 and rounded."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return drawn.to(dtype).to(DEVICE)


def _expanded(dims: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(t):
        first = t
        for dim in dims:
            first = first.narrow(dim, 0, min(1, t.shape[dim]))
        return first.expand(t.shape)

    return make


def _inside(t: torch.Tensor) -> torch.Tensor:
    """In the midst of a buffer of NaN."""
    outer = t.new_full([n + 3 for n in t.shape], math.nan)
    view = outer[tuple(slice(1, 1 + n) for n in t.shape)]
    view.copy_(t)
    return view


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "inside a buffer": _inside,
    "every other row": lambda t: torch.stack([t, t + 1], -2).flatten(-3, -2)[..., ::2, :],
    "every other column": lambda t: torch.stack([t, t + 1], -1).flatten(-2)[..., ::2],
    "rows expanded": _expanded((-2,)),
    "all expanded": _expanded((-2, -1)),
    "first dimensions exchanged": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
}


@st.composite
def tensors(draw, shape, dtype, *, scale=(1.0,)):
    """A random tensor of at least two dimensions, in one of the layouts."""
    t = _seeded(shape, dtype, draw(st.integers(0, 2**31)), draw(st.sampled_from(scale)))
    layout = draw(st.sampled_from(list(LAYOUTS)))
    return LAYOUTS[layout](t) if t.numel() else t


@st.composite
def vectors(draw, size, dtype):
    """A random vector: dense, strided or of one value."""
    t = _seeded((size,), dtype, draw(st.integers(0, 2**31)))
    how = draw(st.sampled_from(["dense", "strided", "expanded"]))
    if how == "strided":
        return torch.stack([t, t + 1], 1)[:, 0]
    return t[:1].expand(size) if how == "expanded" and size else t


@st.composite
def statistics(draw, size):
    """One positive float32 number a row: [T, 1] or [T], strided or of one value."""
    t = draw(vectors(size, FP32)).abs() + 0.1
    t = draw(st.sampled_from([t, torch.stack([t, t], 1)[:, 0]]))
    t = t[:1].expand(size) if size and draw(st.booleans()) else t
    return t[:, None] if draw(st.booleans()) else t


def maybe(strategy):
    return st.none() | strategy


GRADIENT_SCALES = (1e-3, 1.0, 4.0)


def judge(op, args, *, launcher=None, rounds_to: torch.dtype = FP32) -> None:
    """The kernel's results are those of the op's reference in float64, up to rounding.

    Rounding is judged by its effect: an error may be as large as a few times the change that
    rounding the operands makes to the exact result, or twice the reference's own error in the
    operands' dtypes, whatever cancels. ``rounds_to``: the coarsest dtype that the op rounds to on
    its way. Operands stay as they are, results are fresh, and what the op declares of its results
    is so.
    """
    leaves = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in leaves]
    found = run(launcher or LAUNCHERS[op], *args)
    actual = pytree.tree_leaves(found)
    assert all(map(torch.equal, leaves, before)), "an operand was written"
    declared = pytree.tree_leaves(op(*_meta(args)))
    for a, d in zip(actual, declared, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (d.shape, d.dtype, d.stride())

    def exact(arguments):
        wide = pytree.tree_map_only(torch.Tensor, torch.Tensor.double, arguments)
        wide = [torch.float64 if isinstance(a, torch.dtype) else a for a in wide]
        return pytree.tree_leaves(op(*wide))

    expected, own = exact(list(args)), pytree.tree_leaves(_reference(op, args))
    moved = [exact(_rounded(list(args), rounds_to, seed)) for seed in range(3)]
    for index, (a, e, o) in enumerate(zip(actual, expected, own, strict=True)):
        assume(not e.numel() or e.abs().max() < torch.finfo(a.dtype).max / 2)
        error, norm = _distance(a, e), torch.linalg.vector_norm(e).item()
        change = max(_distance(m[index], e) for m in moved)
        finfo = torch.finfo(a.dtype)
        subnormal = finfo.tiny * finfo.eps * math.sqrt(e.numel())
        unit = rounding_unit(a.dtype) + 4 * rounding_unit(FP32)
        allowed = 16 * change + 2 * _distance(o, e) + unit * norm + subnormal
        assert error <= allowed, f"result {index}: {error:.2e} of {norm:.2e}, allowed {allowed:.2e}"


def _meta(args):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), list(args))


def _reference(op, args):
    """The op on the CPU, where it is its reference."""
    return op(*pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(args)))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.linalg.vector_norm(a.double().cpu() - b.double().cpu()).item()


def _rounded(args, dtype, seed):
    """``args`` in float64, each element moved by a unit of ``dtype``, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def move(t):
        signs = torch.randint(0, 2, t.shape, generator=generator).double().to(t.device) * 2 - 1
        return t.double() * (1 + rounding_unit(dtype) * signs)

    return pytree.tree_map_only(torch.Tensor, move, args)
