"""Runs the pattern-count tests under several torch versions and compares the counts.

Every version has a virtual environment of its own, made under .venvs/ on first use, or
named with --venv. The tests write how often each pattern fired to the JSON file that the
environment variable FUSEDBWD_COUNTS_FILE names, as {test: {pattern: count}}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
TORCH = {"2.11": "torch==2.11.0", "2.13": "torch==2.13.0", "2.14": "torch==2.14.1"}
COUNTS_FILE = "FUSEDBWD_COUNTS_FILE"

Counts = dict[str, dict[str, int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every version's tests passed and all counts are equal, otherwise 1."""
    args = parse_args(argv)
    given = dict(args.venv)
    counts, failed = {}, []
    for version in args.versions or dict.fromkeys((*TORCH, *given)):
        print(f"== torch {version}", flush=True)
        python = (given.get(version) or make_venv(version)) / "bin" / "python"
        passed, counts[version] = run_tests(python, args.tests, args.marker)
        if not passed:
            failed.append(version)

    rows, differing = compare(counts)
    print(tabulate(rows, headers=["test", "pattern", *counts, ""], tablefmt="github"))
    if failed:
        print(f"tests failed under torch {', '.join(failed)}")
    if not rows:
        print(f"no counts were written to {COUNTS_FILE}")
    if differing:
        print(f"{differing} of {len(rows)} counts differ")
    return int(bool(failed or differing or not rows))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "tests", nargs="*", default=["tests/patterns"], help="paths (default: tests/patterns)"
    )
    parser.add_argument("-m", "--marker", help="only tests with this pytest marker expression")
    parser.add_argument(
        "--versions",
        nargs="+",
        metavar="VERSION",
        help=f"torch versions (default: {', '.join(TORCH)} and those given with --venv)",
    )
    parser.add_argument(
        "--venv",
        action="append",
        default=[],
        type=version_and_path,
        metavar="VERSION=PATH",
        help="run VERSION in this existing environment; repeatable",
    )
    args = parser.parse_args(argv)
    for version in args.versions or ():
        if version not in TORCH and version not in dict(args.venv):
            parser.error(f"version {version}: expected one of {', '.join(TORCH)}, or a --venv")
    return args


def version_and_path(text: str) -> tuple[str, Path]:
    version, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected VERSION=PATH, got {text!r}")
    return version, Path(path).absolute()


def make_venv(version: str) -> Path:
    """The environment with this torch under .venvs/, completed if it is not."""
    venv = ROOT / ".venvs" / f"torch-{version}"
    environment = os.environ | {"VENV": str(venv), "TORCH_SPEC": TORCH[version]}
    subprocess.run([ROOT / "scripts" / "setup_venv.sh", "test"], env=environment, check=True)
    return venv


def run_tests(python: Path, tests: Sequence[str], marker: str | None) -> tuple[bool, Counts]:
    """Whether pytest passed under ``python``, and the counts that its tests wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        command = [str(python), "-m", "pytest", "-q", *tests]
        if marker:
            command += ["-m", marker]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {COUNTS_FILE: str(file)})
        return done.returncode == 0, json.loads(file.read_text()) if file.exists() else {}


def compare(counts: dict[str, Counts]) -> tuple[list[list], int]:
    """One table row per test and pattern, a column per version; and how many rows differ."""
    keys = {
        (test, pattern)
        for of_version in counts.values()
        for test, of_test in of_version.items()
        for pattern in of_test
    }
    rows, differing = [], 0
    for test, pattern in sorted(keys):
        found = [of_version.get(test, {}).get(pattern) for of_version in counts.values()]
        differs = len(set(found)) > 1
        differing += differs
        rows.append([test, pattern, *found, "differs" if differs else ""])
    return rows, differing


if __name__ == "__main__":
    sys.exit(main())
