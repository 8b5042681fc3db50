"""What limits fusion is said: a warning once, with the way out, and a line of the report."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from trained import HIDDEN, TINY_COUNTS, TinyBlock, assert_as_eager, compiled_tiny

import fusedbwd
from fusedbwd import FusedBwdWarning, SchemaError, UnsupportedError, compat, limits


@pytest.fixture(autouse=True)
def graphs_as_they_are(fresh_dynamo, monkeypatch):
    """No code is generated, which takes its time: the graphs are run as they are."""
    monkeypatch.setattr(
        fusedbwd.training, "compile_fx_inner", lambda gm, inputs, **_: make_boxed_func(gm.forward)
    )


def call(module, *shape, dtype=torch.float32):
    """Runs ``module`` forward and backward; the messages of our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(
            torch.randn(shape or (2, 5, HIDDEN)).to(dtype).requires_grad_()
        ).abs().sum().backward()
    return [str(w.message) for w in caught if w.category is FusedBwdWarning]


def notes(module):
    return fusedbwd.report(module).notes


# --- the recompile limit


def test_recompile_limit(tiny):
    """Right past the limit; said once, in the call that reached it."""
    compiled = fusedbwd.compile(copy.deepcopy(tiny), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        said = [call(compiled, 2, seq, HIDDEN) for seq in range(3, 8)]
        assert [len(messages) for messages in said] == [0, 0, 1, 0, 0]
        assert_as_eager(compiled, tiny, 2, 9)
    (message,) = said[2]
    assert message == f"TinyBlock: {limits.RECOMPILE_LIMIT}"
    for way_out in ("dynamic=True", "mark_dynamic", "torch._dynamo.config.recompile_limit"):
        assert way_out in message
    assert notes(compiled) == ["2 graphs compiled", limits.RECOMPILE_LIMIT]
    assert f"note: {limits.RECOMPILE_LIMIT}" in str(fusedbwd.report(compiled))


@pytest.mark.parametrize("way_out", ["dynamic=True", "mark_dynamic", "a higher limit"])
def test_ways_out_of_the_recompile_limit(tiny, way_out):
    compiled = fusedbwd.compile(
        copy.deepcopy(tiny), dynamic=True if way_out == "dynamic=True" else None
    )
    lengths = range(3, 6)
    limit = len(lengths) if way_out == "a higher limit" else 2
    with (
        torch._dynamo.config.patch(recompile_limit=limit, automatic_dynamic_shapes=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", FusedBwdWarning)
        for seq in lengths:
            x = torch.randn(2, seq, HIDDEN, requires_grad=True)
            if way_out == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 1)
            compiled(x).sum().backward()
    expected = "3 graphs compiled" if way_out == "a higher limit" else "1 graph compiled"
    assert notes(compiled) == [expected]


def test_layers_of_one_class_share_a_compilation(tiny):
    """So a deep model, compiled layer by layer, does not use up the limit."""
    with torch._dynamo.config.patch(recompile_limit=2):
        model = nn.Sequential(*[compiled_tiny(tiny) for _ in range(3)])
        assert call(model) == []
        assert_as_eager(model, nn.Sequential(*[copy.deepcopy(tiny) for _ in range(3)]), 2, 5)
    assert fusedbwd.report(model).counts() == {name: 3 for name in TINY_COUNTS}
    assert notes(model) == ["1 graph compiled"]


class Indexed(TinyBlock):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        return super().forward(x) * self.index


def test_the_recompile_limit_of_a_class():
    """Every module that runs as eager for it says so, not the first alone; and no other."""
    layers = [fusedbwd.compile(Indexed(index)) for index in (2, 3, 4, 5, 6)]
    with torch._dynamo.config.patch(recompile_limit=2):
        said = [call(layer) for layer in layers]
        assert said == [[], [], *[[f"Indexed: {limits.RECOMPILE_LIMIT}"]] * 3]
        assert all(call(layer) == [] for layer in layers)
        alike = fusedbwd.compile(Indexed(2))  # a graph fits it
        assert call(alike) == [] and notes(alike) == ["1 graph compiled"]
        other = fusedbwd.compile(Indexed(9))
        with torch.compiler.set_stance("force_eager"):
            assert call(other) == []
        assert len(call(other)) == 1
    for layer in layers[:2]:
        assert notes(layer) == ["1 graph compiled"]
    for layer in (*layers[2:], other):
        nothing, limit = notes(layer)
        assert "past the recompile limit" in nothing and limit == limits.RECOMPILE_LIMIT
    torch._dynamo.reset()
    again = fusedbwd.compile(Indexed(7))
    assert call(again) == [] and notes(again) == ["1 graph compiled"]
    traced = fusedbwd.compile(Indexed(8))
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", FusedBwdWarning)
        make_fx(traced)(torch.randn(2, 5, HIDDEN))  # which is no call that Dynamo compiles


# --- graph breaks


class Broken(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.first, self.second, self.breaks = TinyBlock(), TinyBlock(), breaks

    def forward(self, x):
        x = self.first(x)
        if self.breaks == "data" and x.sum() > 1e9:
            x = x + 1
        if self.breaks == "twice":
            print(end="")
            x = x * 2
            print(end="")
        for _ in range(2 if self.breaks == "loop" else 0):
            x = self.first(x)
            print(end="")
        return self.second(x)


@pytest.mark.parametrize(
    ("breaks", "places", "why"),
    [("data", 1, "Data-dependent branching"), ("twice", 2, "builtin"), ("loop", 1, "builtin")],
)
def test_graph_breaks(breaks, places, why):
    eager = Broken(breaks)
    compiled = fusedbwd.compile(copy.deepcopy(eager))
    (message,) = call(compiled)
    assert message.startswith("Broken: compiled in pieces") and "fullgraph=True" in message
    assert call(compiled) == []  # once
    graphs, *found = notes(compiled)
    # A loop with a break is run as eager, and each block in it is a graph, the same for all.
    assert int(graphs.split()[0]) >= (1 if breaks == "loop" else 2)
    assert len(found) == places
    for note in found:
        place = "in a loop" if breaks == "loop" else f"at {__file__}:"
        assert note.startswith(f"graph break {place}") and why in note and note in message
    assert_as_eager(compiled, eager, 2, 5, rounds=2)


class Fails(nn.Module):
    def forward(self, x):
        x = x * 2
        print(end="")
        raise LookupError("of its own")


def test_an_error_of_the_forward_comes_before_a_warning_made_one():
    module = fusedbwd.compile(Fails())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedBwdWarning)
        with pytest.raises(LookupError, match="of its own"):
            module(torch.ones(3, requires_grad=True))
    assert any(note.startswith("graph break at") for note in notes(module))


# --- dtypes


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (torch.float64, "float64 gradients: fused ops run as plain PyTorch, no kernel takes them"),
        (torch.complex64, "complex64 gradients: left to Inductor, no fusion takes them"),
    ],
)
def test_dtypes_that_no_kernel_takes(tiny, dtype, note):
    """Right all the same, and noted."""
    eager = copy.deepcopy(tiny) if dtype.is_floating_point else nn.Linear(HIDDEN, HIDDEN)
    eager = eager.to(dtype)
    compiled = fusedbwd.compile(copy.deepcopy(eager))
    assert call(compiled, dtype=dtype) == []
    assert notes(compiled) == ["1 graph compiled", note]
    x = torch.randn(2, 5, HIDDEN).to(dtype)
    for module in (compiled, eager):
        module.zero_grad()
        module(x.clone().requires_grad_()).abs().sum().backward()
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_that_kernels_take(tiny, dtype):
    compiled = fusedbwd.compile(copy.deepcopy(tiny).to(dtype))
    assert call(compiled, dtype=dtype) == []
    assert notes(compiled) == ["1 graph compiled"]


