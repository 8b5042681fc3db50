"""``python -m fusedbwd.env``: what a bug report needs, one line each."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch
from torch._functorch import config as functorch_config

import fusedbwd
from fusedbwd import compat, gate, passes, precision

PACKAGES = ("torch", "triton", "tabulate", "numpy", "transformers", "peft")
PREFIXES = ("FUSEDBWD_", "TORCH", "TRITON_", "CUDA_", "PYTORCH_", "NVIDIA_TF32_OVERRIDE")
"""Environment variables whose names begin so are shown, with their values."""


def environment() -> dict[str, str]:
    """Versions, hardware, shipped tables, settings in force and environment variables, by name."""
    return {
        "fusedbwd": f"{fusedbwd.__version__} ({passes.fingerprint()[:12]}) {fusedbwd.__path__[0]}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "os": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "torch is tested": str(compat.tested()),
        "tables": ", ".join(sorted(path.name for path in gate.DATA.glob("*.json"))) or "none",
        "cuda": torch.version.cuda or "not in this build of torch",
        **_gpus(),
        "float32 matmuls": precision.in_force(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "recompile limit": str(torch._dynamo.config.recompile_limit),
        "donated buffers": str(functorch_config.donated_buffer),
        **{f"${k}": v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"gpu": "none"}
    found = {}
    for i in range(torch.cuda.device_count()):
        try:
            about = torch.cuda.get_device_properties(i)
        except RuntimeError as fault:  # a driver in trouble is what the report may be about
            found[f"gpu {i}"] = f"failed: {fault}"
            continue
        found[f"gpu {i}"] = (
            f"{about.name}, sm_{about.major}{about.minor}, {about.multi_processor_count} SMs, "
            f"{about.total_memory / 2**30:.0f} GiB"
        )
    return found


def main() -> None:
    """Prints :func:`environment`."""
    found = environment()
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()
