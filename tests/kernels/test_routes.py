"""Which route a matmul takes: the rule on made-up tables, and the tables that are shipped."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusedbwd.errors import FusedBwdError
from fusedbwd.kernels import _routes
from fusedbwd.kernels._matmul import MatmulTile
from fusedbwd.kernels._routes import EDGES, Shape, nearest, ranges, route, tiles

A, B = MatmulTile(16, 32, 16, 2, 4), MatmulTile(32, 32, 16, 2, 4)
SHAPE = Shape("sum_matmul", 512, 256, 2, False, "bfloat16")
H200 = (9, 0)
GPU = torch.device("cuda", 0)


def row(tokens, cublas, a, b, **shape):
    routes = [{"tile": A._asdict(), "ms": a}, {"tile": B._asdict(), "ms": b}]
    shape = SHAPE._replace(**shape)._asdict()
    return shape | {"tokens": tokens, "cublas_ms": cublas, "routes": routes}


@pytest.fixture
def table(monkeypatch):
    """Puts rows in the place of the shipped ones, and a GPU that they were measured on."""

    def use(*rows):
        _routes._routes.cache_clear()
        monkeypatch.setattr(_routes, "measurements", lambda c: rows if c == H200 else ())
        monkeypatch.setattr(
            _routes, "_capability", lambda device: H200 if device.type == "cuda" else None
        )

    yield use
    _routes._routes.cache_clear()


def test_the_fastest_wins_in_each_class():
    assert ranges(row([128, 512, 2048], [3, 3, 3], [2, 2, 4], [4, 1, 4])) == (
        (EDGES[0], A),
        (EDGES[1], B),
        (math.inf, None),
    )


def test_one_slow_count_puts_a_kernel_out():
    """Below 97 % of cuBLAS's speed somewhere in the class, whatever the mean."""
    classes = dict(ranges(row([1024, 2048], [1, 1], [0.5, 1.04], [0.9, 0.9])))
    assert classes[EDGES[2]] == B


def test_close_calls_do_not_split_a_range():
    assert ranges(row([128, 512], [1, 1], [0.5, 0.502], [0.6, 0.5]))[0] == (EDGES[1], A)


def test_a_tile_that_was_not_measured_is_out():
    assert ranges(row([128], [1], [None], [0.5]))[0] == (EDGES[0], B)


def test_classes_without_measurements():
    """cuBLAS, but for the most tokens the route of those before."""
    assert ranges(row([128], [1], [0.5], [2])) == ((EDGES[0], A), (math.inf, None))
    assert ranges(row([4096], [1], [0.5], [2])) == ((EDGES[2], None), (math.inf, A))


def test_nothing_measured_is_cublas(table):
    table()
    assert route(SHAPE, 100, GPU) is None
    assert not _routes.pays(SHAPE, GPU)


def test_nearest():
    near = row([128], [1], [1], [1], depth=700)
    far = row([128], [1], [1], [1], depth=1900)
    other = row([128], [1], [1], [1], depth=512, pairs=3)
    out_of_reach = row([128], [1], [1], [1], depth=512, width=256 * 5)
    assert nearest(SHAPE, [far, near, other, out_of_reach]) is near
    assert nearest(SHAPE, [other, out_of_reach]) is None
    assert nearest(SHAPE._replace(out_dtype="float16"), [near]) is near
    assert nearest(SHAPE._replace(out_dtype="float32"), [near]) is None


def test_by_tokens(table):
    table(row([128, 512, 2048], [3, 3, 3], [2, 2, 4], [4, 1, 4]))
    assert [route(SHAPE, t, GPU) for t in (1, 192, 193, 768, 769, 10**6)] == [
        A,
        A,
        B,
        B,
        None,
        None,
    ]
    assert _routes.pays(SHAPE, GPU)


@pytest.mark.parametrize("width", [512, 0])
def test_a_size_of_zero_is_cublas(table, width):
    table(row([128], [3], [2], [4]))
    assert route(SHAPE._replace(depth=512 - width, width=width), 100, GPU) is None


