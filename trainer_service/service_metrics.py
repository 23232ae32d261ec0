"""The trainer's Prometheus metrics; `paceline.rpc` has those of calls, quotas and the process."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline import errors
from paceline.rpc.process_metrics import add_free_bytes
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


class RunMetrics(Collector):
    """Reads at each scrape what the runs' commands are doing, and how much of them no snapshot has."""

    def __init__(self, runs: RunRegistry, snapshot_seconds: float, registry: CollectorRegistry) -> None:
        """`snapshot_seconds` is the setting of that name."""
        self._runs = runs
        self._snapshot_seconds = snapshot_seconds
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        count, commands, replay, limit = self._families()
        runs = list(self._runs)
        count.add_metric((), len(runs))
        states: Count[tuple[str, str]] = Count()
        for run in runs:
            for state, number in run.sequencer.states().items():
                states[run.tenant, state.name.lower()] += number
        for labels, number in sorted(states.items()):
            commands.add_metric(labels, number)
        replay.add_metric((), max((run.unsaved_seconds for run in runs), default=0.0))
        limit.add_metric((), self._snapshot_seconds)
        yield from (count, commands, replay, limit)

    def _families(self) -> tuple[GaugeMetricFamily, ...]:
        prefix = "paceline_trainer"
        return (
            GaugeMetricFamily(f"{prefix}_runs", "Runs"),
            GaugeMetricFamily(
                f"{prefix}_commands", "Commands that have not ended, by state", labels=("tenant", "state")
            ),
            GaugeMetricFamily(
                f"{prefix}_replay_seconds", "Execution that no snapshot has, of the run that has most of it"
            ),
            GaugeMetricFamily(f"{prefix}_snapshot_seconds", "Execution after which a snapshot is due (the setting)"),
        )


class WatchMetrics(Collector):
    """Reads at each scrape which samplers watch, and for how long each has been behind."""

    def __init__(self, hub: WatchHub, registry: CollectorRegistry) -> None:
        self._hub = hub
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        count, behind = self._families()
        watchers = self._hub.watchers()
        count.add_metric((), len(watchers))
        for watcher in watchers:
            behind.add_metric((watcher.sampler_id,), watcher.seconds_behind())
        yield from (count, behind)

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily("paceline_trainer_watchers", "Samplers that watch"),
            GaugeMetricFamily(
                "paceline_trainer_sampler_behind_seconds",
                "How long the sampler has lacked the newest version of a run without loading any; 0 if it has all",
                labels=("sampler",),
            ),
        )


class CertificateMetrics(Collector):
    """Reads at each scrape the certificate that GetServerInfo returns; empty until an engine has loaded a model."""

    def __init__(self, describe: Callable[[], ModelInfo], registry: CollectorRegistry) -> None:
        """`describe` returns the loaded model, and raises EngineUnavailable while there is none."""
        self._describe = describe
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from _families(None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            certificate = self._describe().certificate
        except errors.EngineUnavailable:
            return
        yield from _families(certificate)


def _families(found: ModelCertificate | None) -> Iterator[GaugeMetricFamily]:
    prefix = "paceline_trainer_certificate"
    difference = GaugeMetricFamily(
        f"{prefix}_difference", "Difference between this engine and stock transformers", labels=("of",)
    )
    bound = GaugeMetricFamily(f"{prefix}_bound", "Upper bound on that difference from rounding", labels=("of",))
    seconds = GaugeMetricFamily(f"{prefix}_seconds", "Time that the check took at the last load")
    packs = GaugeMetricFamily(f"{prefix}_packs", "1 if sequences share passes, else 0", labels=("attention",))
    if found is not None:
        difference.add_metric(("logprobs",), found.logprob_difference)
        difference.add_metric(("gradients",), found.gradient_difference)
        bound.add_metric(("logprobs",), found.logprob_bound)
        bound.add_metric(("gradients",), found.gradient_bound)
        seconds.add_metric((), found.seconds)
        packs.add_metric((found.attention,), float(found.packing is PackingMode.PACKED))
    yield from (difference, bound, seconds, packs)
