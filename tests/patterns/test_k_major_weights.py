"""Copies of weights for TF32's layout: which matmuls get one, when, and what the compiler keeps."""

import copy
import math
import re

import harness
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from harness import WIDTH, arguments_of, joint_graph
from test_bf16_matmuls import ffn, linear, qkv
from torch import nn

from fusedbwd import Config, export_backward, report
from fusedbwd.fuse import fuse
from fusedbwd.graph import gradient_nodes
from fusedbwd.kernels import _routes
from fusedbwd.kernels._routes import EDGES, k_major_shape
from fusedbwd.numerics import relative_l2
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision
from fusedbwd.problems import get_problem
from fusedbwd.training import compile_with
from fusedbwd.verify import table, verify

PATTERN = "k_major_weights"
OTHERS = {"gelu_backward": 1, "layer_norm_backward": 1}

aten = torch.ops.aten
over_shapes = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.fixture
def measure(monkeypatch):
    """Says that copies of any weight pay beyond some tokens on one capability, a CPU's being None;
    None: that nothing was measured."""

    def use(beyond, capability=None):
        slow = [e for e in EDGES if e <= (beyond or 0)]
        fast = [e + 1 for e in EDGES if e >= (beyond or 0)]
        row = k_major_shape(WIDTH, WIDTH)._asdict() | {
            "tokens": slow + fast,
            "cublas_ms": [2] * len(slow + fast),
        }
        row["routes"] = [{"ms": [3] * len(slow) + [1] * len(fast)}]
        rows = () if beyond is None else (row,)
        monkeypatch.setattr(_routes, "REACH", math.inf)
        monkeypatch.setattr(_routes, "measurements", lambda c: rows if c == capability else ())

    return use


@pytest.fixture(autouse=True)
def measured(monkeypatch, measure):
    """A CPU for which copies pay beyond the first edge, and token counts beyond that."""
    measure(EDGES[0])
    monkeypatch.setitem(harness.SIZES, "b", 40)
    monkeypatch.setitem(harness.OTHER_SIZES, "b", 30)


def twice(x, m):
    return F.linear(F.linear(x, m).tanh(), m)


def part(x, m):
    """One of two projections that lie side by side."""
    return F.linear(x, m[:, :WIDTH])


MODULES = {
    "linear": (linear, {}, 1),
    "one weight twice": (twice, {}, 2),
    "three of one input": (qkv, {}, 3),
    "a part of a weight": (part, {"m": (WIDTH, 2 * WIDTH)}, 1),
    "not square": (lambda x, m: F.linear(x, m), {"m": (11, WIDTH)}, 1),
    "ffn": (ffn, {}, OTHERS | {PATTERN: 2}),
}


@over_shapes
@pytest.mark.parametrize("name", MODULES)
def test_spellings(check, name, dynamic):
    fn, shapes, fires = MODULES[name]
    arguments = arguments_of(fn, **shapes)
    config = Config(verify=True)
    check(fn, arguments, dynamic=dynamic, config=config, precision=HIGH, fires=fires)


def test_frozen(check):
    arguments = arguments_of(twice)
    check(twice, arguments, frozen=("m",), precision=HIGH, fires=2)
    check(linear, arguments_of(linear), frozen=("x",), precision=HIGH, fires=0)


