"""The backward's float32 matmuls under "medium": bfloat16 operands, rounded where they are made."""

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import WIDTH, arguments_of, joint_graph

from fusedbwd import Config
from fusedbwd.fuse import fuse
from fusedbwd.graph import gradient_nodes
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, in_force, matmul_precision

PATTERN = "bf16_matmuls"

# Without what adds up the matmuls that this makes, and without what takes one in.
ALONE = Config(verify=True, sum_matmul=False, matmul_gelu_backward=False)

aten = torch.ops.aten
ours = torch.ops.fusedbwd


def linear(x, m1, b1):
    return F.linear(x, m1, b1)


def ffn(x, m1, b1, m2, b2, w, b3):
    y = F.linear(F.gelu(F.linear(x, m1, b1)), m2, b2)
    return F.layer_norm(x + y, (WIDTH,), w, b3)


def pre_norm(x, m1, w, b):
    return x + F.linear(F.layer_norm(F.linear(x, m1), (WIDTH,), w, b), m1)


def qkv(x, m1, m2, m3):
    return F.linear(x, m1) * F.linear(x, m2).sin() + F.linear(x, m3)


MODULES = {
    "linear": (linear, 2),
    "matmul": (lambda x, m: x @ m, 2),
    "transposed weight": (lambda x, m: x @ m.t(), 2),
    "one weight twice": (lambda x, m: F.linear(F.linear(x, m).tanh(), m), 4),
    "a square": (lambda m: m @ m, 2),
    "three of one input": (qkv, 6),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODULES)
def test_spellings(check, name, dynamic):
    fn, matmuls = MODULES[name]
    check(fn, arguments_of(fn), dynamic=dynamic, config=ALONE, precision=MEDIUM, fires=matmuls)


def test_conv1d(check):
    """GPT-2's linear, an addmm in the forward."""

    def fn(x, m, b):
        return torch.addmm(b, x.flatten(0, 1), m).view_as(x)

    check(fn, arguments_of(fn), dynamic=True, config=ALONE, precision=MEDIUM, fires=2)


def test_frozen(check):
    fn = MODULES["one weight twice"][0]
    check(fn, arguments_of(fn), frozen=("m",), config=ALONE, precision=MEDIUM, fires=2)
    check(linear, arguments_of(linear), frozen=("x",), config=ALONE, precision=MEDIUM, fires=1)


class Decayed(torch.autograd.Function):
    """Autograd writes no addmm into a backward; a function of one's own may."""

    @staticmethod
    def forward(ctx, x, m, w):
        ctx.save_for_backward(x, m, w)
        return x @ m

    @staticmethod
    def backward(ctx, grad):
        x, m, w = ctx.saved_tensors
        return torch.addmm(w, grad, m.t()), torch.addmm(m, x.t(), grad), grad.sum(0)


DECAYED = {"x": ("t", WIDTH), "m": (WIDTH, WIDTH), "w": (WIDTH,)}


def test_addmm(check):
    """What is added stays float32."""
    check(lambda x, m, w: Decayed.apply(x, m, w), DECAYED, config=ALONE, precision=MEDIUM, fires=2)


class Shifted(torch.autograd.Function):
    """Its backward adds its gradient to a product of the forward's tensors."""

    @staticmethod
    def forward(ctx, x, m, w):
        ctx.save_for_backward(m, w)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        m, w = ctx.saved_tensors
        return torch.addmm(grad, m, w.expand(WIDTH, WIDTH)), None, None


def test_addmm_to_a_gradient():
    """A product of the forward, whatever it is added to, stays float32."""
    with matmul_precision(MEDIUM):
        gm, _ = joint_graph(
            lambda x, m, w: Shifted.apply(x, m, w),
            {"x": (WIDTH, WIDTH), "m": (WIDTH, WIDTH), "w": (WIDTH,)},
            frozen=("m", "w"),
        )
        report = fuse(gm.graph, Config())
    assert not report.fired and len(nodes(gm, aten.addmm)) == 1


