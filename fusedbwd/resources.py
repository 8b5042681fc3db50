"""What the GPU compiler makes of the kernels: registers, shared memory, spills, PTX, SASS.

Needs no GPU. A launcher is run on meta tensors with its launches recorded, and each launch is
compiled ahead of time for a named target, specialised as Triton's JIT would specialise it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from fusedbwd.errors import UnsupportedError
from fusedbwd.kernels._matmul import MatmulTile
from fusedbwd.kernels._op import Launch, record_launches
from fusedbwd.kernels._routes import tiles
from fusedbwd.kernels.attention import (
    attention_backward_launch,
    attention_rope_backward_launch,
)
from fusedbwd.kernels.fp16_matmul import fp16_matmul_launch
from fusedbwd.kernels.fp16_parts import fp16_parts_launch, programs
from fusedbwd.kernels.geglu import geglu_backward_launch
from fusedbwd.kernels.gelu import gelu_backward_launch
from fusedbwd.kernels.layer_norm import (
    layer_norm_backward_dx_launch,
    layer_norm_backward_launch,
    layer_norm_backward_rounded_launch,
)
from fusedbwd.kernels.matmul_gelu import matmul_gelu_backward_fused
from fusedbwd.kernels.matmul_sum import sum_matmul_fused
from fusedbwd.kernels.matmul_swiglu import matmul_swiglu_backward_fused
from fusedbwd.kernels.rms_norm import (
    rms_norm_backward_dx_launch,
    rms_norm_backward_launch,
    rms_norm_backward_rounded_launch,
)
from fusedbwd.kernels.rope import rope_backward_launch
from fusedbwd.kernels.rounding import round_to_launch
from fusedbwd.kernels.swiglu import swiglu_backward_launch

TARGETS = {"sm_90": 90, "sm_100": 100}
"""Compute capability of each target: Hopper (H100, H200) and Blackwell (B200)."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIGNMENT = 16  # what the JIT specialises on: bytes of a pointer, elements of an integer


@dataclass(frozen=True)
class Resources:
    """One compiled kernel.

    Attributes:
        kernel: what was compiled, the operation's name or the Triton function's.
        target: "sm_90" or "sm_100".
        registers: 32-bit registers a thread.
        shared_bytes: shared memory a program, in bytes.
        spill_bytes: bytes a thread stores to and loads from local memory for want of registers.
        warps: warps a program.
        triton_version: the compiler's version; figures of two versions are not comparable.
        ttir: Triton's own code, simplified, before any target's passes.
        ptx: the PTX text.
        cubin: the machine code.
    """

    kernel: str
    target: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    warps: int
    triton_version: str
    ttir: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def sass(self) -> str:
        """The disassembled machine code, by the nvdisasm that comes with Triton.

        Raises:
            UnsupportedError: this Triton has no nvdisasm.
        """
        tool = triton.knobs.nvidia.nvdisasm
        if tool is None or not Path(tool.path).exists():
            raise UnsupportedError("SASS: expected an nvdisasm beside Triton, found none")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return _run(tool.path, "-c", file.name)

    def summary(self) -> dict[str, Any]:
        """The figures, without the code."""
        return {k: v for k, v in asdict(self).items() if k not in ("ttir", "ptx", "cubin")}


def launches(launcher: Callable, *args) -> list[Launch]:
    """The launches that ``launcher(*args)`` asks for; ``args`` may be meta tensors."""
    with record_launches() as recorded:
        launcher(*args)
    return recorded


def compile_launch(launch: Launch, target: str, name: str = "") -> Resources:
    """Compiles the kernel of one launch for ``target``, for the argument values given there.

    Args:
        launch: from :func:`launches`. Meta and fake tensors count as 16-byte aligned, as
            fresh allocations are.
        target: a key of :data:`TARGETS`.
        name: goes into the result; the Triton function's name if empty.

    Raises:
        UnsupportedError: an unknown target, an argument type that no kernel here takes, or
            TRITON_INTERPRET is set, which leaves nothing to compile.
    """
    if target not in TARGETS:
        raise UnsupportedError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    if not isinstance(launch.kernel, triton.JITFunction):
        raise UnsupportedError(
            "kernel: expected a compiled function, got one for the interpreter; "
            "unset TRITON_INTERPRET before fusedbwd is imported"
        )
    capability = TARGETS[target]
    options = {k: v for k, v in launch.options.items() if k not in launch.kernel.arg_names}
    compiled = triton.compile(
        _source(launch), target=GPUTarget("cuda", capability, 32), options=options
    )
    registers, spills = _ptxas_usage(compiled.asm["ptx"], capability)
    return Resources(
        kernel=name or launch.kernel.__name__,
        target=target,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_bytes=spills,
        warps=compiled.metadata.num_warps,
        triton_version=triton.__version__,
        ttir=compiled.asm["ttir"],
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
    )


