#!/usr/bin/env python3
"""Registers, shared memory and spills of the shipped kernels, compiled without a GPU.

Prints a table and writes the figures, beside the Triton version that they belong to, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
from tabulate import tabulate  # noqa: E402

from fusedbwd.resources import TARGETS, compile_shipped  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="one target only (default: all)")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: nowhere)")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a kernel spills registers"
    )
    options = parser.parse_args()

    resources = compile_shipped([options.target] if options.target else TARGETS)
    figures = [r.summary() for r in resources]
    print(f"Triton {triton.__version__}")
    print(tabulate(figures, headers="keys"))
    if options.json:
        record = {
            "triton": triton.__version__,
            "kernels": [{k: v for k, v in f.items() if k != "triton_version"} for f in figures],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    spilling = [r for r in resources if r.spill_bytes]
    for r in spilling:
        print(f"{r.kernel} spills {r.spill_bytes} bytes on {r.target}", file=sys.stderr)
    return int(options.check and bool(spilling))


if __name__ == "__main__":
    sys.exit(main())
