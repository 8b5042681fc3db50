"""What surrounds SDPA's backward: group sums, RoPE, packing for the projections."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from harness import KINDS, joint_graph, wide

from fusedbwd import Config
from fusedbwd.fuse import fuse
from fusedbwd.graph import value

PATTERN = "rope_backward"

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 8, 24
TABLE = ("b", "s", DIM)
aten = torch.ops.aten


def misses(report):
    """Near misses of this fusion; the matmuls around it have their own."""
    return [miss for miss in report.missed if miss.fusion == PATTERN]


def rotate_chunk(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_slices(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(z, cos, sin, rotate=rotate_slices):
    return z * cos.unsqueeze(1) + rotate(z) * sin.unsqueeze(1)


def rope_in_float32(z, cos, sin):
    return rope(wide(z), wide(cos), wide(sin)).to(z.dtype)


def hf_repeat(x, group=HEADS // KV_HEADS):
    b, n, s, d = x.shape
    return x[:, :, None].expand(b, n, group, s, d).reshape(b, n * group, s, d)


def interleaved(x, group=HEADS // KV_HEADS):
    return x.repeat_interleave(group, 1)


def single(x):
    return x


def merged(out):
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def layer(*, rotated=rope, repeat=hf_repeat, **options):
    """Projections, RoPE, SDPA; ``options`` are SDPA's."""

    def fn(x, cos, sin, mq, mk, mv):
        q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return merged(sdpa(q, repeat(k), repeat(v), **options))

    return fn


