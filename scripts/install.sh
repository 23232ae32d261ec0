#!/usr/bin/env bash
# Create a virtual environment with exactly the pinned packages, and install this project in it.
#   scripts/install.sh VENV [PYTHON]
# VENV/.installed exists only after a complete installation, in which torch and vLLM can be imported.
set -euo pipefail
venv=$1 python=${2:-}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}
is_suitable() { # sets `said` to what the interpreter, or the shell in its place, prints
    said=$("$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>&1)
}
install() { # arguments of `pip install`
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2)
}

# An environment that is there keeps its interpreter: packages of two versions must not mix in it.
version='import sys; print("%d.%d" % sys.version_info[:2])'
if is_suitable "$venv/bin/python"; then
    has=$("$venv/bin/python" -c "$version")
    if [ -n "$python" ] && is_suitable "$python" && [ "$("$python" -c "$version")" != "$has" ]; then
        fail "$venv was made with Python $has; remove it, and run make again, to install with $("$python" -V)"
    fi
    python=${python:-$venv/bin/python}
fi
if [ -z "$python" ]; then
    for python in python3 python3.13 python3.12 python3.11; do is_suitable "$python" && break; done
fi
is_suitable "$python" || fail ${said:+"$said"} "Paceline needs Python 3.11, 3.12 or 3.13, but $python is another version or missing; run make with PYTHON=<one of these>"
if [ "$(uname -s)" = Linux ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    fail "vLLM's CPU build needs the library libnuma.so.1: install the package libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora)"
fi

echo "Installing into $venv with $("$python" -V). This happens once and takes 2.5 GB, or 6.6 GB if pip finds no CPU build of torch (see README.md)."
rm -f "$venv/.installed"
"$python" -m venv "$venv"
# Install torch first, with what it requires, which differs by build. Among builds of one version pip prefers one with a
# suffix (+cpu), if it finds one in its configured indexes or in PIP_EXTRA_INDEX_URL.
echo "  1/3 torch and its dependencies (takes minutes, without output)"
install --constraint requirements/cpu.txt torch
echo "  2/3 $(grep -c == requirements/cpu.txt) pinned packages, including vLLM"
install --no-deps -r requirements/cpu.txt -r requirements/dev.txt
echo "  3/3 Paceline"
# The environment has everything that the build needs, so nothing is downloaded.
install --no-deps --no-build-isolation --editable .
"$venv/bin/python" scripts/check_install.py ||
    fail "The installation in $venv does not work, for the reason above. Fix that and run make again."
touch "$venv/.installed"