def test_integers_are_no_gradients():
    model = fusedbwd.compile(nn.Sequential(nn.Embedding(10, HIDDEN), TinyBlock()))
    model(torch.randint(0, 10, (2, 5))).sum().backward()
    assert notes(model) == ["1 graph compiled"]


# --- nothing compiled


def test_what_is_not_compiled_is_said(tiny):
    compiled = compiled_tiny(tiny)
    (note,) = notes(compiled)
    assert note.startswith("nothing is compiled: there was no call")
    with torch.compiler.set_stance("force_eager"):
        call(compiled)
    assert notes(compiled) == [note]


def test_a_compiled_part_of_a_compiled_module(tiny):
    """The whole is what is compiled, in one graph, and has the report."""
    part = compiled_tiny(tiny)
    whole = fusedbwd.compile(nn.Sequential(part, copy.deepcopy(tiny)), fullgraph=True)
    assert call(whole) == []
    assert notes(part)[0].startswith("nothing is compiled")
    assert fusedbwd.report(whole).counts() == {name: 2 for name in TINY_COUNTS}


def test_a_compiled_part_of_a_plain_torch_compile(tiny):
    """Its fusions are lost, and that is said, once; from torch 2.14 on, where Dynamo does not come
    by the call that it replaces, in the report alone."""
    part = compiled_tiny(tiny)
    whole = nn.Sequential(part, copy.deepcopy(tiny))
    whole.compile(backend="aot_eager", fullgraph=True)
    said = [] if torch.__version__ >= (2, 14) else [limits.TRACED_BY_OTHERS]
    assert call(whole) == [f"TinyBlock: {warning}" for warning in said]
    assert call(whole) == []
    assert notes(part)[0].startswith("nothing is compiled") and notes(part)[1:] == said
    assert_as_eager(whole, nn.Sequential(copy.deepcopy(tiny), copy.deepcopy(tiny)), 2, 5)
    # On its own it goes on being fused.
    assert call(part) == []
    assert fusedbwd.report(part).counts() == TINY_COUNTS


