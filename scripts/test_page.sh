#!/usr/bin/env bash
# Run the tests of the gateway's page in a real browser.   scripts/test_page.sh BIN
# Without a browser that could be had, they are skipped, and a line says so: a fresh machine may not be allowed to install.
set -euo pipefail
bin=$1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
find_browser() {
    local name
    for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome chrome; do
        [ -n "$name" ] && command -v "$name" && return
    done
    return 1
}
install_browser() { # Debian and Ubuntu, as root or with a sudo that asks nothing
    local as_root=()
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && as_root=(sudo -n); } || return 1
    echo "test-page: no Chromium here; installing Debian's package chromium"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -c 'apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium' >/dev/null 2>&1
}
browser=$(find_browser) || { install_browser && browser=$(find_browser); } || {
    echo "test-page: SKIPPED: no Chromium here, and it could not be installed. Install it (apt install chromium), or set CHROMIUM to its path, and run make test-page."
    exit 0
}
packages=.venv/page
if ! cmp -s requirements/page.txt "$packages/installed.txt"; then
    rm -rf "$packages"
    if ! "$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$packages" -r requirements/page.txt; then
        echo "test-page: SKIPPED: the packages of requirements/page.txt could not be installed, for the reason above."
        exit 0
    fi
    cp requirements/page.txt "$packages/installed.txt"
fi
"$bin/python" scripts/make_model.py >/dev/null
CHROMIUM=$browser PYTHONPATH=$packages "$bin/python" -m pytest -m page tests/page
