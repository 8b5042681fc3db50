"""The gate: which measurements decide, what they say, and where nothing is asked."""

import json

import pytest
import torch
import torch.nn.functional as F
from harness import arguments_of, check, joint_graph

from fusedbwd import Config, FusionError, gate
from fusedbwd.fuse import fuse
from fusedbwd.fusion_cases import SUBJECTS
from fusedbwd.gate import Row, Table, deciding, speedup, verdict

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def rows(fusion="swiglu_backward", width=4096, dtype="bfloat16", **gains):
    """A row for each token count: ``t128=1.5`` is 1.5 times Inductor's speed at 128 tokens."""
    return [Row(fusion, width, dtype, int(t[1:]), 1.0, gain) for t, gain in gains.items()]


@pytest.fixture
def measured(monkeypatch):
    """Makes every device go by a table of these rows."""

    def use(*groups):
        table = Table("NVIDIA H200", tuple(row for group in groups for row in group))
        monkeypatch.setattr(gate, "table_for", lambda device: table)

    return use


# --- the rule


@pytest.mark.parametrize(
    ("gain", "pays"), [(2.0, True), (1.0, True), (0.971, True), (0.969, False), (0.5, False)]
)
def test_threshold(measured, gain, pays):
    measured(rows(t128=gain, t1024=gain))
    assert verdict("swiglu_backward", 4096, torch.bfloat16, CUDA).pays is pays


def test_large_token_counts_weigh_most():
    """(0.5 · 1² · 2⁴)^(1/7), whatever the order of the rows."""
    found = rows(t8192=2.0, t128=0.5, t1024=1.0)
    assert speedup(found) == pytest.approx((0.5 * 2.0**4) ** (1 / 7))
    assert speedup(rows(t128=0.5, t8192=1.5)) > 1 > speedup(rows(t128=1.5, t8192=0.5))


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (4096, torch.bfloat16, (4096, "bfloat16")),
        (5000, torch.bfloat16, (4096, "bfloat16")),
        (2900, torch.bfloat16, (4096, "bfloat16")),  # nearer to 2048 but for the logarithm
        (2890, torch.bfloat16, (2048, "bfloat16")),
        (1, torch.bfloat16, (2048, "bfloat16")),
        (10**6, torch.bfloat16, (4096, "bfloat16")),
        (2048, torch.float16, (2048, "float16")),
        (4096, torch.float16, (4096, "bfloat16")),
        (4096, torch.float32, (512, "float32")),
        (4096, torch.float64, None),
    ],
)
def test_nearest_width_of_a_dtype_of_that_size(width, dtype, expected):
    table = [
        *rows(width=2048, t128=1.0, t1024=1.0),
        *rows(width=2048, dtype="float16", t128=1.0),
        *rows(width=4096, t128=1.0),
        *rows(width=512, dtype="float32", t128=1.0),
        *rows("gelu_backward", width=3000, t128=1.0),
    ]
    found = deciding(table, "swiglu_backward", width, dtype)
    assert {(r.width, r.dtype) for r in found} == ({expected} if expected else set())


@pytest.mark.parametrize("order", [1, -1])
def test_equally_near(order):
    """The dtype itself before another of its size, then the narrower width."""
    table = [
        *rows(width=16, t128=1.0),
        *rows(width=64, t128=1.0),
        *rows(width=64, dtype="float16", t128=1.0),
    ][::order]
    (found,) = deciding(table, "swiglu_backward", 32, torch.float16)
    assert (found.width, found.dtype) == (64, "float16")
    (found,) = deciding(table, "swiglu_backward", 32, torch.bfloat16)
    assert (found.width, found.dtype) == (16, "bfloat16")


def test_what_was_not_measured_fires(measured):
    measured(rows(t128=0.5))
    assert not verdict("swiglu_backward", 4096, torch.bfloat16, CUDA).pays
    for fusion, dtype in (("gelu_backward", torch.bfloat16), ("swiglu_backward", torch.float32)):
        found = verdict(fusion, 4096, dtype, CUDA)
        assert found.pays and "not measured" in found.reason


def test_reasons(measured):
    measured(rows(width=160, t128=0.8), rows("gelu_backward", t128=1.25))
    assert verdict("swiglu_backward", 160, torch.bfloat16, CUDA).reason == (
        "Inductor's own code is 1.25x faster at width 160 in bfloat16 (measured on an NVIDIA H200)"
    )
    assert verdict("swiglu_backward", 128, torch.float16, CUDA).reason == (
        "Inductor's own code is 1.25x faster at width 160 in bfloat16, the nearest to 128 in "
        "float16 (measured on an NVIDIA H200)"
    )
    assert "1.25x the speed" in verdict("gelu_backward", 4096, torch.bfloat16, CUDA).reason


