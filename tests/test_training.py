"""fusedbwd.compile: gradients as eager's, reports, and configuration."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from trained import (
    HEAD_DIM,
    HIDDEN,
    OFF,
    TINY_COUNTS,
    LlamaLayer,
    SdpaLayer,
    TinyBlock,
    arguments,
    assert_as_eager,
    compiled_tiny,
    gradients,
    make,
    saved_bytes,
)

import fusedbwd
from fusedbwd import Config, FusionError, UnsupportedError, VerificationError
from fusedbwd.modules import DecoderLayer, GeluFFN
from fusedbwd.numerics import relative_l2, within

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def decoder_layer():
    return DecoderLayer(HIDDEN, 6, 2, HEAD_DIM, 80, dtype=torch.float32)


def encoder_layer():
    return nn.TransformerEncoderLayer(HIDDEN, 6, 80, 0.0, activation="gelu", batch_first=True)


MODELS = {
    "DecoderLayer": (
        decoder_layer,
        torch.bfloat16,
        {
            "attention_backward": 1,
            "swiglu_backward": 1,
            "rms_norm_backward": 2,
            "matmul_swiglu_backward": 1,
            "sum_matmul": 2,
        },
    ),
    "GeluFFN": (
        lambda: GeluFFN(HIDDEN, 80),
        torch.float32,
        {"gelu_backward": 1, "layer_norm_backward": 1},
    ),
    "LlamaDecoderLayer": (
        LlamaLayer,
        torch.bfloat16,
        {
            "rope_backward": 1,
            "swiglu_backward": 1,
            "rms_norm_backward": 2,
            "matmul_swiglu_backward": 1,
            "sum_matmul": 2,
        },
    ),
    "SDPA layer": (SdpaLayer, torch.float32, {"rope_backward": 1}),
    "TransformerEncoderLayer": (
        encoder_layer,
        torch.float32,
        {"gelu_backward": 1, "layer_norm_backward": 2},
    ),
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("DecoderLayer", None),
        ("GeluFFN", None),
        ("LlamaDecoderLayer", True),
        ("SDPA layer", None),
        ("TransformerEncoderLayer", True),
    ],
)
def test_gradients(name, dynamic):
    """First for one size and then for any, or for any at once. Few rows: over many, the CPU
    code that Inductor writes for column sums is several times less exact than eager's."""
    build, dtype, counts = MODELS[name]
    eager = make(build, dtype)
    compiled = copy.deepcopy(eager)
    fusedbwd.compile(compiled, dynamic=dynamic, config=Config(verify=True))
    for batch, seq in [(2, 17), (3, 9), (5, 7)]:
        assert_as_eager(compiled, eager, batch, seq, dtype, rounds=8)
    graphs = 1 if dynamic else 2
    report = fusedbwd.report(compiled)
    assert report.counts() == {k: graphs * v for k, v in counts.items()}, report


EAGER_COUNTS = MODELS["DecoderLayer"][2]