class ByGradient(torch.autograd.Function):
    """Multiplies its gradient by a matrix that is computed from it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        flat = grad.flatten(0, 1)
        return (flat @ (flat.t() @ x.flatten(0, 1))).view_as(x)


LOOKALIKES = {
    "a K-major weight": (lambda x, m: x @ m, {}, torch.float32, HIGH),
    "a column": (
        lambda x, m: F.linear(x, m),
        {"x": ("b", "s", 1), "m": (11, 1)},
        torch.float32,
        HIGH,
    ),
    "a weight of neither layout": (
        lambda x, m: F.linear(x, m[:, ::2]),
        {"x": ("b", "s", 17), "m": (11, 34)},
        torch.float32,
        HIGH,
    ),
    "a gradient that is not K-major": (
        lambda x, m: F.linear(x.t(), m).t(),
        {"x": (WIDTH, "b")},
        torch.float32,
        HIGH,
    ),
    "a matrix computed from the gradient": (
        lambda x: ByGradient.apply(x),
        {},
        torch.float32,
        HIGH,
    ),
    "bfloat16": (linear, {}, torch.bfloat16, HIGH),
    "float64": (linear, {}, torch.float64, HIGH),
    "highest": (linear, {}, torch.float32, HIGHEST),
}


@over_shapes
@pytest.mark.parametrize("name", LOOKALIKES)
def test_not_fused(check, name, dynamic):
    fn, shapes, dtype, precision = LOOKALIKES[name]
    arguments = arguments_of(fn, **shapes)
    found = check(fn, arguments, dtype, dynamic=dynamic, precision=precision, fires=0)
    assert PATTERN not in found.near_misses()


def test_what_is_multiplied_with_has_a_static_size(check):
    """Tokens multiplied with tokens are, like weights, where their number is known."""

    def fn(x):
        tokens = x.flatten(0, 1)
        return (tokens @ tokens.t() @ tokens).view_as(x)

    check(fn, arguments_of(fn), precision=HIGH, fires=1)
    found = check(fn, arguments_of(fn), dynamic=True, precision=HIGH, fires=0)
    assert PATTERN not in found.near_misses()


def fused(fn, shapes=None, precision=HIGH, config=Config(), **kwargs):  # noqa: B008
    gm, _ = joint_graph(fn, arguments_of(fn, **(shapes or {})), **kwargs)
    with matmul_precision(precision):
        return gm, fuse(gm.graph, config)


def nodes(gm, op):
    return gm.graph.find_nodes(op="call_function", target=op.default)


def reason(fn, shapes=None, **kwargs):
    """Why the only candidate is not fused."""
    _, found = fused(fn, shapes, **kwargs)
    assert PATTERN not in found.counts()
    (miss,) = found.near_misses()[PATTERN]
    return miss.reason


def test_what_was_not_measured_stays(measure):
    measure(None)
    assert "was not measured on this cpu" in reason(linear)


def test_what_is_unlike_the_measured_stays(monkeypatch):
    monkeypatch.setattr(_routes, "REACH", 4.0)
    wide = {"x": ("b", "s", 5 * WIDTH), "m1": (WIDTH, 5 * WIDTH), "b1": (WIDTH,)}
    assert "was not measured on this cpu" in reason(linear, wide)


def test_what_never_pays_stays(monkeypatch):
    row = _routes.measurements(None)[0]
    slow = row | {"routes": [{"ms": [3] * len(row["tokens"])}]}
    monkeypatch.setattr(_routes, "measurements", lambda c: (slow,))
    assert "was measured to cost more than it saves" in reason(linear)


@over_shapes
def test_few_tokens(measure, dynamic):
    """With open sizes, those assumed while tracing decide."""
    measure(EDGES[-1])
    assert "was not measured to pay for the" in reason(linear, dynamic=dynamic)


@pytest.mark.parametrize(
    ("precision", "config", "fires"),
    [
        (MEDIUM, Config(), {"bf16_matmuls": 2}),
        (MEDIUM, Config(bf16_matmuls=False), {PATTERN: 1}),  # TF32, as torch has it
        (HIGH, Config(fp16_scaled=True), {"fp16_scaled": 2}),
        (HIGH, Config(fp16x3=True), {"fp16x3": 2}),
        (HIGH, Config(k_major_weights=False), {}),
    ],
    ids=["bf16_matmuls", "medium", "fp16_scaled", "fp16x3", "switched off"],
)
def test_other_fusions_come_first(precision, config, fires):
    gm, found = fused(linear, precision=precision, config=config)
    assert found.counts() == fires and PATTERN not in found.near_misses()
    assert len(nodes(gm, aten.clone)) == fires.get(PATTERN, 0)


def test_what_the_matmuls_read():
    """The forward's and the weight gradient's operands are as they were."""
    gm, _ = fused(linear)
    gradients = gradient_nodes(gm.graph)
    (copied,) = nodes(gm, aten.clone)
    assert copied not in gradients and copied.meta["val"].is_contiguous()
    (view,) = copied.users
    (matmul,) = view.users
    assert matmul in gradients and matmul.args[1] is view
    assert view.meta["val"].shape == (WIDTH, WIDTH) and view.meta["val"].stride() == (1, WIDTH)


def test_a_weight_is_copied_once():
    gm, _ = fused(twice)
    (copied,) = nodes(gm, aten.clone)
    assert len(copied.users) == 2
    assert copied.meta["partitioner_tag"] == "must_be_in_backward"
    gm, _ = fused(qkv)
    assert len(nodes(gm, aten.clone)) == 3


def test_a_copy_of_the_forward_stays():
    """It is the user's own, and saved as before."""
    gm, found = fused(lambda x, m: F.linear(x, m.t().contiguous()))
    assert found.counts() == {PATTERN: 1}
    tags = [n.meta["partitioner_tag"] for n in nodes(gm, aten.clone)]
    assert tags == ["is_forward", "must_be_in_backward"]


