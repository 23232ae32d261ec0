"""How to start the engine: as one process, or as several with torch's elastic launcher. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_ENGINE = ("-m", "trainer_service.engine", "--fd", "0")
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def engine_command(ranks: int, directory: Path) -> tuple[str, ...]:
    """Return the command to execute, with the socket to the service as standard input, which ranks inherit.

    The ranks and the launcher rendezvous through files in `directory`: there is no port to choose, and none that others
    could reach. The launcher ends all ranks when one ends. It restarts none, because the service does that.
    """
    if ranks == 1:
        return (sys.executable, *_ENGINE)
    launcher = (
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={directory / 'launcher'}",
        f"--log-dir={directory}",
    )
    return (sys.executable, "-m", "torch.distributed.run", *launcher, *_ENGINE, "--store", str(directory / "ranks"))


def engine_environment(ranks: int) -> Mapping[str, str]:
    """Return the environment for `engine_command`. Ranks share the threads that a single process would use."""
    if ranks == 1:
        return os.environ
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return {
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "NCCL_SOCKET_IFNAME": _LOOPBACK,
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, threads // ranks)),
        # Otherwise the launcher would listen on all interfaces, although no rank connects.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
