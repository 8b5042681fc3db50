"""fusedbwd.compile: gradients as eager's, and nothing else changed."""

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusedbwd
from fusedbwd import Config, FusionError, UnsupportedError, VerificationError
from fusedbwd.modules import DecoderLayer, GeluFFN, rope_tables
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.patterns import PATTERNS

ROOT = Path(__file__).parents[1]
HIDDEN, HEAD_DIM = 48, 8
OFF = {pattern.name: False for pattern in PATTERNS}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class LlamaLayer(nn.Module):
    """Hugging Face's layer, called with tensors alone."""

    def __init__(self):
        super().__init__()
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            attn_implementation="sdpa",
        )
        self.layer = llama.LlamaDecoderLayer(config, 0)

    def forward(self, x, cos, sin):
        out = self.layer(x, position_embeddings=(cos, sin))
        return out[0] if isinstance(out, tuple) else out


class TinyBlock(nn.Module):
    """Pre-norm GELU feed-forward: small, and quick to compile."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


TINY_COUNTS = {"gelu_backward": 1, "layer_norm_backward": 1}


def decoder_layer():
    return DecoderLayer(HIDDEN, 6, 2, HEAD_DIM, 80, dtype=torch.float32)


def encoder_layer():
    return nn.TransformerEncoderLayer(HIDDEN, 6, 80, 0.0, activation="gelu", batch_first=True)


MODELS = {
    "DecoderLayer": (
        decoder_layer,
        torch.bfloat16,
        {"swiglu_backward": 1, "rms_norm_backward": 2},
    ),
    "GeluFFN": (
        lambda: GeluFFN(HIDDEN, 80),
        torch.float32,
        {"gelu_backward": 1, "layer_norm_backward": 1},
    ),
    "LlamaDecoderLayer": (
        LlamaLayer,
        torch.bfloat16,
        {"swiglu_backward": 1, "rms_norm_backward": 2},
    ),
    "TransformerEncoderLayer": (
        encoder_layer,
        torch.float32,
        {"gelu_backward": 1, "layer_norm_backward": 2},
    ),
}


def make(build, dtype=torch.float32, seed=0):
    """A module with random norm weights and biases."""
    torch.manual_seed(seed)
    module = build().to(dtype)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, float("norm" in name or "ln" in name), 0.3)
    return module


def arguments(module, batch, seq, dtype):
    x = torch.randn(batch, seq, HIDDEN).to(dtype)
    rope = isinstance(module, (DecoderLayer, LlamaLayer))
    return (x, *rope_tables(batch, seq, HEAD_DIM, dtype=dtype)) if rope else (x,)


def gradients(module, inputs, seed, with_input=True):
    """By name; of the parameters that require grad, and of the first input."""
    module.zero_grad(set_to_none=True)
    x = inputs[0].detach().requires_grad_(with_input)
    out = module(x, *inputs[1:])
    generator = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_as_eager(compiled, eager, batch, seq, dtype=torch.float32, rounds=4, **options):
    """Over several rounds together, because small gradients are matters of luck."""
    exact = copy.deepcopy(eager).double()
    torch.manual_seed(1000 * batch + seq)
    found = {}
    for seed in range(rounds):
        inputs = arguments(eager, batch, seq, dtype)
        right = gradients(exact, [t.double() for t in inputs], seed, **options)
        theirs = gradients(eager, inputs, seed, **options)
        ours = gradients(compiled, inputs, seed, **options)
        for name, grad in ours.items():
            assert (grad is None) == (theirs[name] is None), name
            if grad is not None:
                assert grad.dtype == theirs[name].dtype, name
                found.setdefault(name, []).append((grad, theirs[name], right[name]))
    for name, all_rounds in found.items():
        grad, eager_grad, expected = (torch.stack(t) for t in zip(*all_rounds, strict=True))
        error = relative_l2(grad, expected)
        allowed = budget(relative_l2(eager_grad, expected), dtype)
        assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    """First for one size, then for any. Few rows: over many, the CPU code that Inductor
    writes for column sums is several times less exact than eager's."""
    build, dtype, counts = MODELS[name]
    eager = make(build, dtype)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    for batch, seq in [(2, 17), (3, 9), (5, 7)]:
        assert_as_eager(compiled, eager, batch, seq, dtype, rounds=8)
    report = fusedbwd.report(compiled)
    assert report.counts() == {k: 2 * v for k, v in counts.items()}, report  # static, dynamic


@pytest.fixture(scope="module")
def tiny():
    return make(TinyBlock)


def compiled_tiny(tiny, **options):
    return fusedbwd.compile(copy.deepcopy(tiny), config=Config(**options))


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
    for module in (eager, compiled):
        module.get_parameter(frozen[0]).requires_grad_()
    assert_as_eager(compiled, eager, 2, 17)  # compiled again, for the parameter thawed


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


