"""The opt-ins fp16_scaled and fp16x3: which matmuls they take, and at which precision."""

import pytest
import torch
from harness import arguments_of, joint_graph
from test_bf16_matmuls import DECAYED, MODULES, Decayed, ffn, linear

from fusedbwd import Config
from fusedbwd.fuse import fuse
from fusedbwd.graph import gradient_nodes
from fusedbwd.precision import HIGH, HIGHEST, MEDIUM, matmul_precision

SCALED = Config(verify=True, fp16_scaled=True, bf16_matmuls=False)
THREE = Config(verify=True, fp16x3=True, bf16_matmuls=False)
BOTH = Config(fp16_scaled=True, fp16x3=True)

aten = torch.ops.aten
ours = torch.ops.fusedbwd

ALLOWED = [
    ("fp16_scaled", SCALED, HIGH),
    ("fp16_scaled", SCALED, MEDIUM),
    ("fp16x3", THREE, HIGHEST),
    ("fp16x3", THREE, MEDIUM),
]
over_allowed = pytest.mark.parametrize(("name", "config", "precision"), ALLOWED)


@over_allowed
@pytest.mark.parametrize("module", ["matmul", "one weight twice"])
def test_spellings(check, module, name, config, precision):
    fn, matmuls = MODULES[module]
    arguments = arguments_of(fn)
    check(fn, arguments, dynamic=True, config=config, precision=precision, fires={name: matmuls})


@over_allowed
def test_ffn(check, name, config, precision):
    fires = {"gelu_backward": 1, "layer_norm_backward": 1, name: 4, "sum_matmul": 1}
    check(ffn, arguments_of(ffn), dynamic=True, config=config, precision=precision, fires=fires)


@over_allowed
def test_addmm(check, name, config, precision):
    """What is added stays float32."""
    decayed = lambda x, m, w: Decayed.apply(x, m, w)  # noqa: E731
    check(decayed, DECAYED, config=config, precision=precision, fires={name: 2})


def report_of(fn, config, precision, dtype=torch.float32, **kwargs):
    gm, _ = joint_graph(fn, arguments_of(fn), dtype, **kwargs)
    with matmul_precision(precision):
        return gm, fuse(gm.graph, config)


def test_highest_does_not_allow_one_part():
    gm, report = report_of(linear, SCALED, HIGHEST)
    assert not report.fired
    reasons = {miss.reason for miss in report.missed}
    assert reasons == {"'highest', the precision in force, does not allow it"}
    assert not nodes(gm, ours.fp16_matmul)


def test_newer_setting_counts():
    """``fp32_precision`` set back to "ieee" forbids what "high" had allowed."""
    with matmul_precision(HIGH):
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        gm, _ = joint_graph(linear, arguments_of(linear))
        assert not fuse(gm.graph, SCALED).fired


@pytest.mark.parametrize(
    ("precision", "name"),
    [(HIGHEST, "fp16x3"), (HIGH, "fp16_scaled"), (MEDIUM, "fp16_scaled")],
)
def test_the_faster_one_that_is_allowed_is_taken(precision, name):
    gm, report = report_of(linear, BOTH, precision)
    assert report.counts() == {name: 2}
    assert f"at {precision!r}, 0 in bfloat16, 2 by {name}" in report.summary()
    assert {len(n.args[2]) for n in nodes(gm, ours.fp16_matmul)} == {4 + (name == "fp16x3")}


LOOKALIKES = {
    "bfloat16": (linear, torch.bfloat16),
    "float64": (linear, torch.float64),
    "batched": (lambda x: x @ x.transpose(1, 2), torch.float32),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_not_fused(name):
    fn, dtype = LOOKALIKES[name]
    gm, report = report_of(fn, BOTH, HIGH, dtype)
    assert not report.fired
    assert not nodes(gm, ours.fp16_matmul)


def test_off_by_default():
    gm, report = report_of(linear, Config(), HIGH)
    assert report.counts() == {}
    assert report.switched_off == []
    assert len(nodes(gm, aten.mm)) == 2


def test_not_a_scaled_addmm():
    gm, _ = joint_graph(lambda x, m, w: Decayed.apply(x, m, w), DECAYED)
    scaled, _ = nodes(gm, aten.addmm)
    scaled.kwargs = {"alpha": 2.0}
    assert fuse(gm.graph, THREE).counts() == {"fp16x3": 1}
    assert nodes(gm, aten.addmm) == [scaled]


def nodes(gm, op):
    return gm.graph.find_nodes(op="call_function", target=op.default)


@pytest.mark.parametrize(("config", "parts"), [(SCALED, 1), (THREE, 2), (BOTH, 1)])
def test_each_operand_is_split_once(config, parts):
    """The two gradients each by themselves, a linear's weight and input together."""
    gm, report = report_of(ffn, config, HIGH, dynamic=True)
    assert report.counts()["fp16_scaled" if parts == 1 else "fp16x3"] == 4
    splits = nodes(gm, ours.fp16_parts)
    assert sorted(len(s.args[0]) for s in splits) == [1, 1, 2, 2]
    assert {s.args[1] for s in splits} == {parts}
    split = [t for s in splits for t in s.args[0]]
    assert len({*split}) == len(split) == 6
    gradients = gradient_nodes(gm.graph)
    for s in splits:
        from_forward = not gradients.intersection(s.args[0])
        assert from_forward == (s.meta.get("partitioner_tag") == "must_be_in_backward")
    for matmul in nodes(gm, ours.fp16_matmul):
        for operand, of_it in zip(matmul.args[:2], matmul.args[2:4], strict=True):
            assert len(of_it) == parts + 3
            for part in of_it[:parts]:
                assert part.meta["val"].dtype == torch.float16
                assert part.meta["val"].shape == operand.meta["val"].shape
    assert not nodes(gm, torch.ops.prims.convert_element_type)


def test_frozen(check):
    check(
        linear, arguments_of(linear), frozen=("x",), config=SCALED, precision=HIGH,
        fires={"fp16_scaled": 1},
    )  # fmt: skip


def test_a_residual_is_added_inside():
    """Here the other matmul's result; of three, or of one and itself, none is."""
    gm, report = report_of(lambda x, m1, m2: x @ m1 + (x @ m2).sin(), SCALED, HIGH)
    assert report.counts() == {"fp16_scaled": 4, "sum_matmul": 1}
    (with_residual,) = [n for n in nodes(gm, ours.fp16_matmul) if n.args[4] is not None]
    assert with_residual.args[4].meta["val"].dtype == torch.float32
    three = lambda x, m1, m2, m3: x @ m1 + (x @ m2).sin() + (x @ m3).cos()  # noqa: E731
    assert report_of(three, SCALED, HIGH)[1].counts() == {"fp16_scaled": 6}