def test_a_staged_tile_that_cannot_be_is_cublas(monkeypatch):
    """What the table says of it was measured by descriptors. Strides of 8 numbers suit these."""
    monkeypatch.setattr(_routes, "route", lambda *_: A._replace(staged=True))
    operand = torch.empty(24, 48, dtype=torch.float16, device="meta")
    fits, odd = operand[:, :16], torch.empty(24, 49, device="meta")[:, :48]
    for epilogue, found in (([fits], True), ([odd], False), ([fits, odd], False), ([], True)):
        tile = _routes.tile_for(SHAPE, operand, operand, epilogue=epilogue)
        assert (tile is not None) == found
    narrow = SHAPE._replace(width=36)
    assert _routes.tile_for(narrow, operand, operand, epilogue=[fits]) is None


def test_on_a_cpu_everything_fuses(table):
    table()
    assert _routes.pays(SHAPE, torch.device("cpu"))


def test_a_symbol_leaves_a_guard(table):
    """One on the side of the edge that was taken, so that a variant serves its range."""
    table(row([128, 512, 2048], [3, 3, 3], [2, 2, 4], [4, 1, 4]))
    env = ShapeEnv()
    tokens = env.create_symintnode(
        env.create_symbol(500, source=torch._dynamo.source.ConstantSource("t")), hint=500
    )
    assert route(SHAPE, tokens, GPU) == B
    (low, high) = (str(g.expr) for g in env.guards)
    assert low.endswith(f"> {EDGES[0]}") and high.endswith(f"<= {EDGES[1]}")


def test_one_range_needs_no_guard(table):
    table(row([128, 512, 2048, 8192], [3] * 4, [2] * 4, [2.5] * 4))
    env = ShapeEnv()
    tokens = env.create_symintnode(
        env.create_symbol(500, source=torch._dynamo.source.ConstantSource("t")), hint=500
    )
    assert route(SHAPE, tokens, GPU) == A
    assert not env.guards


def test_a_size_that_nobody_knows_is_cublas(table):
    table(row([128, 512, 2048], [3, 3, 3], [2, 2, 4], [4, 1, 4]))
    assert route(SHAPE, ShapeEnv().create_unbacked_symint(), GPU) is None


def test_tuning_a_few_token_counts_keeps_the_others():
    """Of the tiles that are still tried; a tile that is new was not measured there."""
    merged = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "tune.py"))["merged"]
    old = row([128, 512], [3, 4], [1, 2], [5, 6])
    new = row([256, 512], [7, 8], [9, 10], [11, 12])
    new["routes"][0]["tile"] = A._replace(early=1)._asdict()
    both = merged(old, new)
    assert both["tokens"] == [128, 256, 512]
    assert both["cublas_ms"] == [3, 7, 8]
    assert [r["ms"] for r in both["routes"]] == [[None, 9, 10], [5, 11, 12]]


def test_tuning_a_part_keeps_no_rows_of_another_gpu(tmp_path):
    known = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "tune.py"))["known"]
    head = {"gpu": "a GPU", "capability": [9, 0], "torch": "2.11.0", "triton": "3.6.0"}
    path = tmp_path / "matmul_gpu.json"
    assert known(path, head) == {}
    path.write_text(json.dumps(head | {"rows": [{"name": "a"}]}))
    assert known(path, head) == {"a": {"name": "a"}}
    with pytest.raises(FusedBwdError, match="another GPU"):
        known(path, head | {"gpu": "another GPU"})


@pytest.mark.parametrize("path", sorted(_routes.DATA.glob("matmul_*.json")), ids=lambda p: p.stem)
def test_shipped_tables(path):
    """Complete, and every row of use to some number of tokens or honest about it."""
    table = json.loads(path.read_text())
    assert {"gpu", "capability", "torch", "triton"} <= table.keys()
    for r in table["rows"]:
        assert set(Shape._fields) <= r.keys()
        assert len(r["tokens"]) == len(r["cublas_ms"]) and sorted(r["tokens"]) == r["tokens"]
        assert all(len(x["ms"]) == len(r["tokens"]) for x in r["routes"])
        assert ranges(r)[-1][0] == math.inf
    assert tiles("sum_matmul")
