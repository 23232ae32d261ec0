"""The sampler's Prometheus metrics."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.rpc.tenant_labels import TenantLabels
from sampler_service.engine.protocol import LoadTimes

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.1, 0.3, 1, 3, 10, 60)


class SamplerMetrics:
    """The sampler's own metrics; `paceline.rpc` has those of calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.versions_loaded = gauge("paceline_sampler_versions_loaded", "Versions in the engine")
        self.version_bytes = gauge("paceline_sampler_versions_loaded_bytes", "Bytes of the versions in the engine")
        self.versions_in_use = gauge("paceline_sampler_versions_in_use", "Versions that requests use, each in a slot")
        self.slots = gauge("paceline_sampler_slots", "Versions that one step can mix")
        self.slot_bytes = gauge("paceline_sampler_slots_bytes", "Memory set aside for the slots")
        self.versions_on_disk = gauge("paceline_sampler_versions_on_disk", "Versions that wait on disk")
        self.disk_bytes = gauge("paceline_sampler_versions_on_disk_bytes", "Bytes of the versions on disk")
        self.completions_running = gauge(
            "paceline_sampler_completions_running", "Completions waiting or running in the engine"
        )
        self.completions_waiting = gauge(
            "paceline_sampler_completions_waiting", "Completions that wait for their tenant's turn in the engine"
        )
        self._queue_wait_seconds = histogram(
            "paceline_sampler_queue_wait_seconds", "Waiting for the tenant's turn in the engine", ["tenant"]
        )
        self._tenants = TenantLabels()
        self.watching = gauge("paceline_sampler_watching", "1 while the sampler watches its trainer")
        self.requests_queued = gauge(
            "paceline_sampler_requests_queued", "Requests that wait for the engine's model to change"
        )
        self.rebuilding = gauge("paceline_sampler_rebuilding", "1 while the engine's model is being changed")
        self.engine_restarts = counter(
            "paceline_sampler_engine_restarts_total", "Engines that took the place of one that died"
        )
        self.group_losses = counter("paceline_sampler_group_losses_total", "Process groups that lost a member")
        self.logprob_difference = gauge(
            "paceline_sampler_logprob_difference",
            "Absolute difference of log-probabilities between this sampler and its trainer",
            ("weights", "statistic"),
        )
        self.runs_refused = gauge(
            "paceline_sampler_runs_refused", "Runs whose versions are refused until one agrees with the trainer"
        )
        self.tokens = counter("paceline_sampler_tokens_total", "Tokens sampled")
        self.fetch_seconds = histogram("paceline_sampler_fetch_seconds", "Bringing and verifying a version")
        self.load_seconds = histogram("paceline_sampler_load_seconds", "Loading a version into the engine")
        self.step_wait_seconds = histogram(
            "paceline_sampler_step_wait_seconds", "Waiting for the engine's running step before a version was loaded"
        )
        self.slot_seconds = histogram(
            "paceline_sampler_slot_seconds", "Putting a version into the engine, during which no request advances"
        )
        self.apply_seconds = histogram(
            "paceline_sampler_apply_seconds", "From a version's announcement to its being active"
        )

    def queued(self, tenant: str, seconds: float) -> None:
        """Observe how long a request of a tenant waited for its turn in the engine."""
        self._queue_wait_seconds.labels(self._tenants.of(tenant)).observe(seconds)

    def observe_load(self, times: LoadTimes) -> None:
        """Record the breakdown of a version's load time."""
        self.step_wait_seconds.observe(times.step_wait_milliseconds / 1e3)
        self.slot_seconds.observe(times.apply_milliseconds / 1e3)
