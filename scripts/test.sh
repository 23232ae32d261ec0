#!/usr/bin/env bash
# Run every test that needs no GPU.   scripts/test.sh BIN
set -euo pipefail
bin=$1
# One thread per process: two OpenMP pools on the same cores spin on each other and run ten times slower.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
"$bin/python" scripts/make_model.py >/dev/null
# nproc counts OpenMP's threads, not cores, where it is told of them. Two workers more than cores, since tests of processes
# also wait (for ports, deadlines, disks), as far as memory goes: what one worker starts holds up to 3 GiB.
cores=$(env -u OMP_NUM_THREADS nproc)
room=$(awk '/MemAvailable/ {print int($2 / 3145728)}' /proc/meminfo 2>/dev/null || echo 1)
workers=$((cores + 2 < room ? cores + 2 : room > 0 ? room : 1))
# The tests of a file stay together, since they share what its fixtures start, and so do all of tests/contract
# (tests/conftest.py); files with engines come first, the quick ones of tests/unit last.
"$bin/python" -m pytest -m "not gpu and not clients" -n "$workers" --dist loadfile --no-loadscope-reorder tests
