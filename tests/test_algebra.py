"""The normal form: equal formulas become equal forms, and equal forms are equal values."""

import contextlib
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fusedbwd.patterns.algebra import NotPolynomial, normal_form, strip

ROWS, WIDTH = 6, 4
SHAPES = {"x": (ROWS, WIDTH), "g": (ROWS, WIDTH), "w": (WIDTH,), "r": (ROWS, 1), "eps": ()}


def trace(fn, dtype=torch.float32, **shapes):
    """The nodes that ``fn``, called with tensors by name, returns; and its leaves."""
    shapes = SHAPES | shapes
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    tensors = [torch.rand(shapes[name]).to(dtype) for name in names]
    graph = make_fx(fn, tracing_mode="fake")(*tensors).graph
    return graph.output_node().args[0], graph.find_nodes(op="placeholder")


def same(fn, **options) -> bool:
    """Whether the two tensors that ``fn`` returns have one form."""
    (a, b), leaves = trace(fn, **options)
    return normal_form(a, leaves).matches(normal_form(b, leaves))


def rstd(x):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


IDENTITIES = {
    "square": lambda x: (x * x, x.pow(2)),
    "aten square": lambda x: (torch.ops.aten.square(x), x * x),
    "cube": lambda x: (x * x * x, x.pow(3)),
    "reciprocal": lambda x: (1 / x, x.pow(-1)),
    "rsqrt": lambda x: (torch.rsqrt(x), 1 / x.sqrt()),
    "pow -0.5": lambda x: (torch.rsqrt(x), x.pow(-0.5)),
    "rstd": lambda x: (rstd(x), (x.square().mean(-1, keepdim=True) + 1e-5).pow(-0.5)),
    "rstd cubed": lambda x: (rstd(x).pow(3), (x.pow(2).mean(-1, True) + 1e-5).pow(-1.5)),
    "distributivity": lambda x, g: (g * (x + 1), g * x + g),
    "binomial": lambda x, g: ((x + g) ** 2, x * x + 2 * x * g + g * g),
    "difference": lambda x, g: (x - g, -(g - x)),
    "alpha": lambda x, g: (torch.add(x, g, alpha=2), x + 2 * g),
    "sub alpha": lambda x, g: (torch.sub(x, g, alpha=2), x - 2 * g),
    "scalar alpha": lambda x: (torch.ops.aten.add.Scalar(x, 3, 2), x + 6),
    "cancellation": lambda x, g: (x + g - x, g),
    "mean is sum / N": lambda x: (x.mean(-1, keepdim=True), x.sum(-1, keepdim=True) / WIDTH),
    "row constants leave sums": lambda x, r: (
        (x * r).sum(-1, keepdim=True),
        r * x.sum(-1, keepdim=True),
    ),
    "a sum of row constants": lambda r: (
        r.expand(ROWS, WIDTH).sum(-1, keepdim=True),
        WIDTH * r,
    ),
    "sums are linear": lambda x, g: (
        (x + g).sum(-1, keepdim=True),
        x.sum(-1, keepdim=True) + g.sum(-1, keepdim=True),
    ),
    "unsqueezed sum": lambda x: (x.sum(-1).unsqueeze(-1), x.sum(-1, keepdim=True)),
    "unsqueezed mean": lambda x: (x.mean(-1)[:, None], x.mean(-1, keepdim=True)),
    "squeezed and unsqueezed": lambda r: (r.squeeze(-1).unsqueeze(-1), r * 1),
    "squeezed rows": lambda x: (x.unsqueeze(1).squeeze(1), x * 1),
    "expanded": lambda x, w: (x * w.expand(ROWS, WIDTH), x * w),
    "unsqueezed vector": lambda x, w: (x * w[None], w * x),
    "expanded rows": lambda x, r: (x * r.expand(ROWS, WIDTH), x * r),
    "casts": lambda x, g: (
        x.to(torch.float16).double() * g,
        (x.bfloat16() * g.float()).to(torch.float16),
    ),
    "views": lambda x, g: ((x.view(2, 3, WIDTH) * g.view(2, 3, WIDTH)).view(ROWS, WIDTH), x * g),
    "clones": lambda x, g: (x.clone() * g.contiguous(), x * g),
    "silu": lambda x: (F.silu(x), x * torch.sigmoid(x)),
    "variance": lambda x: (
        x.var(-1, correction=0, keepdim=True),
        (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True),
    ),
    "variance by moments": lambda x: (
        x.var(-1, correction=0, keepdim=True),
        x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2,
    ),
    "var_mean": lambda x: (
        torch.var_mean(x, -1, correction=0, keepdim=True)[0],
        x.var(-1, correction=0, keepdim=True),
    ),
    "mean of var_mean": lambda x: (
        torch.var_mean(x, -1, correction=0, keepdim=True)[1],
        x.mean(-1, keepdim=True),
    ),
    "full": lambda x: (x * torch.full((ROWS, WIDTH), 2.0), x + x),
    "eps tensor": lambda x, eps: (eps + x, x + eps),
}