def one_projection(x, cos, sin, mq):
    widths = [n * DIM for n in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (z.unflatten(-1, (-1, DIM)).transpose(1, 2) for z in (x @ mq).split(widths, -1))
    return merged(sdpa(rope(q, cos, sin), rope(k, cos, sin), v, enable_gqa=True))


def slices_of_one(x, cos, sin, mq, rotated=rope):
    """As Phi-3: q, k and v are slices of one projection."""
    y = x @ mq
    ends = [0, HEADS * DIM, (HEADS + KV_HEADS) * DIM, (HEADS + 2 * KV_HEADS) * DIM]
    q, k, v = (y[..., a:b].unflatten(-1, (-1, DIM)).transpose(1, 2) for a, b in pairwise(ends))
    return merged(sdpa(rotated(q, cos, sin), rotated(k, cos, sin), v, enable_gqa=True))


def nothing_passes_by(x, cos, sin, mq):
    """As Phi-3 without partial rotary: an empty rest of each head is joined to it."""
    return slices_of_one(x, cos, sin, mq, lambda *args: partial(*args, DIM))


def sdpa(q, k, v, is_causal=True, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)


def shapes(kv_heads=KV_HEADS, table=TABLE):
    return {
        "x": ("b", "s", WIDTH),
        "cos": table,
        "sin": table,
        "mq": (WIDTH, HEADS * DIM),
        "mk": (WIDTH, kv_heads * DIM),
        "mv": (WIDTH, kv_heads * DIM),
    }


def one_weight(more=0):
    weight = (WIDTH, (HEADS + 2 * KV_HEADS) * DIM + more)
    return {name: shapes()[name] for name in ("x", "cos", "sin")} | {"mq": weight}


@pytest.fixture
def check_frozen(check):
    def run(*args, **kwargs):
        return check(*args, frozen=("cos", "sin"), **kwargs)

    return run


SPELLINGS = {
    "Hugging Face": (layer(), shapes()),
    "repeat_interleave": (layer(repeat=interleaved), shapes()),
    "enable_gqa": (layer(repeat=single, enable_gqa=True), shapes()),
    "no groups": (layer(repeat=single), shapes(HEADS)),
    "multi-query": (layer(repeat=lambda x: hf_repeat(x, HEADS)), shapes(1)),
    "multi-query, expanded": (
        layer(repeat=lambda x: x.expand(-1, HEADS, -1, -1)),
        shapes(1),
    ),
    "chunks": (layer(rotated=lambda *a: rope(*a, rotate_chunk)), shapes()),
    "one table for all": (layer(), shapes(table=(1, "s", DIM))),
    "RoPE in float32": (layer(rotated=rope_in_float32), shapes()),
    "one projection for all": (one_projection, one_weight()),
    "slices of one": (slices_of_one, one_weight()),
    "slices of one, and more": (slices_of_one, one_weight(3)),
    "nothing passes by": (nothing_passes_by, one_weight()),
    "not causal, scaled": (layer(is_causal=False, scale=0.3), shapes()),
}


@KINDS
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(check_frozen, name, dtype, dynamic):
    fn, args = SPELLINGS[name]
    report = check_frozen(fn, args, dtype, dynamic=dynamic, fires=1)
    assert not misses(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_more_dtypes(check_frozen, dtype):
    check_frozen(layer(), shapes(), dtype, fires=1)


@pytest.mark.parametrize("fn", [one_projection, slices_of_one])
def test_packed_projection(fn):
    """The fused op writes the gradient of the one projection itself."""
    gm, _ = joint_graph(fn, one_weight(), torch.bfloat16, frozen=("cos", "sin"))
    assert fuse(gm.graph, Config()).counts() == {PATTERN: 1}
    joining = (aten.cat.default, aten.slice_scatter.default, aten.add.Tensor)
    left = [n for op in joining for n in gm.graph.find_nodes(op="call_function", target=op)]
    assert not [n for n in left if value(n).shape[-1] == (HEADS + 2 * KV_HEADS) * DIM]


def test_one_row(check_frozen):
    args = shapes() | {"x": (1, 1, WIDTH)} | dict.fromkeys(("cos", "sin"), (1, 1, DIM))
    check_frozen(layer(), args, fires=1)


@KINDS
def test_biases_and_two_layers(check_frozen, dtype, dynamic):
    """The bias gradients are sums over the packed gradients' columns."""

    def fn(x, cos, sin, mq, mk, mv, wq, wk):
        for _ in range(2):
            q, k, v = x @ mq + wq, x @ mk + wk, x @ mv + wk
            q, k, v = (z.view(*x.shape[:-1], -1, DIM).transpose(1, 2) for z in (q, k, v))
            x = x + merged(sdpa(rope(q, cos, sin), hf_repeat(rope(k, cos, sin)), hf_repeat(v)))
        return x

    args = shapes() | {"x": ("b", "s", HEADS * DIM), "wq": (HEADS * DIM,), "wk": (KV_HEADS * DIM,)}
    args |= {"mq": (HEADS * DIM,) * 2} | dict.fromkeys(("mk", "mv"), (HEADS * DIM, KV_HEADS * DIM))
    check_frozen(fn, args, dtype, dynamic=dynamic, fires=2)


def test_mixed_precision(check):
    """As under autocast: 16-bit projections, tables and RoPE in float32, 16-bit attention."""

    def fn(x, cos, sin, mq, mk, mv):
        def rotated(z):
            z = rope(z, cos, sin)
            return z if x.dtype == torch.float64 else z.to(x.dtype)

        q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
        return merged(sdpa(rotated(q), hf_repeat(rotated(k)), hf_repeat(v)))

    dtypes = dict.fromkeys(shapes(), torch.bfloat16) | dict.fromkeys(("cos", "sin"), torch.float32)
    check(fn, shapes(), dtypes, frozen=("cos", "sin"), fires=1)


def swapped(z, cos, sin):
    return rope(z, sin, cos)  # still a RoPE, by the tables' other names


def pairs(z, cos, sin):
    return rope(z, cos, sin, lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2))


def partial(z, cos, sin, rotary=DIM // 2):
    turned = rope(z[..., :rotary], cos[..., :rotary], sin[..., :rotary])
    return torch.cat((turned, z[..., rotary:]), -1)


def other_way(z, cos, sin):
    return z * cos.unsqueeze(1) - rotate_chunk(z) * sin.unsqueeze(1)


def table_per_head(z, cos, sin):
    """As many heads as there are batch entries would make it look like one per entry."""
    return z * cos + rotate_chunk(z) * sin


def by_other_order(x, group=HEADS // KV_HEADS):
    """Head g·K + k, not k·G + g."""
    return x.repeat(1, group, 1, 1)


def differing_tables(x, cos, sin, mq, mk, mv):
    q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
    return merged(sdpa(rope(q, cos, sin), rope(k, sin, cos), v, enable_gqa=True))


def one_repeated(x, cos, sin, mq, mk, mv):
    q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
    return merged(sdpa(rope(q, cos, sin), hf_repeat(rope(k, cos, sin)), v))


def turned_again(x, cos, sin, mq, mk, mv):
    """q's permutation is another: heads and tokens do not change places."""
    q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
    q = q.flip(1)
    return merged(sdpa(rope(q, cos, sin), hf_repeat(rope(k, cos, sin)), hf_repeat(v)))


NOT_ROPE = "does not go back through RoPE by halves"


def scaled_by_length(x, cos, sin, mq, mk, mv):
    """A size, no tensor, is a factor of the rotated q."""
    q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
    return merged(sdpa(rope(q, cos, sin) * x.shape[1], hf_repeat(rope(k, cos, sin)), hf_repeat(v)))


def halves_of_the_batch(x, cos, sin, mq, mk, mv):
    """Gradients joined along the first dimension, beside another use of the rotated q."""
    q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
    q, k, v = rope(q, cos, sin), hf_repeat(rope(k, cos, sin)), hf_repeat(v)
    parts = zip(q.split([1, 2]), k.split([1, 2]), v.split([1, 2]), strict=True)
    return merged(torch.cat([sdpa(*part) for part in parts]) + torch.sin(q))


LOOK_ALIKES = {
    "interleaved RoPE": (layer(rotated=pairs), shapes(), NOT_ROPE),
    "partial rotary": (layer(rotated=partial), shapes(), NOT_ROPE),
    "partial rotary, a quarter": (layer(rotated=lambda *a: partial(*a, 2)), shapes(), NOT_ROPE),
    "other direction": (layer(rotated=other_way), shapes(), NOT_ROPE),
    "a table per head": (
        layer(rotated=table_per_head, repeat=single),
        shapes(HEADS, (HEADS, "s", DIM)),
        NOT_ROPE,
    ),
    "no RoPE": (layer(rotated=lambda z, cos, sin: z), shapes(), NOT_ROPE),
    "heads repeated in another order": (layer(repeat=by_other_order), shapes(), NOT_ROPE),
    "other tables for k": (differing_tables, shapes(), "different tables"),
    "v not repeated": (one_repeated, shapes() | {"mv": (WIDTH, HEADS * DIM)}, "groups of 2"),
    "heads turned round": (turned_again, shapes(), "is not flattened"),
    "heads apart": (
        lambda q, k, v, cos, sin: sdpa(rope(q, cos, sin), rope(k, cos, sin), v),
        dict.fromkeys("qkv", ("b", HEADS, "s", DIM)) | dict.fromkeys(("cos", "sin"), TABLE),
        "is not flattened",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(check_frozen, name):
    fn, args, reason = LOOK_ALIKES[name]
    report = check_frozen(fn, args, torch.bfloat16, fires=0)
    assert [reason in miss.reason for miss in misses(report)] == [True], report


@pytest.mark.parametrize(
    ("fn", "dynamic"), [(scaled_by_length, True), (halves_of_the_batch, False)]
)
def test_what_is_no_rotation(check_frozen, fn, dynamic):
    """Nothing fuses and nothing breaks off."""
    assert misses(check_frozen(fn, shapes(), torch.bfloat16, dynamic=dynamic, fires=0))


def test_tables_by_other_names(check_frozen):
    check_frozen(layer(rotated=swapped), shapes(), fires=1)


@pytest.mark.parametrize("which", ["q", "rotated q", "k", "v", "repeated v"])
def test_used_elsewhere(check_frozen, which):
    """Gradients that join on the way are not SDPA's alone."""

    def fn(x, cos, sin, mq, mk, mv):
        q, k, v = ((x @ m).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for m in (mq, mk, mv))
        more = {"q": q, "k": k, "v": v}
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        v_repeated = hf_repeat(v)
        more |= {"rotated q": q, "repeated v": v_repeated}
        return torch.cat([merged(sdpa(q, hf_repeat(k), v_repeated)), merged(more[which])], -1)

    assert check_frozen(fn, shapes(), torch.bfloat16, fires=0).missed


@pytest.mark.parametrize("name", ["tables", "q", "v"])
def test_gradients_that_are_wanted_or_not(check, name):
    """Trained tables read dq and dk too; frozen projections want none of the three."""
    frozen = {"tables": (), "q": ("cos", "sin", "x", "mq"), "v": ("cos", "sin", "x", "mv")}[name]
    report = check(layer(), shapes(), frozen=frozen, fires=0)
    reason = "is used for more than" if name == "tables" else "not all of the gradients"
    assert reason in misses(report)[0].reason


FLAVOURS = [
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
]


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda op: op._schema.name)
def test_flavours_of_a_gpu(flavour):
    """A CPU traces its own; the others give their gradients in the same places."""
    gm, _ = joint_graph(layer(), shapes(), torch.bfloat16, frozen=("cos", "sin"))
    (node,) = gm.graph.find_nodes(
        op="call_function",
        target=aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    node.target = flavour
    names = [r.name for r in flavour._schema.returns][:3]
    assert names in (["grad_query", "grad_key", "grad_value"], ["", "", ""])
    assert fuse(gm.graph, Config(verify=True)).counts() == {PATTERN: 1}


def test_switched_off(check_frozen):
    config = Config(rope_backward=False)
    report = check_frozen(layer(), shapes(), config=config, fires=0)
    assert report.switched_off == [PATTERN]