def test_autocast(tiny):
    """Dtypes are eager's, and gradients no worse."""
    compiled, eager = compiled_tiny(tiny, verify=True), copy.deepcopy(tiny)
    x = torch.randn(2, 17, HIDDEN)
    right = gradients(copy.deepcopy(tiny).double(), [x.double()], 0)
    found = []
    for module in (compiled, eager):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(leaf)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        out.backward(grad.to(out.dtype))
        grads = {n: p.grad for n, p in module.named_parameters()}
        found.append({"out": out, "input": leaf.grad, **grads})
    for name, ours in found[0].items():
        theirs = found[1][name]
        assert ours.dtype == theirs.dtype, name
        if name != "out":
            error = relative_l2(ours, right[name])
            assert within(error, 1.2 * relative_l2(theirs, right[name])), name


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


# --- the module stays what it was


def test_module_is_the_same(tiny):
    module = copy.deepcopy(tiny)
    keys, parameters = list(module.state_dict()), list(module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert fusedbwd.compile(module) is module
    assert type(module) is TinyBlock
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    before = module.fc1.weight.clone()
    module(torch.randn(2, 5, HIDDEN)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.fc1.weight, before)
    module.load_state_dict(tiny.state_dict(), strict=True)
    tiny.load_state_dict(module.state_dict(), strict=True)


def test_copies_are_not_compiled(tiny):
    module = compiled_tiny(tiny)
    module(torch.randn(2, 5, HIDDEN)).sum().backward()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not torch.equal(module.fc1.weight, other.fc1.weight)
        x = torch.randn(2, 5, HIDDEN)
        torch.testing.assert_close(other(x), x)
        with pytest.raises(UnsupportedError, match="TinyBlock was not compiled"):
            fusedbwd.report(other)


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


# --- settings and passes that are not ours


def settings():
    configs = (inductor_config, functorch_config, torch._dynamo.config)
    return [dict(config.get_config_copy()) for config in configs]


def test_compiling_leaves_all_settings(tiny):
    before = settings()
    compiled_tiny(tiny, verify=True)(torch.randn(2, 5, HIDDEN)).sum().backward()
    assert settings() == before


def test_an_error_leaves_all_settings(tiny, monkeypatch):
    class Mine(Exception):
        pass

    def fail(graph, config):
        raise Mine

    before = settings()
    monkeypatch.setattr(fusedbwd.training, "fuse", fail)
    x = torch.randn(2, 5, HIDDEN)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        compiled_tiny(tiny)(x)
    assert isinstance(error.value.inner_exception, Mine)
    assert settings() == before
    torch.testing.assert_close(torch.compile(copy.deepcopy(tiny))(x), tiny(x))


IMPORT = """
import json, torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
import torch._dynamo, torch._inductor.compile_fx, torch._inductor.pattern_matcher
from torch._inductor.decomposition import select_decomp_table

def snapshot():
    configs = (inductor_config, functorch_config, torch._dynamo.config)
    return (
        [{k: repr(v) for k, v in c.get_config_copy().items()} for c in configs],
        len(select_decomp_table()),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.get_rng_state().tolist(), nn.Module.__call__, nn.Module.compile, torch.compile,
    )

before = snapshot()
import fusedbwd, fusedbwd.inspection, fusedbwd.verify, fusedbwd.bench
print(json.dumps(snapshot() == before))
"""


def test_importing_changes_nothing():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) is True


class Recorder(CustomGraphPass):
    """A user's pass: notes the fused ops that it sees."""

    def __init__(self, identity="recorder"):
        self.identity = identity
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(n.target) for n in graph.nodes if "fusedbwd" in str(n.target)])

    def uuid(self):
        return self.identity


def test_the_users_passes_go_on_running(tiny):
    joint, post, before_post = Recorder("joint"), Recorder("post"), Recorder(None)
    with inductor_config.patch(
        joint_custom_pre_pass=joint,
        post_grad_custom_post_pass=post,
        post_grad_custom_pre_pass=before_post,
    ):
        compiled = compiled_tiny(tiny)
        assert_as_eager(compiled, tiny, 2, 5)
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS
    assert joint.seen == [[]]  # it runs before ours
    for recorder in (post, before_post):
        assert len(recorder.seen) == 2  # forward and backward
        assert not recorder.seen[0] and len(recorder.seen[1]) == 2


def test_a_users_pass_that_is_a_function(tiny):
    seen = []
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: seen.append(graph)):
        compiled = compiled_tiny(tiny)
        assert_as_eager(compiled, tiny, 2, 5)
    assert len(seen) == 2
    assert fusedbwd.report(compiled).counts() == TINY_COUNTS


def test_plain_torch_compile_in_between(tiny):
    recorder = Recorder()
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    fused = compiled_tiny(tiny)
    fused(x).sum().backward()
    with inductor_config.patch(post_grad_custom_post_pass=recorder):
        plain = torch.compile(copy.deepcopy(tiny))
        plain(x).sum().backward()
    assert recorder.seen == [[], []]
    again = compiled_tiny(tiny)
    again(x).sum().backward()
    for module in (fused, again):
        assert fusedbwd.report(module).counts() == TINY_COUNTS
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