# --- whose record it is


class Equal(TinyBlock):
    """Modules that are equal, as those of dataclasses may be."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


def test_modules_that_are_equal():
    """Each has a record of its own, which its end alone ends."""
    first, second = (fusedbwd.compile(Equal()) for _ in range(2))
    call(second)
    assert notes(first)[0].startswith("nothing is compiled")
    assert notes(second) == ["1 graph compiled"]
    with pytest.raises(UnsupportedError, match="Equal was not compiled"):
        fusedbwd.report(Equal())
    del first
    gc.collect()
    assert notes(second) == ["1 graph compiled"]


def test_a_module_that_is_deleted(tiny):
    """Nothing keeps it, nor its parameters, while others go on with what was compiled for it."""
    first, second = compiled_tiny(tiny), compiled_tiny(tiny)
    call(first)
    call(second)
    gone = [weakref.ref(first), weakref.ref(first.fc1.weight)]
    del first
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert call(second) == [] and notes(second) == ["1 graph compiled"]


# --- versions


@pytest.fixture
def version(monkeypatch):
    def set_version(version):
        monkeypatch.setattr(torch, "__version__", version)
        limits.warn_if_untested.cache_clear()

    yield set_version
    limits.warn_if_untested.cache_clear()


@pytest.mark.parametrize("untested", ["2.10.1", "2.15.0a0+git123", "3.0.0"])
def test_an_untested_torch(version, tiny, untested):
    version(untested)
    with pytest.warns(FusedBwdWarning, match=r"is untested: .* torch 2\.11 to 2\.14") as caught:
        for _ in range(2):
            compiled_tiny(tiny)
    ours = [w for w in caught if w.category is FusedBwdWarning]
    assert len(ours) == 1 and f"torch {untested}" in str(ours[0].message)
    assert ours[0].filename.endswith("trained.py")  # where compile was called


def test_an_export_with_an_untested_torch(version):
    version("2.15.0")
    with (
        pytest.warns(FusedBwdWarning, match=r"torch 2\.15\.0 is untested"),
        pytest.raises(SchemaError),
    ):
        fusedbwd.export_backward(nn.Linear(2, 2))  # for want of a schema


@pytest.mark.parametrize("tested", ["2.11.0+cu130", "2.12.1", "2.14.1"])
def test_a_tested_torch(version, tiny, tested):
    version(tested)
    assert compat.tested()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedBwdWarning)
        compiled_tiny(tiny)