class OwnCopies(torch.autograd.Function):
    """Its backward multiplies with two copies of its own, of a matrix and of its transpose."""

    @staticmethod
    def forward(ctx, x, m):
        ctx.save_for_backward(m[:, :WIDTH])
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (m,) = ctx.saved_tensors
        flat = grad.flatten(0, 1)
        dx = flat @ m.t().contiguous().t() + (flat @ m.t().t().contiguous().t()).cos()
        return dx.view_as(grad), None


def test_other_copies_of_one_weight_stay_apart(check):
    fn = lambda x, m: OwnCopies.apply(x, m)  # noqa: E731
    shapes = arguments_of(fn, m=(WIDTH, 2 * WIDTH))
    check(fn, shapes, frozen=("m",), precision=HIGH, fires=0)


class ExpandedCopies(torch.autograd.Function):
    """Its backward multiplies with copies of an expanded matrix, whose strides are alike."""

    @staticmethod
    def forward(ctx, x, m):
        ctx.save_for_backward(m)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (m,) = ctx.saved_tensors
        wide = m.expand(WIDTH, 20)
        copies = (w.clone(memory_format=torch.contiguous_format).t() for w in (wide.t(), wide))
        flat = grad.flatten(0, 1)
        for each in copies:
            flat = flat @ each
        return flat.view_as(grad), None


def test_other_copies_of_other_shapes_stay_apart(check):
    fn = lambda x, m: ExpandedCopies.apply(x, m)  # noqa: E731
    check(fn, arguments_of(fn, m=(1, 1)), frozen=("m",), precision=HIGH, fires=0)


# --- compiled


def k_major(source: str) -> list[str]:
    """The sizes of the buffers of its own that the code multiplies with, seen transposed."""
    second = r"mm\([^,]+, reinterpret_tensor\(buf\d+, \((\d+), (\d+)\), \(1, (\d+)\), 0\), out"
    return [f"{k} {n}" for k, n, stride in re.findall(second, source) if stride == k]


def small():
    problem = get_problem("ffn_gelu_backward")
    module = problem.build(seed=1, **problem.small)
    return problem, module, problem.schema(module)


def test_an_export_on_either_side_of_the_edge():
    """Inductor leaves the copy, and the layout in which the matmul reads it."""
    problem, module, schema = small()
    with matmul_precision(HIGH):
        bwd = export_backward(module, saved=schema, config=Config(verify=True))
        assert bwd.report.counts() == OTHERS | {PATTERN: 2}
        checks = list(verify(problem, module, bwd, [(2, 17), (3, 101)], rounds=3))
    assert all(c.ok for c in checks), table(checks)
    rest = "float32 matmuls at 'high'"
    edge = f"batch_size=any, seq_len=any, batch_size*seq_len {{}} {EDGES[0]}, {rest}"
    assert bwd.variants == [edge.format(">"), edge.format("<=")]
    many, few = bwd.kernels()
    assert sorted(k_major(many)) == ["48 80", "80 48"] and not k_major(few)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return twice(x, self.weight)


@pytest.mark.usefixtures("fresh_dynamo")
def test_training_saves_no_copy():
    graphs = []

    def interpreted(gm, inputs, **options):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    module, x = Tied(), torch.randn(200, WIDTH)
    ours = copy.deepcopy(module)
    compile_with(ours, Config(verify=True), interpreted)
    with matmul_precision(HIGH):
        ours(x.requires_grad_()).sum().backward()
    module(x).sum().backward()
    assert report(ours).counts() == {PATTERN: 2}
    forward, backward = graphs
    assert not nodes(forward, aten.clone) and len(nodes(backward, aten.clone)) == 1
    assert relative_l2(ours.weight.grad, module.weight.grad) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["Python", "C++"])
def test_on_a_gpu(measure, cpp_wrapper):
    capability = torch.cuda.get_device_capability()
    measure(EDGES[-2], capability)
    problem = get_problem("ffn_gelu_backward")
    module = problem.build(seed=1, device="cuda")
    with matmul_precision(HIGH):
        config = Config(verify=True, cpp_wrapper=cpp_wrapper)
        bwd = export_backward(module, saved=problem.schema(module), config=config)
        checks = list(verify(problem, module, bwd, [(2, 211), (16, 919)], rounds=1))
        assert all(c.ok for c in checks), table(checks)
        few, many = bwd.kernels()
        if not cpp_wrapper:
            assert sorted(k_major(many)) == ["2048 512", "512 2048"] and not k_major(few)