DIFFERENT = {
    "root of a square": lambda x: (torch.sqrt(x * x), x),
    "fourth root of a square": lambda x: (torch.pow(x * x, 0.25) ** 2, x),
    "root of a fourth power": lambda x: (torch.sqrt(x.pow(4)), x * x * x / x.abs()),
    "roots of products": lambda x, g, r: (
        torch.sqrt(x * g) * torch.sqrt(g * r) * torch.sqrt(x * r),
        x * g * r,
    ),
    "root of a negative multiple": lambda x: (torch.sqrt(-2 * x) ** 2, -(torch.sqrt(2 * x) ** 2)),
    "root of a quotient": lambda x, g: (torch.sqrt(x * g) * torch.sqrt(x / g), x),
    "rounding": lambda x: (torch.div(x, 2, rounding_mode="floor"), x / 2),
    "integers": lambda x: (x.to(torch.int32).float(), x),
    "truth values": lambda x: (x.bool().float(), x),
    "quantization": lambda x: (x.to(torch.float8_e4m3fn).float(), x),
    "absolute value": lambda x: (x.abs(), x),
    "no keepdim": lambda s: (s.sum(-1), s.sum(-1, keepdim=True)),
    "rows and columns": lambda s: (s.sum(-1, keepdim=True), s.sum(0, keepdim=True)),
    "a column of sums as a row": lambda s: (s * s.sum(-1), s * s.sum(-1, keepdim=True)),
    "a row of sums": lambda s: (s * s.sum(-1)[None], s * s.sum(-1)[:, None]),
    "squeezed": lambda r: (r.squeeze(-1), r * 1),
    "a vector along rows": lambda s, w: (s * w[:, None], s * w),
    "transposed": lambda s: (s.t() * 1, s * 1),
    "viewed across rows": lambda x: (x.view(WIDTH, ROWS), x),
    "permuted": lambda t: (t.permute(1, 0, 2) * 1, t * 1),
    "flipped": lambda x: (x.flip(0), x),
    "sliced": lambda x: (x[:, :1].expand(ROWS, WIDTH), x),
    "sum over all": lambda x: (x.sum((0, 1), keepdim=True), x.sum(-1, keepdim=True)),
    "no dims: all of them": lambda x: (x.sum((), keepdim=True), x.sum(-1, keepdim=True)),
    "unbiased variance": lambda x: (
        x.var(-1, keepdim=True),
        x.var(-1, correction=0, keepdim=True),
    ),
    "unbiased var_mean": lambda x: (
        torch.var_mean(x, -1, keepdim=True)[0],
        x.var(-1, correction=0, keepdim=True),
    ),
    "variance of columns": lambda s: (
        s.var(0, correction=0, keepdim=True),
        s.var(-1, correction=0, keepdim=True),
    ),
    "eps outside the root": lambda x: (
        1 / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5),
        rstd(x),
    ),
    "another eps": lambda x: (
        rstd(x),
        torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.001e-5),
    ),
    "a small term": lambda x, g: (x + 1e-13 * g, x),
    "mean of |x|": lambda x: (x.abs().mean(-1, keepdim=True), x.mean(-1, keepdim=True)),
    "a sum of products": lambda x, g: (
        (x * g).sum(-1, keepdim=True),
        x.sum(-1, keepdim=True) * g.sum(-1, keepdim=True),
    ),
    "a varying factor": lambda x, w: (
        (x * w).sum(-1, keepdim=True) / w,
        x.sum(-1, keepdim=True),
    ),
    "sigmoid of another": lambda x, g: (x * torch.sigmoid(g), F.silu(x)),
}

SQUARE_MATRIX = {"s": (WIDTH, WIDTH), "t": (3, 3, WIDTH)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", IDENTITIES)
def test_equal(name, dtype):
    assert same(IDENTITIES[name], dtype=dtype)


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name):
    assert not same(DIFFERENT[name], **SQUARE_MATRIX)


def test_rows_of_one_element():
    """A row of one element is constant along the row, and its own sum."""
    shapes = {"x": (ROWS, 1), "g": (ROWS, 1)}
    assert same(lambda x: (x.sum(-1, keepdim=True), x), **shapes)
    assert same(lambda x, g: ((x * g).sum(-1, True), x * g.sum(-1, True)), **shapes)
    assert not same(lambda x: (x.var(-1, correction=0, keepdim=True), x), **shapes)


@pytest.mark.parametrize("constant", [math.inf, -math.inf, math.nan])
def test_constants_that_are_not_numbers(constant):
    with pytest.raises(NotPolynomial):
        same(lambda x: (x + constant, x))
    with pytest.raises(NotPolynomial):
        same(lambda x: (x + torch.full((WIDTH,), constant), x))


def test_overflow():
    with pytest.raises(NotPolynomial):
        same(lambda x: ((x * 1e200).pow(3), x), dtype=torch.float64)


def test_operands_without_rows():
    same(lambda eps: (eps.sum(0, keepdim=True), eps.mean(0, keepdim=True)))
    same(lambda x: (x.sum(-1, keepdim=True), x.mean(-1, keepdim=True)), x=(ROWS, 0))


