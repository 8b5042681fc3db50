"""What inspection shows: fusions, the calls of the generated backward, sources, resources."""

import json
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, uninterpreted
from torch import nn

from fusedbwd import UnsupportedError
from fusedbwd.inspection import inspect_module, inspect_problem
from fusedbwd.precision import MEDIUM, matmul_precision
from fusedbwd.wrapper import Kernel, read_calls, read_kernels

# The forms that Inductor's Python wrapper takes on a GPU, cut down.
GPU_WRAPPER = """
aten = torch.ops.aten
async_compile = AsyncCompile()
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda

triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
@triton_heuristics.pointwise(size_hints={'x': 1024})
def triton_poi_fused_add_0(in_ptr0): pass
''', device_str='cuda')

_swiglu_backward_kernel_0 = async_compile.triton('_swiglu_backward_kernel', '''
@triton_heuristics.user_autotune(configs=[])
def _swiglu_backward_kernel(grad_ptr): pass
''', device_str='cuda')

mine_0 = async_compile.triton('mine', '''
@triton_heuristics.user_autotune(configs=[])
def mine(ptr): pass
''', device_str='cuda')

async_compile.wait(globals())

def partition_0(args):
    extern_kernels.addmm(bias, a, b, out=buf0)

class Runner:
    def call(self, args):
        a, b = args
        with torch.cuda._DeviceGuard(0):
            buf1 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
            # Topologically Sorted Source Nodes: [mm_8], Original ATen: [aten.t, aten.mm]
            extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0), b, out=buf1)
            # Topologically Sorted Source Nodes: [add], Original ATen: [aten.add]
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_0.run(buf1, 16, stream=stream0)
            _swiglu_backward_kernel_0.run(buf1, a, stream=stream0)
            mine_0.run(buf1, stream=stream0)
            extern_kernels.mm_dtype(a, b, out_dtype=torch.float32, out=buf1)
            buf2 = torch.ops.aten.convolution.default(buf1, b)
            buf3 = aten.sort(buf1)
            buf4 = torch.ops.theirs.op.default(buf3)
        return (buf4,)

def benchmark_compiled_module():
    extern_kernels.bmm(a, b)
"""


def test_calls_of_a_gpu_wrapper():
    calls = [(c.name, c.kind, c.origin) for c in read_calls(GPU_WRAPPER)]
    assert calls == [
        ("addmm", "library (cuBLAS)", ""),
        ("mm", "library (cuBLAS)", "t, mm"),
        ("triton_poi_fused_add_0", "Triton, Inductor", "add"),
        ("_swiglu_backward_kernel_0", "Triton, fusedbwd", ""),
        ("mine_0", "Triton, user", ""),
        ("mm_dtype", "library (cuBLAS)", ""),
        ("aten.convolution.default", "library (ATen)", ""),
        ("aten.sort", "library (ATen)", ""),
        ("theirs.op.default", "op", ""),
    ]


def test_kernels_of_a_gpu_wrapper():
    assert [k.name for k in read_kernels(GPU_WRAPPER)] == [
        "triton_poi_fused_add_0",
        "_swiglu_backward_kernel_0",
        "mine_0",
    ]
    assert "def mine(ptr)" in read_kernels(GPU_WRAPPER)[2].source


def test_a_cpp_wrapper_is_refused():
    with pytest.raises(UnsupportedError, match="not Python"):
        read_calls("void inductor_entry_impl(AtenTensorHandle* inputs) {}")


@pytest.fixture(scope="module")
def decoder():
    return inspect_problem("decoder_backward", small=True)


def test_problem(decoder):
    (backward,) = decoder.backwards
    assert decoder.report.counts() == {
        "attention_backward": 1,
        "swiglu_backward": 1,
        "rms_norm_backward": 2,
        "matmul_swiglu_backward": 1,
        "sum_matmul": 2,
    }
    names = [c.name for c in backward.calls]
    assert [n for n in names if n.startswith("fusedbwd.")] == [
        "fusedbwd.matmul_swiglu_backward.default",
        "fusedbwd.sum_matmul.default",
        "fusedbwd.rms_norm_backward.default",
        "fusedbwd.attention_rope_backward.default",
        "fusedbwd.sum_matmul.default",
        "fusedbwd.rms_norm_backward.default",
    ]
    # Seven weight gradients and o's input gradient; the other matmuls are inside the ops.
    assert names.count("mm") == 8
    assert "bmm" not in names
    defined = {k.name for k in backward.kernels}
    assert defined == {c.name for c in backward.calls if c.kind == "C++, Inductor"}


def test_overview_and_sources(decoder):
    overview, sources = decoder.overview(), decoder.sources()
    assert "decoder_backward, small, torch.bfloat16, compiled for cpu" in overview
    assert "fused attention_backward x1, swiglu_backward x1, rms_norm_backward x2" in overview
    assert "op, fusedbwd" in overview and "library (ATen)" in overview
    assert "def _swiglu_backward_kernel(" in sources
    assert decoder.backwards[0].source in sources


def test_files(decoder, tmp_path):
    paths = decoder.write(tmp_path / "out")
    assert all(p.stat().st_size for p in paths)
    names = {p.relative_to(tmp_path / "out").as_posix() for p in paths}
    assert {"report.txt", "backward.py", "kernels/_swiglu_backward_kernel.py"} <= names
    for k in decoder.backwards[0].kernels:
        assert (tmp_path / "out" / "kernels" / "backward" / f"{k.name}.cpp").read_text() == k.source


