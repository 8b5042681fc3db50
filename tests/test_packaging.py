"""``fusedbwd.patterns`` imports from a wheel and an editable install, in the checkout and outside.

Inside the checkout ./fusedbwd shadows the installed package, so both places must have it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "fusedbwd", "patterns", "scripts")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources: building leaves files behind, and could find old ones."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", folder, checkout)
    return next(folder.glob("fusedbwd-*.whl"))


@pytest.fixture(scope="module")
def wheel_site(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed in it."""
    site = tmp_path_factory.mktemp("site")
    pip("install", "--no-index", "--no-deps", "--target", site, wheel)
    return site


@pytest.fixture(scope="module")
def editable_python(checkout, tmp_path_factory) -> Path:
    """The interpreter of an environment that scripts/setup_venv.sh made, offline."""
    venv = tmp_path_factory.mktemp("editable") / "venv"
    environment = os.environ | {"VENV": str(venv), "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    environment.pop("TORCH_SPEC", None)
    subprocess.run([checkout / "scripts" / "setup_venv.sh"], env=environment, check=True)
    return venv / "bin" / "python"


def test_wheel_holds_the_package_and_nothing_else(wheel, checkout):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    wanted = {
        (inside / path.relative_to(folder)).as_posix()
        for folder, inside in (
            (checkout / "fusedbwd", Path("fusedbwd")),
            (checkout / "patterns", Path("fusedbwd/patterns")),
        )
        for pattern in ("*.py", "*.json", "py.typed")
        for path in folder.rglob(pattern)
    }
    assert code == wanted
    assert "fusedbwd/patterns/__init__.py" in code
    assert any(name.endswith("LICENSE") for name in names - code)


@pytest.mark.parametrize("inside", [True, False], ids=["in checkout", "outside"])
def test_wheel_install(wheel_site, checkout, tmp_path, inside):
    package, patterns = imported_from(
        sys.executable, cwd=checkout if inside else tmp_path, PYTHONPATH=str(wheel_site)
    )
    home = checkout if inside else wheel_site
    assert package == home / "fusedbwd" / "__init__.py"
    assert patterns == home / "fusedbwd" / "patterns" / "__init__.py"


@pytest.mark.parametrize("inside", [True, False], ids=["in checkout", "outside"])
def test_editable_install(editable_python, checkout, tmp_path, inside):
    package, patterns = imported_from(editable_python, cwd=checkout if inside else tmp_path)
    assert package == checkout / "fusedbwd" / "__init__.py"
    assert patterns == checkout / "fusedbwd" / "patterns" / "__init__.py"


def test_editable_install_exposes_no_other_folder(editable_python, tmp_path):
    code = (
        "from importlib.util import find_spec\n"
        "names = 'patterns', 'scripts', 'fusedbwd.scripts', 'fusedbwd.fusedbwd'\n"
        "print([name for name in names if find_spec(name)])"
    )
    assert python(editable_python, code, cwd=tmp_path) == ["[]"]


def imported_from(interpreter, cwd: Path, **environment: str) -> tuple[Path, Path]:
    """The files from which ``interpreter``, run in ``cwd``, imports fusedbwd and its patterns."""
    code = "import fusedbwd.patterns as p; print(fusedbwd.__file__); print(p.__file__)"
    package, patterns = python(interpreter, "import fusedbwd; " + code, cwd, **environment)
    return Path(package), Path(patterns)


def python(interpreter, code: str, cwd: Path, **environment: str) -> list[str]:
    """The lines that ``code`` prints under ``interpreter``."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [interpreter, "-c", code],
        cwd=cwd,
        env=clean | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()


def pip(*arguments) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True)