def compile_shipped(targets: Iterable[str] = TARGETS) -> list[Resources]:
    """Every kernel of :func:`shipped`, compiled for the targets that launch it."""
    targets = list(targets)
    return [
        compile_launch(launch, target, name)
        for name, launcher, args, capability in shipped()
        for launch in launches(launcher, *args)
        for target in targets
        if capability in (None, TARGETS[target])
    ]


def shipped() -> list[tuple[str, Callable, tuple, int | None]]:
    """The fused ops at the two reference problems' dimensions: name, launcher, arguments, and
    the one compute capability that launches it, or None for any. Matmul kernels are launched
    where a table of measurements says so.

    Decoder: bfloat16, hidden 5120, intermediate 14336. FFN: float32, hidden 512,
    intermediate 2048; its matmuls in bfloat16. The number of tokens only matters to Triton by
    being a multiple of 16.
    """
    tokens, bf16, fp32 = 4096, torch.bfloat16, torch.float32

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = empty(tokens, 14336, dtype=bf16)
    hidden, weight = empty(tokens, 5120, dtype=bf16), empty(5120, dtype=bf16)
    x_hat = empty(tokens, 5120, dtype=fp32)
    stat, eps = empty(tokens, 1, dtype=fp32), empty(dtype=fp32)
    ffn, ffn_weight = empty(tokens, 512, dtype=fp32), empty(512, dtype=fp32)
    ffn_wide = empty(tokens, 2048, dtype=fp32)
    down = empty(5120, 14336, dtype=bf16)
    qkv = [empty(tokens, n, dtype=bf16) for n in (5120, 1280, 1280)]
    qkv_weights = [empty(n, 5120, dtype=bf16) for n in (5120, 1280, 1280)]
    ffn_grad, fc2 = empty(tokens, 512, dtype=bf16), empty(512, 2048, dtype=bf16)
    query, keys = (empty(4, n, 1023, 160, dtype=bf16) for n in (32, 8))
    probs, table = empty(4, 32, 1023, 1023, dtype=bf16), empty(4, 1023, 160, dtype=bf16)
    attention = (query, probs, query, keys, keys)
    wide_probs = empty(4, 32, 1023, 1023, dtype=fp32)
    # As flash attention gives them: [B, heads, S, D], stored by tokens, kv heads repeated.
    repeated = empty(4, 1023, 32, 160, dtype=bf16).transpose(1, 2)
    fixed: list[tuple[str, Callable, tuple]] = [
        ("swiglu_backward", swiglu_backward_launch, (wide, wide, wide)),
        ("geglu_backward, tanh", geglu_backward_launch, (wide, wide, wide, "tanh")),
        ("geglu_backward, exact", geglu_backward_launch, (wide, wide, wide, "none")),
        (
            "rms_norm_backward",
            rms_norm_backward_launch,
            (hidden, hidden, weight, stat, eps, x_hat, hidden, 0.0, bf16),
        ),
        (
            "rms_norm_backward_rounded",
            rms_norm_backward_rounded_launch,
            (x_hat, x_hat, weight, stat, eps, x_hat, x_hat, 0.0, fp32, bf16),
        ),
        (
            "rms_norm_backward_dx",
            rms_norm_backward_dx_launch,
            (hidden, hidden, weight, stat, eps, hidden, 0.0, bf16),
        ),
        (
            "layer_norm_backward",
            layer_norm_backward_launch,
            (ffn, ffn, None, ffn_weight, stat, eps, ffn, fp32, True),
        ),
        (
            "layer_norm_backward_rounded",
            layer_norm_backward_rounded_launch,
            (ffn, ffn, None, ffn_weight, stat, eps, None, fp32, True, bf16),
        ),
        (
            "layer_norm_backward_dx",
            layer_norm_backward_dx_launch,
            (ffn, ffn, None, ffn_weight, stat, eps, ffn, fp32),
        ),
        ("attention_backward", attention_backward_launch, (*attention, 0.08, False)),
        (
            "attention_backward, float32 P",
            attention_backward_launch,
            (query, wide_probs, query, keys, keys, 0.08, False),
        ),
        (
            "attention_rope_backward",
            attention_rope_backward_launch,
            (*attention, table, table, 0.08, False),
        ),
        ("rope_backward", rope_backward_launch, (*3 * (repeated,), table, table, 4)),
        ("gelu_backward, tanh", gelu_backward_launch, (ffn_wide, ffn_wide, "tanh")),
        ("gelu_backward, rounded", gelu_backward_launch, (ffn_wide, ffn_wide, "tanh", bf16)),
        ("gelu_backward, exact", gelu_backward_launch, (ffn_wide, ffn_wide, "none")),
        ("round_to", round_to_launch, ([ffn_wide, ffn_weight], bf16)),
        *_on_fp16_parts(ffn, ffn_wide),
    ]
    return [(*entry, None) for entry in fixed] + [
        (f"{name}, {_name(tile)}", partial(fused, tile=tile), args, 10 * major + minor)
        for name, fused, args in (
            ("matmul_swiglu_backward", matmul_swiglu_backward_fused, (hidden, down, wide, wide)),
            ("matmul_gelu_backward", matmul_gelu_backward_fused, (ffn_grad, fc2, ffn_wide, "tanh")),
            ("sum_matmul", sum_matmul_fused, (qkv, qkv_weights, None, bf16)),
        )
        for tile, (major, minor) in tiles(name)
    ]


