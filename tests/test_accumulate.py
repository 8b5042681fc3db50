"""Sums that cuBLAS adds up in the memory of a term: which, in what order, and with what result."""

import re

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fusedbwd
from fusedbwd import Config, passes
from fusedbwd.accumulate import accumulate_pass, add_matmul
from fusedbwd.bench_kernels import kernels
from fusedbwd.graph import inline
from fusedbwd.kernels import sum_matmul
from fusedbwd.kernels.matmul_sum import sum_matmul_unfused
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.partition import backward_graph
from fusedbwd.problems import PROBLEMS
from fusedbwd.trace import open_sizes, trace_joint

SHAPES = {"p": (6, 4), "q": (4, 8), "a": (6, 5), "b": (5, 8), "r": (6, 8), "w": (8, 3)}


def draw(dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in SHAPES.values()]


def accumulated(fn, dtype=torch.float32):
    """The graph of ``fn`` after the pass, and how many sums it made."""
    gm = make_fx(fn, tracing_mode="fake")(*draw(dtype))
    accumulate_pass(gm.graph)
    return gm.graph, len([n for n in gm.graph.nodes if n.target is add_matmul])


def mm_and_mm(p, q, a, b, r, w):
    return p @ q + a @ b


def addmms(p, q, a, b, r, w):
    return torch.addmm(torch.addmm(p @ q, a, b), a, b)


def left_and_right(p, q, a, b, r, w):
    return torch.addmm(p @ q, a, b), (a @ b) + torch.addmm(r, p, q)


def behind_views(p, q, a, b, r, w):
    return (p @ q).view(2, 3, 8) + (a @ b).view(2, 3, 8)


def read_before(p, q, a, b, r, w):
    x = p @ q
    y = x @ w
    return torch.addmm(x, a, b), y


def read_behind(p, q, a, b, r, w):
    """As a weight's gradient does the gradient that goes on into a residual."""
    x = p @ q
    total = x.view(2, 3, 8) + (a @ b).view(2, 3, 8)
    return total, x.t() @ p, total * 2


def read_by_arithmetic(p, q, a, b, r, w):
    x = p @ q
    total = torch.addmm(x, a, b)
    y = torch.sin(x.view(3, 16).t())
    return total, y @ y.t()


def sums_of_sums(p, q, a, b, r, w):
    x = p @ q
    y = torch.addmm(x, a, b)
    return torch.addmm(y, a, b) @ w, y @ w


def of_three_dimensions(p, q, a, b, r, w):
    x = torch.bmm(p.view(2, 3, 4), q.expand(2, 4, 8))
    return x + (a @ b).view(2, 3, 8), torch.bmm(x, w.expand(2, 8, 3))


def crossed(p, q, a, b, r, w):
    """Each sum's term is read by what needs the other sum: one of them has to be first."""
    x, y = p @ q, p @ (q * 2)
    first, second = torch.addmm(x, a, b), torch.addmm(y, a, b)
    return x.t() @ second, y.t() @ first


def a_factor_overwritten(p, q, a, b, r, w):
    """The other sum's product would be taken where x is not there any more."""
    x, y, z = p @ q, torch.addmm(r, a, b), q.t() @ q
    return torch.addmm(x, a, b), y.view(2, 3, 8) + (x @ z).view(2, 3, 8)


TAKEN = {
    mm_and_mm: 1,
    addmms: 2,
    left_and_right: 2,
    behind_views: 1,
    read_before: 1,
    read_behind: 1,
    read_by_arithmetic: 1,
    sums_of_sums: 2,
    of_three_dimensions: 1,
    crossed: 1,
    a_factor_overwritten: 1,
}


@pytest.mark.parametrize("fn", TAKEN, ids=lambda f: f.__name__)
def test_taken(fn):
    graph, count = accumulated(fn)
    assert count == TAKEN[fn]
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=add_matmul):
        x = node.args[0]
        assert all(order[user] <= order[node] for user in x.users)


