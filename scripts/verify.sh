#!/usr/bin/env bash
# Check style, types, layers and contracts.   scripts/verify.sh BIN
set -euo pipefail
bin=$1
echo "ruff" && "$bin/ruff" check .
echo "ruff format" && "$bin/ruff" format --check .
echo "mypy --strict" && "$bin/mypy"
echo "import-linter" && "$bin/lint-imports" --no-cache
echo "buf lint" && "$bin/buf" lint
if git rev-parse --verify --quiet main >/dev/null && git cat-file -e main:proto 2>/dev/null; then
    echo "buf breaking" && "$bin/buf" breaking --against '.git#branch=main'
fi
