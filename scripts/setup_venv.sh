#!/usr/bin/env bash
# Makes or completes a virtual environment with fusedbwd installed in it, editable.
#
#   scripts/setup_venv.sh [EXTRA]      EXTRA: an extra of pyproject.toml (test, dev, ...)
#
# Environment:
#   VENV        where (default .venv)
#   PYTHON      the interpreter it is made from (default python3)
#   TORCH_SPEC  the torch to install, as pip writes it. Unset: a torch >= 2.11 that PYTHON can
#               already import is reused, and where there is none, pip installs 2.13.0, or with
#               an NVIDIA GPU the newest.
#
# Needs no network when PYTHON can already import all that pyproject.toml asks for.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=${1:-}
package=.${extra:+[$extra]}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

has_torch() {
    "$1" - <<'EOF' 2>/dev/null
import torch
raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))
EOF
}

# Makes a venv that also sees the packages of $python, which may itself be in a venv:
# --system-site-packages would skip that one and show the interpreter below it.
make_sharing_venv() {
    local options=()
    "$python" -c 'import pip' 2>/dev/null && options=(--without-pip)
    "$python" -m venv "${options[@]}" "$venv"
    local purelib
    purelib=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" - >"$purelib/shared.pth" <<'EOF'
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
EOF
}

default_torch() {
    if command -v nvidia-smi >/dev/null; then echo 'torch>=2.11'; else echo 'torch==2.13.0'; fi
}

if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))'; then
    echo "fusedbwd needs Python 3.10 or newer; set PYTHON to one (tried: $python)" >&2
    exit 1
fi

if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv"
    if [ -z "${TORCH_SPEC:-}" ] && has_torch "$python"; then
        make_sharing_venv
    else
        "$python" -m venv "$venv"
    fi
fi

pip() { "$venv/bin/python" -m pip "$@"; }

if [ -n "${TORCH_SPEC:-}" ] || ! has_torch "$venv/bin/python"; then
    spec=${TORCH_SPEC:-$(default_torch)}
    echo "Installing $spec"
    pip install --quiet "$spec"
fi

# Offline first: it succeeds exactly when everything that pyproject.toml asks for is there.
if ! pip install --quiet --no-index --no-build-isolation --editable "$package" >/dev/null 2>&1; then
    echo "Installing $package and what it still lacks from the package index"
    pip install --quiet --editable "$package"
fi
