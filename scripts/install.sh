#!/usr/bin/env bash
# Make a virtual environment with exactly the pinned packages, and this project in it.
#   scripts/install.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    { echo "Paceline needs Python 3.11 to 3.13; call make with PYTHON=<one of them>" >&2; exit 1; }
if [ "$(uname -s)" = Linux ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    echo "vLLM's CPU build needs the library libnuma.so.1; install the package libnuma1 (Debian) or numactl-libs" >&2
    exit 1
fi
echo "Installing into $venv (about 2.5 GB; once)"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt -r requirements/dev.txt 2> >(grep -v '^WARNING: Location' >&2)
# The environment has all that the build needs, so nothing is fetched for it.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . 2> >(grep -v '^WARNING: Location' >&2)
touch "$venv/.installed"