def test_full_size_problem_needs_no_memory_for_its_weights():
    inspection = inspect_problem("ffn_gelu_backward", dtype=torch.float16)
    assert inspection.report.counts() == {
        "gelu_backward": 1,
        "layer_norm_backward": 1,
        "matmul_gelu_backward": 1,
    }
    (op, launch), *_ = inspection.backwards[0].launches
    assert op == "layer_norm_backward"
    widths = {a.shape[-1] for a in launch.args if isinstance(a, torch.Tensor) and a.dim() == 2}
    assert 512 in widths and all(a.is_meta for a in launch.args if isinstance(a, torch.Tensor))


class Mlp(nn.Module):
    """Fuses SwiGLU; its GELU has no bias gradient, so that is a near miss."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 32, bias=False)
        self.up = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return F.gelu(F.silu(self.gate(x)) * self.up(x))


def test_module():
    module = Mlp()
    inspection = inspect_module(module, (torch.randn(3, 16, requires_grad=True),))
    (backward,) = inspection.backwards
    assert inspection.report.counts() == {"swiglu_backward": 1}
    assert "fusedbwd.swiglu_backward.default" in [c.name for c in backward.calls]
    assert "no bias gradient is summed" in inspection.overview()
    assert [k.name for k in inspection.fused_kernels()] == ["_swiglu_backward_kernel"]
    assert isinstance(inspection.fused_kernels()[0], Kernel)


def test_module_without_gradients():
    class Constant(nn.Module):
        def forward(self, x):
            return x.detach() * 2

    with pytest.raises(UnsupportedError, match="expected a result that requires grad"):
        inspect_module(Constant(), (torch.randn(3),))


def run_script(*arguments, cwd=ROOT):
    script = ROOT / "scripts" / "inspect_kernels.py"
    return uninterpreted(script, "--device", "cpu", *arguments, cwd=cwd)


def test_script_on_a_problem(tmp_path):
    out = tmp_path / "out"
    done = run_script(
        *("--problem", "decoder_backward", "--small", "--target", "sm_100"),
        *("--resources", "--ptx", "--sass", "--out", out),
    )
    assert done.returncode == 0, done.stderr
    assert "rms_norm_backward: _rms_norm_backward_kernel" in done.stdout
    figures = json.loads((out / "resources.json").read_text())
    assert {f["target"] for f in figures} == {"sm_100"}
    assert all(f["registers"] > 0 for f in figures)
    ptx = (out / "kernels" / "0-_swiglu_backward_kernel.sm_100.ptx").read_text()
    sass = (out / "kernels" / "0-_swiglu_backward_kernel.sm_100.sass").read_text()
    assert ".target sm_100" in ptx and "EXIT" in sass


def test_script_at_medium_precision():
    """Rounding kernels are few, and no matmul is on float32."""
    done = run_script("--problem", "ffn_gelu_backward", "--small", "--precision", "medium")
    assert done.returncode == 0, done.stderr
    assert "float32 matmuls at 'medium', 4 in bfloat16" in done.stdout
    calls = re.findall(r"^ *\d+  (\S+)", done.stdout, re.MULTILINE)
    ops = Counter(c.split(".")[1] for c in calls if c.startswith("fusedbwd."))
    assert ops == {
        "layer_norm_backward_rounded": 1,
        "matmul_gelu_backward": 1,
        "round_to": 2,
        "sum_matmul": 3,
    }
    assert not [c for c in calls if "mm" in c.split("_") or "extern" in c]


MODULE = '''
import torch
from torch import nn

def make():
    """A module and its example arguments."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU()), (torch.randn(4, 8),)
'''


def test_script_on_a_module_of_the_working_directory(tmp_path):
    (tmp_path / "theirs.py").write_text(MODULE)
    done = run_script("--module", "theirs:make", "--dtype", "bfloat16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Sequential, compiled for training on cpu" in done.stdout
    assert "fused gelu_backward x1" in done.stdout
    assert "backward_0, as generated" in done.stdout


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("theirs:absent", "has no attribute 'absent'"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("theirs", "expected PKG.MOD:FACTORY"),
    ],
)
def test_script_on_what_is_not_there(tmp_path, path, message):
    (tmp_path / "theirs.py").write_text(MODULE)
    done = run_script("--module", path, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("case", "ours", "cublas", "launches"),
    [
        # GELU in the epilogue; the residual added by Inductor after a matmul of cuBLAS.
        ((1, 613), ["_matmul_gelu_kernel", "_sum_partials_kernel"], 3, 10),
        # The residual inside a matmul too.
        ((16, 919), ["_matmul_gelu_kernel", "_sum_partials_kernel", "_sum_matmul_kernel"], 2, 9),
    ],
    ids=str,
)
def test_launches_at_medium_precision(case, ours, cublas, launches):
    """At most ten on an H200 for the FFN at either end, by the routes of its token counts."""
    with matmul_precision(MEDIUM):
        inspection = inspect_problem("ffn_gelu_backward", case=case)
    (backward,) = inspection.backwards
    kernels = [launch.kernel.__name__ for _, launch in backward.launches]
    first = ["_round_to_kernel", "_layer_norm_backward_kernel", "_sum_partials_kernel"]
    assert sorted(kernels) == sorted([*first, "_round_to_kernel", *ours])
    added = "_sum_matmul_kernel" not in kernels
    assert len(kernels) + cublas + added == launches
