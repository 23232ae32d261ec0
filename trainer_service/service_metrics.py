"""The trainer's Prometheus metrics; `paceline.rpc` has those of calls, quotas and the process."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline import errors
from paceline.rpc.process_metrics import add_free_bytes
from paceline.rpc.scraped_gauges import add_gauge
from paceline.rpc.tenant_labels import TenantLabels
from paceline.types import ModelCertificate, ModelInfo, PackingMode
from trainer_service.publish.watch_hub import WatchHub
from trainer_service.runs.registry import RunRegistry
from trainer_service.settings import TrainerSettings

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300, 1800)


class TrainerMetrics:
    """What the trainer counts and times as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.engine_restarts = Counter(
            "paceline_trainer_engine_restarts_total", "Engines that took the place of one that ended", registry=registry
        )
        self.snapshot_failures = Counter(
            "paceline_trainer_snapshot_failures_total", "Snapshots that could not be saved", registry=registry
        )
        self._wait_seconds = Histogram(
            "paceline_trainer_command_wait_seconds",
            "From a command's arrival until it began to execute",
            ["tenant"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._command_seconds = Histogram(
            "paceline_trainer_command_seconds",
            "From when a command began to execute until it had its answer",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._tenants = TenantLabels()

    def waited(self, tenant: str, seconds: float) -> None:
        """Observe how long a command of a tenant's run waited for its turn."""
        self._wait_seconds.labels(self._tenants.of(tenant)).observe(seconds)

    def executed(self, method: str, seconds: float) -> None:
        """Observe how long a command took."""
        self._command_seconds.labels(method).observe(seconds)


def add_disk_metrics(settings: TrainerSettings, registry: CollectorRegistry) -> None:
    """Export the room on the disks that the trainer writes to, and what it must leave free."""
    volume, scratch = settings.checkpoint_dir, settings.scratch_dir
    add_free_bytes("paceline_trainer_volume_free_bytes", "Free bytes of the checkpoint volume", volume, registry)
    add_free_bytes("paceline_trainer_scratch_free_bytes", "Free bytes of scratch_dir's disk", scratch, registry)
    least = Gauge(
        "paceline_trainer_volume_min_free_bytes",
        "Bytes of the checkpoint volume that commands, checkpoints and versions leave free",
        registry=registry,
    )
    least.set(settings.min_free_bytes)


def add_run_metrics(runs: RunRegistry, snapshot_seconds: float, registry: CollectorRegistry) -> None:
    """Export what the runs' commands are doing, and how much of them no snapshot has.

    `snapshot_seconds` is the setting of that name.
    """

    def commands() -> Iterable[tuple[tuple[str, str], int]]:
        states: Count[tuple[str, str]] = Count()
        for run in runs:
            for state, number in run.sequencer.states().items():
                states[run.tenant, state.name.lower()] += number
        return states.items()

    prefix = "paceline_trainer"
    number = Gauge(f"{prefix}_runs", "Runs", registry=registry)
    number.set_function(lambda: len(list(runs)))
    description = "Commands that have not ended, by state"
    add_gauge(f"{prefix}_commands", description, ("tenant", "state"), commands, registry)
    replay = Gauge(
        f"{prefix}_replay_seconds", "Execution that no snapshot has, of the run that has most of it", registry=registry
    )
    replay.set_function(lambda: max((run.unsaved_seconds for run in runs), default=0.0))
    limit = Gauge(
        f"{prefix}_snapshot_seconds", "Execution after which a snapshot is due (the setting)", registry=registry
    )
    limit.set(snapshot_seconds)


def add_watch_metrics(hub: WatchHub, registry: CollectorRegistry) -> None:
    """Export which samplers watch, and for how long each has been behind."""
    number = Gauge("paceline_trainer_watchers", "Samplers that watch", registry=registry)
    number.set_function(lambda: len(hub.watchers()))
    add_gauge(
        "paceline_trainer_sampler_behind_seconds",
        "How long the sampler has lacked the newest version of a run without loading any; 0 if it has all",
        ("sampler",),
        lambda: [((watcher.sampler_id,), watcher.seconds_behind()) for watcher in hub.watchers()],
        registry,
    )


def add_certificate_metrics(describe: Callable[[], ModelInfo], registry: CollectorRegistry) -> None:
    """Export the certificate that GetServerInfo returns; there are no values until an engine has loaded a model.

    `describe` returns the loaded model, and raises EngineUnavailable while there is none.
    """

    def add(
        name: str,
        description: str,
        labels: Sequence[str],
        values: Callable[[ModelCertificate], Iterable[tuple[Sequence[str], float]]],
    ) -> None:
        def read() -> Iterable[tuple[Sequence[str], float]]:
            try:
                certificate = describe().certificate
            except errors.EngineUnavailable:
                return ()
            return () if certificate is None else values(certificate)

        add_gauge(f"paceline_trainer_certificate_{name}", description, labels, read, registry)

    add(
        "difference",
        "Difference between this engine and stock transformers",
        ("of",),
        lambda found: [(("logprobs",), found.logprob_difference), (("gradients",), found.gradient_difference)],
    )
    add(
        "bound",
        "Upper bound on that difference from rounding",
        ("of",),
        lambda found: [(("logprobs",), found.logprob_bound), (("gradients",), found.gradient_bound)],
    )
    add("seconds", "Time that the check took at the last load", (), lambda found: [((), found.seconds)])
    add(
        "packs",
        "1 if sequences share passes, else 0",
        ("attention",),
        lambda found: [((found.attention,), float(found.packing is PackingMode.PACKED))],
    )