def _on_fp16_parts(narrow: torch.Tensor, wide: torch.Tensor) -> list[tuple[str, Callable, tuple]]:
    """The opt-ins' ops: an input gradient of the FFN, with a residual, and a weight gradient."""
    fc1 = wide.new_empty((wide.shape[1], narrow.shape[1]))
    found: list[tuple[str, Callable, tuple]] = []
    for parts, name in ((1, "fp16_scaled"), (2, "fp16x3")):

        def split(x: torch.Tensor, parts: int = parts) -> list[torch.Tensor]:
            halves = [x.new_empty(x.shape, dtype=torch.float16) for _ in range(parts)]
            count = programs(x.device)
            maxima = [x.new_empty((count,)) for _ in range(2)]
            return [*halves, *maxima, x.new_empty((count,), dtype=torch.int32)]

        turned = [t.t() if t.dim() == 2 else t for t in split(wide)]
        found += [
            (f"fp16_parts, {name}", fp16_parts_launch, ([wide, fc1], parts)),
            (
                f"fp16_matmul, {name}",
                fp16_matmul_launch,
                (wide, fc1, split(wide), split(fc1), narrow),
            ),
            (
                f"fp16_matmul, {name}, weight",
                fp16_matmul_launch,
                (wide.t(), narrow, turned, split(narrow), None),
            ),
        ]
    return found


def _name(tile: MatmulTile) -> str:
    split = ", split" if tile.split else ""
    staged = ", staged" if tile.staged else ""
    size = f"{tile.rows}x{tile.columns}x{tile.depth}, {tile.warps} warps"
    return f"{size}, {tile.programs_per_sm} per SM{split}{staged}"


def _source(launch: Launch) -> ASTSource:
    """What Triton's JIT would compile for these arguments."""
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.args, strict=False))
    given |= {k: v for k, v in launch.options.items() if k in names}
    constexprs = {launch.kernel.params[i].name for i in launch.kernel.constexprs}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = given[name]
        is_one = isinstance(value, int) and value == 1
        if name in constexprs or is_one:
            signature[name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[name], aligned = _specialise(name, value)
            if aligned:
                attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _specialise(name: str, value: Any) -> tuple[str, bool]:
    """Triton's name for the type of an argument, and whether it is a multiple of 16."""
    if isinstance(value, torch.Tensor) and value.dtype in _TYPES:
        # Meta and fake tensors have no address.
        address = value.data_ptr() if type(value) is torch.Tensor and not value.is_meta else 0
        return "*" + _TYPES[value.dtype], address % _ALIGNMENT == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % _ALIGNMENT == 0
    if isinstance(value, float):
        return "fp32", False
    what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    raise UnsupportedError(f"kernel argument {name}: expected a tensor or number, got {what}")


def _ptxas_usage(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread and bytes spilled, by assembling again with ``ptxas -v``."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        log = _run(
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(capability)}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        )
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    if not registers or not spills:
        raise UnsupportedError(f"ptxas: expected register and spill counts, got {log!r}")
    return max(registers), sum(spills)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr
