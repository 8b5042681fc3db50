"""What only a GPU shows: generated code that launches the kernels itself, and bf16 end to end."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from trained import SdpaLayer

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
        # These are too narrow for some fusions to pay.
        config = Config(verify=True, gate=False, cpp_wrapper=request.param == "C++")
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


@pytest.mark.parametrize("cpp_wrapper", [False, True], ids=["Python", "C++"])
def test_routes_by_token_count(cpp_wrapper):
    """A layer wide enough for the matmul tables: a variant for each range of tokens, and right
    in all, with the kernels' descriptors under either wrapper."""
    problem = PROBLEMS["decoder_backward"]
    dims = {"hidden_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    module = problem.build(device="cuda", **dims, intermediate_size=4096, seed=3)
    config = Config(verify=True, cpp_wrapper=cpp_wrapper)
    bwd = export_backward(module, saved=problem.schema(module), config=config)
    assert bwd.report.counts()["sum_matmul"] == 2, bwd.report
    checks = list(verify(problem, module, bwd, [(2, 160), (2, 640), (4, 1024)], rounds=2))
    assert all(check.ok for check in checks), [g for c in checks for g in c.gradients if not g.ok]
    assert len(set(bwd.variants)) >= 3, bwd.variants
    assert sum("_sum_matmul_kernel" in source for source in bwd.kernels()) >= 2


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


def sdpa_layer():
    return SdpaLayer(256, 8, 2, 32)


MODELS = {
    "DecoderLayer": (decoder_layer, {"swiglu_backward": 1, "rms_norm_backward": 2}),
    "GeluFFN": (lambda: GeluFFN(256, 512), {"gelu_backward": 1, "layer_norm_backward": 1}),
    "LlamaDecoderLayer": (
        LlamaLayer,
        {"rope_backward": 1, "swiglu_backward": 1, "rms_norm_backward": 2},
    ),
    "SDPA layer": (sdpa_layer, {"rope_backward": 1}),
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


def train(module, dtype, *, rope=False, masked=False, flavour=None):
    """Compiles and trains; asserts that gradients are as right as eager's.

    Returns:
        What was fused, over two graphs: one for the first size, one for any.
    """
    torch._dynamo.reset()
    eager = module.cuda().to(dtype)
    for name, parameter in eager.named_parameters():
        if "norm" in name and "weight" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    exact = copy.deepcopy(eager).double()
    config = Config(verify=True, gate=False)  # too narrow for some fusions to pay
    compiled = fusedbwd.compile(copy.deepcopy(eager), config=config)
    for seed, (batch, seq) in enumerate([(2, 128), (3, 65)]):
        inputs = [torch.randn(batch, seq, 256, device="cuda").to(dtype)]
        inputs += rope_tables(batch, seq, 32, device="cuda", dtype=dtype) if rope else ()
        if masked:
            mask = torch.full((seq, seq), torch.finfo(dtype).min, device="cuda").triu(1)
            inputs.append(mask.to(dtype)[None, None])
        right = gradients(exact, [t.double() for t in inputs], seed)
        with sdpa_kernel(flavour) if flavour else contextlib.nullcontext():
            theirs = gradients(eager, inputs, seed)
            ours = gradients(compiled, inputs, seed)
        for name, grad in ours.items():
            allowed = budget(relative_l2(theirs[name], right[name]), dtype)
            error = relative_l2(grad, right[name])
            assert grad.dtype == theirs[name].dtype
            assert within(error, allowed), f"{name}: {error:.2e}, allowed {allowed:.2e}"
    return fusedbwd.report(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training(name, dtype):
    torch.manual_seed(0)
    make, expected = MODELS[name]
    rope = name in ("DecoderLayer", "LlamaDecoderLayer", "SDPA layer")
    report = train(make(), dtype, rope=rope)
    counts = report.counts()
    if name == "DecoderLayer" and dtype == torch.bfloat16:
        expected = expected | {"attention_backward": 1}
    if name == "LlamaDecoderLayer" and dtype == torch.float32:
        # Its enable_gqa has no fused flavour in float32, and the math flavour no backward op.
        expected = {k: v for k, v in expected.items() if k != "rope_backward"}
    assert {k: v / 2 for k, v in counts.items()} == expected, report


@pytest.mark.parametrize(
    "flavour",
    [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ],
    ids=lambda flavour: flavour.name,
)
def test_rope_around_every_flavour(flavour):
    torch.manual_seed(0)
    report = train(sdpa_layer(), torch.bfloat16, rope=True, flavour=flavour)
    assert report.counts() == {"rope_backward": 2}, report
    anchors = {fired.anchor for fired in report.fired}
    name = flavour.name.lower()
    assert all(name in anchor for anchor in anchors), anchors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_eager_attention(dtype):
    """Hugging Face's softmax in float32, for static sizes and then for open ones."""
    torch.manual_seed(0)
    report = train(LlamaLayer("eager"), dtype, rope=True, masked=True)
    expected = {"swiglu_backward": 2, "rms_norm_backward": 4, "attention_backward": 2}
    assert report.counts() == expected, report
