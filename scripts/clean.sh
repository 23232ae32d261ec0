#!/usr/bin/env bash
# Remove what make created here, and say what is left: what users edit or keep.   scripts/clean.sh [PATH...]
set -euo pipefail
rm -rf "$@"
find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +
model="${XDG_CACHE_HOME:-$HOME/.cache}/paceline"
say() { [ ! -e "$1" ] || echo "left: $1 ($2)"; }
say deploy/secrets "the keys and the credential of a deployment; without them its clients are refused"
say results "what examples and benches measured"
say "$model" "the embedded model and tokenizers, for all checkouts"
