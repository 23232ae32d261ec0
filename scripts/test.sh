#!/usr/bin/env bash
# Run every test that needs no GPU.   scripts/test.sh BIN
set -euo pipefail
bin=$1
# One thread per process: two OpenMP pools on the same cores spin on each other and run ten times slower.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Hundreds of processes would otherwise compile the same modules again.
unset PYTHONDONTWRITEBYTECODE
"$bin/python" scripts/make_model.py >/dev/null
# nproc follows OMP_NUM_THREADS, so unset it to count cores. Use two workers more than cores, since tests of processes also
# wait (for ports, deadlines, disks), but no more than fit in memory: what one worker starts holds up to 3 GiB.
cores=$(env -u OMP_NUM_THREADS nproc)
fitting=$(awk '/MemAvailable/ {print int($2 / 3145728)}' /proc/meminfo 2>/dev/null || echo 1)
workers=$((cores + 2 < fitting ? cores + 2 : fitting > 0 ? fitting : 1))
# Keep the tests of a file together, since they share what its fixtures start, and all of tests/contract too. Their order
# is that of tests/conftest.py.
"$bin/python" -m pytest -m "not gpu and not clients and not install and not page" -n "$workers" --dist loadfile --no-loadscope-reorder tests