LOOKALIKES = {
    "highest": (linear, torch.float32, HIGHEST),
    "high": (linear, torch.float32, HIGH),
    "bfloat16": (linear, torch.bfloat16, MEDIUM),
    "float64": (linear, torch.float64, MEDIUM),
    "batched": (lambda x: x @ x.transpose(1, 2), torch.float32, MEDIUM),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_not_fused(check, name):
    fn, dtype, precision = LOOKALIKES[name]
    check(fn, arguments_of(fn), dtype, precision=precision, fires=0)


def test_not_a_scaled_addmm():
    gm, _ = joint_graph(lambda x, m, w: Decayed.apply(x, m, w), DECAYED)
    scaled, plain = nodes(gm, aten.addmm)
    scaled.kwargs = {"alpha": 2.0}  # which some decomposition tables leave
    assert nodes(gm, aten.addmm, precision=MEDIUM) == [scaled]
    assert plain._erased


def test_switched_off():
    gm, _ = joint_graph(linear, arguments_of(linear))
    with matmul_precision(MEDIUM):
        report = fuse(gm.graph, Config(bf16_matmuls=False))
    assert report.counts() == {}
    assert report.switched_off == ["bf16_matmuls"]
    assert "'medium', 0 in bfloat16" in report.summary()


def nodes(gm, op, *, precision=None):
    """The calls of ``op`` in the graph, fused if a precision is given."""
    if precision is not None:
        with matmul_precision(precision):
            fuse(gm.graph, ALONE)
    return gm.graph.find_nodes(op="call_function", target=op.default)


def fused(fn, **kwargs):
    gm, _ = joint_graph(fn, arguments_of(fn), **kwargs)
    nodes(gm, aten.mm, precision=MEDIUM)
    return gm


def is_rounded(gm) -> bool:
    """Whether every matmul of the backward is on bfloat16 operands and gives float32."""
    for node in nodes(gm, ours.sum_matmul):
        operands = [*node.args[0], *node.args[1], node]
        dtypes = [o.meta["val"].dtype for o in operands]
        if dtypes != [torch.bfloat16, torch.bfloat16, torch.float32]:
            return False
    return not gradient_nodes(gm.graph).intersection(nodes(gm, aten.mm))


def test_forward_is_not_touched():
    gm = fused(ffn, dynamic=True)
    assert is_rounded(gm)
    for node in nodes(gm, aten.addmm):
        assert [a.meta["val"].dtype for a in node.args] == [torch.float32] * 3
    assert len(nodes(gm, aten.addmm)) == 2


def test_operands_are_rounded_by_what_makes_them():
    """An FFN: LayerNorm's kernel gives both forms, GELU's the rounded alone, and each linear's
    weight and input are rounded in one launch."""
    gm = fused(ffn, dynamic=True)
    assert len(nodes(gm, ours.sum_matmul)) == 4
    (norm,) = nodes(gm, ours.layer_norm_backward_rounded)
    assert norm.args[-3:] == (torch.float32, True, torch.bfloat16)
    (gelu,) = nodes(gm, ours.gelu_backward)
    assert gelu.args[-1] == torch.bfloat16
    assert [len(r.args[0]) for r in nodes(gm, ours.round_to)] == [2, 2]
    assert not nodes(gm, torch.ops.prims.convert_element_type)


def test_a_rounded_gelu_goes_into_the_matmul_before_it():
    gm, _ = joint_graph(ffn, arguments_of(ffn), dynamic=True)
    with matmul_precision(MEDIUM):
        report = fuse(gm.graph, Config(verify=True, sum_matmul=False))
    assert report.counts() == {
        "gelu_backward": 1,
        "layer_norm_backward": 1,
        "bf16_matmuls": 4,
        "matmul_gelu_backward": 1,
    }
    assert len(nodes(gm, ours.sum_matmul)) == 3
    (both,) = nodes(gm, ours.matmul_gelu_backward)
    assert [a.meta["val"].dtype for a in both.args[:3]] == [
        *(torch.bfloat16, torch.bfloat16),
        torch.float32,
    ]
    assert not nodes(gm, ours.gelu_backward)


def test_a_gradient_that_only_matmuls_read_is_not_kept():
    gm = fused(pre_norm)
    (norm,) = nodes(gm, ours.layer_norm_backward)
    assert norm.args[-2:] == (torch.bfloat16, False)
    assert is_rounded(gm)


def test_rms_norm_gives_both():
    def fn(x, m, w):
        y = x + F.linear(x, m)
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5) * w

    gm = fused(fn)
    assert len(nodes(gm, ours.rms_norm_backward_rounded)) == 1
    assert is_rounded(gm)


@pytest.mark.parametrize("fn", [ffn, pre_norm])
def test_numbers_where_other_fusions_fire(fn):
    report = harness.check(fn, arguments_of(fn), dynamic=True, precision=MEDIUM)
    assert report.counts()[PATTERN] == 4


def test_sums_of_them_are_taken_by_the_next_fusion():
    """The residual's gradient is added inside, in float32."""
    gm, _ = joint_graph(ffn, arguments_of(ffn), dynamic=True)
    with matmul_precision(MEDIUM):
        report = fuse(gm.graph, Config(verify=True))
    assert report.counts()["sum_matmul"] == 1
    (added,) = [n for n in nodes(gm, ours.sum_matmul) if n.args[2] is not None]
    assert added.args[2].meta["val"].dtype == torch.float32
    assert len(nodes(gm, ours.layer_norm_backward_rounded)) == 1


def test_shared_tensors_are_rounded_once():
    gm = fused(qkv)
    rounded = [t for r in nodes(gm, ours.round_to) for t in r.args[0]]
    assert len(rounded) == len(set(rounded)) == 4  # x and three weights
    assert is_rounded(gm)


def test_groups_are_of_four_at_most():
    def fn(x, m1, m2, m3, m4, m5):  # one gradient, five weights
        return sum(F.linear(x, m) for m in (m1, m2, m3, m4, m5))

    gm = fused(fn)
    assert sorted(len(r.args[0]) for r in nodes(gm, ours.round_to)) == [2, 4]
    assert is_rounded(gm)


def set_fp32(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def test_precision_in_force():
    """The newer, per-backend setting never lets in less than it says."""
    assert in_force() == HIGHEST
    for precision in (HIGH, MEDIUM, HIGHEST):
        with matmul_precision(precision):
            assert in_force() == precision
    try:
        torch.set_float32_matmul_precision(MEDIUM)
        set_fp32("ieee")
        assert in_force() == HIGHEST
        torch.set_float32_matmul_precision(HIGHEST)
        set_fp32("tf32")  # now torch.get_float32_matmul_precision() raises
        assert in_force() == HIGH
    finally:
        torch.set_float32_matmul_precision(HIGHEST)