def an_input(p, q, a, b, r, w):
    return torch.addmm(r, a, b), r.view(2, 24) + (a @ b).view(2, 24)


def a_result(p, q, a, b, r, w):
    x = p @ q
    return torch.addmm(x, a, b), x


def a_results_source(p, q, a, b, r, w):
    x = p @ q
    return torch.addmm(x, a, b), x[:, 2:4]


def read_by_what_needs_the_sum(p, q, a, b, r, w):
    x = p @ q
    return torch.addmm(x, a, b) * x


def an_operand(p, q, a, b, r, w):
    x = a.t() @ a
    return torch.addmm(x, x, b @ b.t())


def a_factors_view(p, q, a, b, r, w):
    x = a.t() @ a
    return x + x.t() @ x.t()


def transposed(p, q, a, b, r, w):
    return torch.addmm((q.t() @ p.t()).t(), a, b)


def expanded(p, q, a, b, r, w):
    return torch.addmm((p @ q)[:1].expand(6, 8), a, b)


def broadcast(p, q, a, b, r, w):
    return torch.addmm((p @ q)[0], a, b)


def a_part(p, q, a, b, r, w):
    return torch.addmm((torch.cat([p, p]) @ q)[3:9], a, b)


def another_dtype(p, q, a, b, r, w):
    return (p.double() @ q.double()) + a @ b


def scaled(p, q, a, b, r, w):
    x, y = p @ q, q.t() @ p.t()
    return torch.addmm(x, a, b, alpha=2), torch.add(y.t(), a @ b, alpha=3)


def product_used_twice(p, q, a, b, r, w):
    x, y = torch.sin(p @ q), a @ b
    return x + y, y


def written_elsewhere(p, q, a, b, r, w):
    x = p @ q
    total = torch.addmm(x, a, b)
    s = r.sum()
    return total, s, torch.ops.aten.copy_.default(r, x)


LEFT = [
    an_input,
    a_result,
    a_results_source,
    read_by_what_needs_the_sum,
    an_operand,
    a_factors_view,
    transposed,
    expanded,
    broadcast,
    a_part,
    another_dtype,
    scaled,
    product_used_twice,
    written_elsewhere,
]


@pytest.mark.parametrize("fn", LEFT, ids=lambda f: f.__name__)
def test_left_alone(fn):
    assert accumulated(fn)[1] == 0


@pytest.mark.parametrize(
    "setting",
    [
        "max_autotune",
        "max_autotune_gemm",
        "aten_distributed_optimizations.enable_overlap_scheduling",
    ],
)
def test_left_alone_under(setting):
    with inductor_config.patch({setting: True}):
        assert accumulated(mm_and_mm)[1] == 0


# --- in Inductor's code


def everything(p, q, a, b, r, w):
    return [fn(p, q, a, b, r, w) for fn in (*TAKEN, *LEFT[:8])]


def compiled(fn, arguments, *, backward=True, **settings):
    torch._dynamo.reset()
    settings = passes.launching(Config(), backward=backward) | settings
    with inductor_config.patch(fx_graph_cache=False, **settings), torch.no_grad():
        return run_and_get_code(torch.compile(fn), *arguments)


def in_place(code, cpp_wrapper):
    """How many addmms in the code write to what they read."""
    calls = re.findall(r"addmm_out\((.*)\)" if cpp_wrapper else r"addmm\((.*)\)", code)
    names = [re.findall(r"(?:buf|arg)\d+", call) for call in calls]
    return sum(n[0] == n[1 if cpp_wrapper else -1] for n in names)


