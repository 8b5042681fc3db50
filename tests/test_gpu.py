"""What only a GPU shows: generated code that launches the kernels itself, and bf16 end to end."""

import copy

import pytest
import torch
from torch import nn

import fusedbwd
from fusedbwd import Config, export_backward
from fusedbwd.modules import DecoderLayer, GeluFFN, rope_tables
from fusedbwd.numerics import budget, relative_l2, within
from fusedbwd.problems import PROBLEMS
from fusedbwd.verify import verify

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["Python", "C++"])
def exported(request):
    """Both problems, small, exported with the wrapper of that language."""
    found = {}
    for name, problem in PROBLEMS.items():
        module = problem.build(device="cuda", **problem.small)
        config = Config(verify=True, cpp_wrapper=request.param == "C++")
        schema = problem.schema(module)
        found[name] = (module, export_backward(module, saved=schema, config=config))
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_small_cases(exported, name):
    problem, (module, bwd) = PROBLEMS[name], exported[name]
    checks = list(verify(problem, module, bwd, problem.small_cases, rounds=10))
    assert all(check.ok for check in checks), [g for c in checks for g in c.gradients if not g.ok]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_compiler_launches_our_kernels(exported, name):
    """No fused op is called back into; every one that fired is a kernel of the wrapper."""
    _, bwd = exported[name]
    (source, *_) = bwd.kernels()
    kernels = {"attention_backward": ("prepare_kernel", "query_kernel", "key_kernel")}
    for fusion in bwd.report.counts():
        assert all(k in source for k in kernels.get(fusion, (f"_{fusion}_kernel",)))
    assert "torch.ops.fusedbwd." not in source


@pytest.mark.parametrize("name", PROBLEMS)
def test_repeatable(exported, name):
    problem, (module, bwd) = PROBLEMS[name], exported[name]
    inputs = problem.inputs(module, 3, 33, seed=5)
    for first, second in zip(bwd(**inputs), bwd(**inputs), strict=True):
        assert torch.equal(first, second)


class LlamaLayer(nn.Module):
    """Hugging Face's layer, called with tensors alone."""

    def __init__(self, attention="sdpa"):
        super().__init__()
        llama = pytest.importorskip("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            attn_implementation=attention,
        )
        self.layer = llama.LlamaDecoderLayer(config, 0)

    def forward(self, x, cos, sin, mask=None):
        out = self.layer(x, attention_mask=mask, position_embeddings=(cos, sin))
        return out[0] if isinstance(out, tuple) else out


class NormMLP(nn.Module):
    """nn.RMSNorm, which stays one op on a GPU, before an MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.fc1, self.fc2 = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def encoder_layer():
    return nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, activation="gelu", batch_first=True)


def decoder_layer():
    return DecoderLayer(256, 8, 2, 32, 512, dtype=torch.float32)


MODELS = {
    "DecoderLayer": (decoder_layer, {"swiglu_backward": 1, "rms_norm_backward": 2}),
    "GeluFFN": (lambda: GeluFFN(256, 512), {"gelu_backward": 1, "layer_norm_backward": 1}),
    "LlamaDecoderLayer": (LlamaLayer, {"swiglu_backward": 1, "rms_norm_backward": 2}),
    "TransformerEncoderLayer": (encoder_layer, {"gelu_backward": 1, "layer_norm_backward": 2}),
    "nn.RMSNorm": (NormMLP, {"gelu_backward": 1, "rms_norm_backward": 1}),
}


def gradients(module, inputs, seed):
    module.zero_grad()
    x = inputs[0].detach().requires_grad_()
    out = module(x, *inputs[1:])
    generator = torch.Generator("cuda").manual_seed(seed)
    out.backward(torch.randn(out.shape, device="cuda", generator=generator).to(out.dtype))
    return {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def prepared(build, dtype):
    """The module, in float64 and compiled too; its norm weights are random."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = build().cuda().to(dtype)
    for name, parameter in eager.named_parameters():
        if "norm" in name and "weight" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=Config(verify=True))
    return eager, copy.deepcopy(eager).double(), compiled


def assert_as_eager(compiled, eager, exact, inputs, seed):
    dtype = inputs[0].dtype
    right = gradients(exact, [t.double() for t in inputs], seed)
    theirs = gradients(eager, inputs, seed)
    for key, grad in gradients(compiled, inputs, seed).items():
        allowed = budget(relative_l2(theirs[key], right[key]), dtype)
        error = relative_l2(grad, right[key])
        assert grad.dtype == theirs[key].dtype
        assert within(error, allowed), f"{key}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training(name, dtype):
    build, expected = MODELS[name]
    eager, exact, compiled = prepared(build, dtype)
    for seed, (batch, seq) in enumerate([(2, 128), (3, 65)]):
        x = torch.randn(batch, seq, 256, device="cuda").to(dtype)
        rope = name in ("DecoderLayer", "LlamaDecoderLayer")
        tables = rope_tables(batch, seq, 32, device="cuda", dtype=dtype) if rope else ()
        assert_as_eager(compiled, eager, exact, (x, *tables), seed)
    counts = fusedbwd.report(compiled).counts()
    assert {k: v / 2 for k, v in counts.items()} == expected, fusedbwd.report(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_eager_attention(dtype):
    """A softmax in float32, for static sizes and then for open ones."""
    eager, exact, compiled = prepared(lambda: LlamaLayer("eager"), dtype)
    for seed, (batch, seq) in enumerate([(2, 128), (3, 65)]):
        x = torch.randn(batch, seq, 256, device="cuda").to(dtype)
        mask = torch.full((seq, seq), torch.finfo(dtype).min, device="cuda").triu(1).to(dtype)
        tables = rope_tables(batch, seq, 32, device="cuda", dtype=dtype)
        assert_as_eager(compiled, eager, exact, (x, *tables, mask[None, None]), seed)
    counts = fusedbwd.report(compiled).counts()
    expected = {"swiglu_backward": 2, "rms_norm_backward": 4, "attention_backward": 2}
    assert counts == expected, fusedbwd.report(compiled)