# --- which table


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "DATA", tmp_path)
    gate.tables.cache_clear()
    for gpu in ("NVIDIA H200", "NVIDIA B200"):
        content = {"gpu": gpu, "fusions": [vars(r) for r in rows(width=len(gpu), t128=0.5)]}
        (tmp_path / f"fusions_{gpu}.json").write_text(json.dumps(content))
    yield
    gate.tables.cache_clear()


@pytest.mark.parametrize(
    ("name", "decides"),
    [("NVIDIA B200", "NVIDIA B200"), ("NVIDIA H200", "NVIDIA H200"), ("other", "NVIDIA H200")],
)
def test_a_gpus_own_table_or_the_h200s(data, monkeypatch, name, decides):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert decides in verdict("swiglu_backward", 8, torch.bfloat16, CUDA).reason
    assert verdict("swiglu_backward", 8, torch.bfloat16, CPU).pays


def test_without_any_table_everything_fires(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "DATA", tmp_path)
    gate.tables.cache_clear()
    try:
        assert verdict("swiglu_backward", 8, torch.bfloat16, CUDA).pays
    finally:
        gate.tables.cache_clear()


def test_the_shipped_tables_are_sound():
    found = gate.tables()
    assert gate.MEASURED_GPU in found
    for table in found.values():
        keys = [(r.fusion, r.width, r.dtype, r.tokens) for r in table.rows]
        assert len(set(keys)) == len(keys)
        for r in table.rows:
            assert min(r.ours_ms, r.inductor_ms, r.width, r.tokens) > 0, r
            assert getattr(torch, r.dtype).is_floating_point and hasattr(Config(), r.fusion), r


# --- in a compilation


def swiglu(g, u, m):
    return (F.silu(g) * u) @ m


def test_a_fusion_that_loses_is_a_near_miss(measured):
    """The graph computes the same without it, and the report says why."""
    measured(rows(width=33, dtype="float32", t128=0.5))
    report = check(swiglu, arguments_of(swiglu), dynamic=True)
    assert not report.fired
    (miss,) = report.missed
    assert (miss.fusion, miss.anchor) == ("swiglu_backward", "silu_backward")
    assert "2.00x faster at width 33 in float32" in miss.reason
    assert check(swiglu, arguments_of(swiglu), config=Config(gate=False)).counts()


def test_strict_says_why(measured):
    measured(rows(width=33, dtype="float32", t128=0.5))
    gm, _ = joint_graph(swiglu, arguments_of(swiglu))
    with pytest.raises(FusionError, match=r"2\.00x faster"):
        fuse(gm.graph, Config(strict=True))


def test_a_fusion_that_wins_fires(measured):
    measured(rows(width=33, dtype="float32", t128=1.5), rows(width=33, t128=0.5))
    assert check(swiglu, arguments_of(swiglu)).counts() == {"swiglu_backward": 1}


def test_on_a_cpu_everything_fires(monkeypatch):
    losing = Table("NVIDIA H200", tuple(rows(width=33, dtype="float32", t128=0.5)))
    monkeypatch.setattr(gate, "tables", lambda: {losing.gpu: losing})
    assert not verdict("swiglu_backward", 33, torch.float32, CUDA).pays
    assert check(swiglu, arguments_of(swiglu)).counts() == {"swiglu_backward": 1}


@pytest.fixture
def asked(monkeypatch):
    """What the gate is asked: (fusion, width, dtype)."""
    questions = []

    def recording(fusion, width, dtype, device):
        questions.append((fusion, width, dtype))
        return gate.Verdict(True, "")

    monkeypatch.setattr(gate, "verdict", recording)
    return questions


def test_a_norm_over_several_dimensions_is_as_wide_as_they_are(asked):
    def fn(x, weight, bias):
        return F.layer_norm(x, (4, 6), weight, bias)

    check(fn, {"x": ("b", "s", 4, 6), "weight": (4, 6), "bias": (4, 6)})
    assert asked == [("layer_norm_backward", 24, torch.float32)]


@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_as_wide_as_a_head(asked, packed):
    def plain(q, k, v):
        return F.softmax(q @ k.transpose(-2, -1), -1) @ v

    fn, shapes = plain, dict.fromkeys("qkv", ("b", 2, "s", 8))
    if packed:
        fn, shapes = SUBJECTS["attention_backward"].build(8, 6)
    check(fn, shapes, torch.bfloat16, frozen=("cos", "sin"))
    assert asked == [("attention_backward", 8, torch.bfloat16)]
