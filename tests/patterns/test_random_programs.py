"""Random compositions of what the patterns take, each rewrite and every gradient checked."""

import random

import pytest
import test_layer_norm_backward as layer_norm
import test_rms_norm_backward as rms_norm
import torch
import torch.nn.functional as F
from harness import WIDTH, arguments_of, draw, joint_graph
from torch import fx

from fusedbwd import Config
from fusedbwd.fuse import fuse

OPERATIONS = [
    lambda x, y, w, b, m: rms_norm.hf_norm(x, w),
    lambda x, y, w, b, m: rms_norm.gemma_norm(x, w),
    lambda x, y, w, b, m: rms_norm.normalized(x),
    lambda x, y, w, b, m: rms_norm.normalized(x) * w + y,
    lambda x, y, w, b, m: layer_norm.composite(x, w, b),
    lambda x, y, w, b, m: layer_norm.manual(x, w, b),
    lambda x, y, w, b, m: layer_norm.normalized(x),
    lambda x, y, w, b, m: F.gelu(x + b),
    lambda x, y, w, b, m: F.gelu(x @ m + b, approximate="tanh"),
    lambda x, y, w, b, m: F.silu(x) * y,
    lambda x, y, w, b, m: F.silu(x @ m) * (y @ m),
    lambda x, y, w, b, m: x @ m,
    lambda x, y, w, b, m: x + y,
    lambda x, y, w, b, m: x - y,
    lambda x, y, w, b, m: x * w,
    lambda x, y, w, b, m: x.detach() * y,
    lambda x, y, w, b, m: (x + b).expand(4, *x.shape).sum(0),
    lambda x, y, w, b, m: x.flip(0) + y,
    lambda x, y, w, b, m: torch.cat([x, y], -1).chunk(2, -1)[1],
    lambda x, y, w, b, m: x * torch.rsqrt(rms_norm.mean_square(y) + rms_norm.EPS),
]


def program(rng):
    """Up to eight operations, each on two of the values so far."""
    steps = [
        (rng.choice(OPERATIONS), rng.randrange(k), rng.randrange(k), rng.randrange(2))
        for k in range(2, rng.randint(5, 10))
    ]

    def run(x, y, w1, w2, b1, b2, m1, m2):
        values, parameters = [x, y], [(w1, b1, m1 / 4), (w2, b2, m2 / 4)]
        for operation, i, j, k in steps:
            values.append(operation(values[i], values[j], *parameters[k]))
        everything = (w1 + b1 + w2 + b2 + x + y) @ (m1 + m2)
        return values[-1] + values[-2] + 0 * everything

    return run


@pytest.mark.parametrize("seed", range(16))
def test_random_program(seed):
    rng = random.Random(seed)
    fn = program(rng)
    tokens = rng.choice([("b", "s"), ("t",), (1, 4)])
    shapes = arguments_of(fn, x=(*tokens, WIDTH), y=(*tokens, WIDTH))
    frozen = tuple(name for name in shapes if rng.random() < 0.15)
    gm, wanted = joint_graph(fn, shapes, torch.float64, dynamic=seed % 2 == 1, frozen=frozen)
    fuse(gm.graph, Config(verify=True))
    values = {n: t.requires_grad_(n in wanted) for n, t in draw(shapes, torch.float64).items()}
    out = fn(**values)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    expected = torch.autograd.grad(out, [values[n] for n in wanted], grad)
    with torch.no_grad():
        actual = fx.Interpreter(gm).run(*values.values(), grad, enable_io_processing=False)
    scale = max(e.abs().max().item() for e in expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-12 * scale)