@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["Python", "C++"])
def test_results_and_inputs(cpp_wrapper):
    arguments = draw()
    before = [t.clone() for t in arguments]
    got, code = compiled(everything, arguments, cpp_wrapper=cpp_wrapper)
    eager, oracle = everything(*before), everything(*(t.double() for t in before))
    for ours, theirs, right in zip(*map(pytree.tree_leaves, (got, eager, oracle)), strict=True):
        allowed = budget(relative_l2(theirs, right), ours.dtype)
        assert within(relative_l2(ours, right), allowed)
    for now, was in zip(arguments, before, strict=True):
        assert torch.equal(now, was)
    assert in_place(code[-1], cpp_wrapper) == sum(TAKEN.values())
    assert "custom_op_wrapper" not in code[-1]


def test_forwards_are_left_alone():
    _, code = compiled(behind_views, draw(), backward=False)
    assert "addmm(" not in code[-1]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        x = self.norm(x)
        return self.norm(x + self.second(nn.functional.gelu(self.first(x))))


@pytest.mark.parametrize("accumulate", [True, False])
def test_training(accumulate, fresh_dynamo):
    torch.manual_seed(0)
    module = Residual()
    x = torch.randn(2, 5, 8, requires_grad=True)
    grads = torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()])
    with inductor_config.patch(fx_graph_cache=False):
        fused = fusedbwd.compile(module, config=Config(accumulate=accumulate))
        found, code = run_and_get_code(
            lambda: torch.autograd.grad(fused(x).sin().sum(), [x, *module.parameters()])
        )
    for ours, eager in zip(found, grads, strict=True):
        torch.testing.assert_close(ours, eager)
    assert ("addmm(" in code[-1]) == accumulate


# --- the reference problems


def problem_graph(name):
    """The backward of a small reference problem, its sums of matmuls as they are on a GPU."""
    problem = PROBLEMS[name]
    module = problem.build(device="meta", **problem.small)
    schema = problem.schema(module)
    shape_env, sizes = open_sizes(schema.symbols, {}, None)
    joint = trace_joint(
        module, schema, device=torch.device("cpu"), sizes=sizes, shape_env=shape_env
    )
    fusedbwd.fuse.fuse(joint.gm.graph, Config())
    graph = backward_graph(joint).graph
    for node in graph.find_nodes(op="call_function", target=sum_matmul):
        node.replace_all_uses_with(inline(graph, sum_matmul_unfused, node.args, before=node)[0])
        graph.erase_node(node)
    return graph


@pytest.mark.parametrize(("name", "count"), [("ffn_gelu_backward", 1), ("decoder_backward", 3)])
def test_reference_problems(name, count):
    graph = problem_graph(name)
    accumulate_pass(graph)
    aten = torch.ops.aten
    assert len(graph.find_nodes(op="call_function", target=add_matmul)) == count
    for op in (aten.addmm.default, aten.add.Tensor):
        assert not graph.find_nodes(op="call_function", target=op)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["Python", "C++"])
def test_a_gpu_copies_and_adds_nothing(cpp_wrapper, dtype):
    def fn(p, q, a, b, r, w):
        added = (p @ q).view(2, 48, 128) + (a @ b).view(2, 48, 128)
        return added, addmms(p, q, a, b, r, w), read_before(p, q, a, b, r, w)

    arguments = [t.repeat(16, 16).to("cuda", dtype) for t in draw()]
    before = [t.clone() for t in arguments]
    settings = passes.launching(Config(), backward=True) | {"cpp_wrapper": cpp_wrapper}
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, **settings), torch.no_grad():
        run = torch.compile(fn)
        got = run(*arguments)
        inputs = dict(zip(SHAPES, arguments, strict=True))
        names = [k.name for k in kernels(lambda given: run(*given.values()), inputs, got[0].device)]
    eager, oracle = fn(*before), fn(*(t.double() for t in before))
    for ours, theirs, right in zip(*map(pytree.tree_leaves, (got, eager, oracle)), strict=True):
        assert within(relative_l2(ours, right), budget(relative_l2(theirs, right), dtype))
    for now, was in zip(arguments, before, strict=True):
        assert torch.equal(now, was)
    assert not [n for n in names if "Memcpy" in n or "triton" in n], names
