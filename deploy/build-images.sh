#!/usr/bin/env bash
# Build the three images: deploy/build-images.sh [gpu|cpu], gpu by default.
#   ENGINE=podman     instead of docker
#   BUILD_FLAGS=...   more flags of `docker build`, such as --network host or --build-arg PIP_EXTRA_INDEX_URL=...
set -euo pipefail
cd "$(dirname "$0")/.."
variant=${1:-gpu}
read -ra flags <<<"${BUILD_FLAGS:-}"

build() { # image, Dockerfile, more flags
    "${ENGINE:-docker}" build "${flags[@]}" --file "deploy/docker/$2.Dockerfile" --tag "$1" "${@:3}" .
}

build paceline/gateway gateway
build "paceline/trainer:$variant" trainer --build-arg "VARIANT=$variant"
build "paceline/sampler:$variant" sampler --build-arg "VARIANT=$variant"