def test_deep_graphs():
    def chain(x):
        for _ in range(2000):
            x = torch.sigmoid(x)
        return (x,)

    (node,), leaves = trace(chain)
    with pytest.raises(NotPolynomial):
        normal_form(node, leaves)


def test_large_sums():
    def powers(x, g):
        y = x + g + 1
        return (y * y * y * y * y * y * y * y * y * y * y,)

    (node,), leaves = trace(powers)
    with pytest.raises(NotPolynomial):
        normal_form(node, leaves)


def test_what_may_be_expanded():
    (a, b), _ = trace(lambda x, g: (x * g + g, x))
    product = a.args[0]
    form = normal_form(a, expandable=lambda node: node is not product)
    assert product in form.atoms() and b not in form.atoms()
    assert normal_form(a, leaves=[a]).atoms() == {a}


def test_strip():
    (a,), (x,) = trace(lambda x: (x.bfloat16().view(2, 3, WIDTH).clone().unsqueeze(0).float(),))
    assert strip(a) is x
    for step in (
        lambda x: (x.view(WIDTH, ROWS),),
        lambda x: (x.unsqueeze(-1),),
        lambda x: (x.int(),),
        lambda x: (x.to(torch.float8_e5m2),),
        lambda x: (x.t(),),
        lambda x: (x[:, :2],),
    ):
        (a,), (x,) = trace(step)
        assert strip(a) is a


# --- random programs: wherever two forms are equal, the values are


def _rows(t):
    return t.expand(WIDTH, WIDTH)


_POWERS = [-2, -1.5, -1, -0.5, 0.25, 0.5, 0.5, 0.75, 1.5, 2, 2, 3, 4, 5]
_THEMES = {
    "roots": [
        lambda a, b, k: a * b,
        lambda a, b, k: a / b,
        lambda a, b, k: a * a,
        lambda a, b, k: a.pow(_POWERS[k]),
        lambda a, b, k: torch.sqrt(a),
    ],
    "rows": [
        lambda a, b, k: a + b,
        lambda a, b, k: a * b,
        lambda a, b, k: a.sum(-1, keepdim=True),
        lambda a, b, k: a.mean(-1).unsqueeze(-1),
        lambda a, b, k: _rows(a).sum(0, keepdim=True),
        lambda a, b, k: a.var(-1, correction=0, keepdim=True),
    ],
    "views": [
        lambda a, b, k: a * b,
        lambda a, b, k: a.sum(-1, keepdim=True),
        lambda a, b, k: _rows(a).reshape(2, -1, WIDTH).clone().view(-1, WIDTH),
        lambda a, b, k: _rows(a).unsqueeze(0).squeeze(0),
        lambda a, b, k: _rows(a).t().reshape(-1, WIDTH),
        lambda a, b, k: _rows(a).reshape(2, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH),
        lambda a, b, k: _rows(a).sum(-1)[None],
        lambda a, b, k: _rows(a).sum(-1)[:, None],
        lambda a, b, k: _rows(a).flip(-1),
    ],
    "formulas": [
        lambda a, b, k: torch.sub(a, b, alpha=k - 3),
        lambda a, b, k: a * b,
        lambda a, b, k: a * (k - 5),
        lambda a, b, k: a + 0.5 * k,
        lambda a, b, k: -a,
        lambda a, b, k: torch.rsqrt(a),
        lambda a, b, k: a.float().double(),
        lambda a, b, k: torch.sigmoid(a),
        lambda a, b, k: F.silu(a),
        lambda a, b, k: torch.exp(a),
    ],
}


@pytest.mark.parametrize("theme", _THEMES)
@pytest.mark.parametrize("seed", range(20))
def test_equal_forms_are_equal_values(seed, theme):
    rng = random.Random(seed)
    # As many rows as columns, so that a wrong axis has the right size.
    shapes = [(WIDTH, WIDTH), (1, WIDTH), (WIDTH, 1)][: rng.randint(1, 3)]
    steps = [
        (rng.choice(_THEMES[theme]), *rng.choices(range(k), k=2), rng.randrange(14))
        for k in range(len(shapes), 40)
    ]

    def run(*leaves):
        values = list(leaves)
        for operation, i, j, k in steps:
            values.append(operation(values[i], values[j], k))
        return tuple(values)

    torch.manual_seed(seed)
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    graph = make_fx(run, tracing_mode="fake")(*leaves).graph
    placeholders = graph.find_nodes(op="placeholder")
    forms = []
    for node, value in zip(graph.output_node().args[0], run(*leaves), strict=True):
        with contextlib.suppress(NotPolynomial):
            forms.append((normal_form(node, placeholders), value))
    for k, (form, value) in enumerate(forms):
        for other, other_value in forms[:k]:
            if form.matches(other) and value.shape[0] == other_value.shape[0]:
                a, b = torch.broadcast_tensors(value, other_value)
                both = a.isfinite() & b.isfinite()
                torch.testing.assert_close(a[both], b[both], rtol=1e-4, atol=1e-30)