def causal_mask(seq, dtype):
    return torch.full((seq, seq), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


def test_eager_attention():
    """Hugging Face's own spelling: a softmax in float32, rounded."""
    dtype, mask = torch.bfloat16, causal_mask(17, torch.bfloat16)
    eager = make(lambda: LlamaLayer("Llama", "eager"), dtype)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_as_eager(compiled, eager, 2, 17, dtype, rounds=8, mask=mask)
    assert fusedbwd.report(compiled).counts() == EAGER_COUNTS, fusedbwd.report(compiled)


@pytest.mark.parametrize("model", ["Llama", "Qwen2", "Mistral"])
def test_eager_attention_saves_no_more(model, monkeypatch):
    """Fused, the backward reads the float32 softmax, and its rounding is not saved beside it."""
    # Only the partitioned graphs matter: they are run, not compiled.
    monkeypatch.setattr(
        fusedbwd.training, "compile_fx_inner", lambda gm, inputs, **_: make_boxed_func(gm.forward)
    )
    eager = make(lambda: LlamaLayer(model, "eager"), torch.bfloat16)
    (x, *tables), mask = arguments(eager, 2, 64, torch.bfloat16), causal_mask(64, torch.bfloat16)
    saved = []
    for fused in (True, False):
        config = Config(verify=True, attention_backward=fused)
        compiled = fusedbwd.compile(copy.deepcopy(eager), config=config)
        saved.append(saved_bytes(compiled, x.requires_grad_(), *tables, mask))
        expected = {k: v for k, v in EAGER_COUNTS.items() if fused or k != "attention_backward"}
        assert fusedbwd.report(compiled).counts() == expected, fusedbwd.report(compiled)
    assert saved[0] <= saved[1]


def test_dynamic_from_the_start(tiny):
    compiled = fusedbwd.compile(copy.deepcopy(tiny), dynamic=True, config=Config(verify=True))
    for batch, seq in [(2, 17), (3, 5), (1, 9), (4, 1)]:
        assert_as_eager(compiled, tiny, batch, seq)
    assert fusedbwd.report(compiled).counts()["layer_norm_backward"] <= 3  # apart for size 1


FROZEN = {
    "norm": (["norm.weight", "norm.bias"], TINY_COUNTS),
    "norm weight": (["norm.weight"], TINY_COUNTS),
    "first bias": (["fc1.bias"], {"layer_norm_backward": 1}),
    "all but the last": (
        ["norm.weight", "norm.bias", "fc1.weight", "fc1.bias"],
        {"layer_norm_backward": 1},
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parameters(tiny, name):
    frozen, counts = FROZEN[name]
    eager = copy.deepcopy(tiny)
    for key in frozen:
        eager.get_parameter(key).requires_grad_(False)
    compiled = compiled_tiny(eager, verify=True)
    assert_as_eager(compiled, eager, 2, 17)
    assert fusedbwd.report(compiled).counts() == counts


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch.compile itself does not notice")
def test_thawed_parameter(tiny):
    eager = copy.deepcopy(tiny)
    eager.norm.weight.requires_grad_(False)
    compiled = compiled_tiny(eager, verify=True)
    for _ in range(2):
        assert_as_eager(compiled, eager, 2, 17)
        for module in (eager, compiled):
            module.norm.weight.requires_grad_()
    assert fusedbwd.report(compiled).counts() == {k: 2 for k in TINY_COUNTS}


def test_input_without_gradient(tiny):
    compiled = compiled_tiny(tiny, verify=True)
    assert_as_eager(compiled, tiny, 2, 17, with_input=False)
    assert fusedbwd.report(compiled).counts() == {"gelu_backward": 1}


def test_expanded_gradient(tiny):
    """``out.sum().backward()`` gives a gradient of stride 0."""
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    compiled = compiled_tiny(tiny)
    for module in (compiled, tiny):
        module.zero_grad()
        module(x).sum().backward()
    for ours, theirs in zip(compiled.parameters(), tiny.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_gradients_accumulate(tiny):
    compiled, eager = compiled_tiny(tiny), copy.deepcopy(tiny)
    torch.manual_seed(3)
    batches = torch.randn(4, 2, 5, HIDDEN)
    for module in (compiled, eager):
        module.zero_grad()
        for x in batches:
            module(x).square().sum().backward()
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_intermediate_used_elsewhere():
    class SwiGLU(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Parameter(torch.randn(HIDDEN, 6))

        def forward(self, g, u):
            a = F.silu(g) * u
            return a @ self.down, a

    eager = SwiGLU()
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    g, u = torch.randn(2, 5, HIDDEN, requires_grad=True).unbind(0)
    results = []
    for module in (compiled, eager):
        y, a = module(g, u)
        loss = y.sum() + (a**3).sum()
        results.append(torch.autograd.grad(loss, (g, u, module.down)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report = fusedbwd.report(compiled)
    assert report.fired or report.missed


def test_one_weight_for_two_norms():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            for _ in range(2):
                x = x + self.linear(self.norm(x))
            return x

    eager = make(Shared)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    assert_as_eager(compiled, eager, 2, 17)
    assert fusedbwd.report(compiled).counts() == {"rms_norm_backward": 2}


AUTOCAST = torch.autocast("cpu", torch.bfloat16)


def test_autocast(tiny):
    """Dtypes are eager's, and gradients no worse, over several rounds together."""
    compiled, eager = compiled_tiny(tiny, verify=True), copy.deepcopy(tiny)
    exact = copy.deepcopy(tiny).double()
    torch.manual_seed(0)
    rounds = []
    for seed in range(8):
        x = torch.randn(2, 17, HIDDEN)
        found = [gradients(m, [x], seed, forward=AUTOCAST) for m in (compiled, eager)]
        rounds.append((*found, gradients(exact, [x.double()], seed)))
    with AUTOCAST:
        assert compiled(x.requires_grad_()).dtype == eager(x).dtype
    for name in rounds[0][0]:
        drawn = [[grads[name] for grads in of_round] for of_round in rounds]
        assert all(ours.dtype == theirs.dtype for ours, theirs, _ in drawn), name
        ours, theirs, right = (torch.stack(t) for t in zip(*drawn, strict=True))
        error, allowed = relative_l2(ours, right), 1.2 * relative_l2(theirs, right)
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"


def test_inference(tiny):
    compiled = compiled_tiny(tiny, strict=True)
    x = torch.randn(2, 5, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), tiny(x))
    assert not fusedbwd.report(compiled).fired
    assert_as_eager(compiled, tiny, 2, 5)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def test_graph_breaks():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = TinyBlock(), TinyBlock()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    eager = make(Broken)
    compiled = fusedbwd.compile(copy.deepcopy(eager))
    assert_as_eager(compiled, eager, 2, 5)
    assert fusedbwd.report(compiled).counts() == {k: 2 for k in TINY_COUNTS}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fusedbwd.compile(copy.deepcopy(eager), fullgraph=True)(torch.randn(2, 5, HIDDEN))


# --- report and configuration


def test_report_before_compilation(tiny):
    with pytest.raises(UnsupportedError, match="TinyBlock was not compiled"):
        fusedbwd.report(tiny)
    assert fusedbwd.report(compiled_tiny(tiny)).counts() == {}
    with pytest.raises(UnsupportedError, match=r"takes an nn.Module, got function"):
        fusedbwd.compile(lambda x: x)


def test_report_of_compiled_submodules(tiny):
    model = nn.Sequential(compiled_tiny(tiny), nn.ReLU(), compiled_tiny(tiny))
    model(torch.randn(2, 5, HIDDEN, requires_grad=True)).sum().backward()
    assert fusedbwd.report(model).counts() == {k: 2 for k in TINY_COUNTS}
    text = str(fusedbwd.report(model))
    assert "gelu_backward x2" in text and "layer_norm_backward x2" in text


def test_switches(tiny):
    for switch in TINY_COUNTS:
        compiled = compiled_tiny(tiny, **{switch: False})
        assert_as_eager(compiled, tiny, 2, 5)
        assert fusedbwd.report(compiled).counts() == {k: 1 for k in TINY_COUNTS if k != switch}
        assert fusedbwd.report(compiled).switched_off == [switch]


def test_models_do_not_affect_each_other(tiny):
    fused, plain = compiled_tiny(tiny), compiled_tiny(tiny, **OFF)
    for batch in (2, 3):
        for module in (fused, plain):
            assert_as_eager(module, tiny, batch, 5)
    assert set(fusedbwd.report(fused).counts()) == set(TINY_COUNTS)
    assert fusedbwd.report(plain).counts() == {}


def test_strict(tiny):
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    with pytest.raises(FusionError, match="nothing was fused"):
        fusedbwd.compile(nn.Linear(HIDDEN, 8), config=Config(strict=True))(x)
    with pytest.raises(FusionError, match="nothing was fused"):
        compiled_tiny(tiny, strict=True, **OFF)(x)
    compiled_tiny(tiny, strict=True)(x).sum().backward()


def test_verify_finds_a_wrong_rewrite(tiny, monkeypatch):
    from fusedbwd.patterns import gelu_backward as pattern

    right = pattern.gelu_backward
    wrong = {"tanh": "none", "none": "tanh"}
    monkeypatch.setattr(pattern, "gelu_backward", lambda g, x, a: right(g, x, wrong[a]))
    x = torch.randn(2, 5, HIDDEN)
    with pytest.raises(VerificationError, match=r"gelu_backward: .* differs from what it replaces"):
        compiled_tiny(tiny, verify=True)(x)
    compiled_tiny(tiny)(x)  # not asked to look


def test_verification_leaves_random_numbers_alone(tiny):
    x = torch.randn(2, 5, HIDDEN)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    compiled_tiny(tiny, verify=True)(x)
    assert torch.equal(torch.rand(3), expected)
