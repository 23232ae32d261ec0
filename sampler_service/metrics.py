"""The sampler's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sampler_service.engine.protocol import LoadTimes

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.1, 0.3, 1, 3, 10, 60)


class SamplerMetrics:
    """The sampler's own metrics; `paceline.rpc` has those of calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.versions_loaded = Gauge("paceline_sampler_versions_loaded", "Versions in the engine", registry=registry)
        self.version_bytes = Gauge(
            "paceline_sampler_versions_loaded_bytes", "Bytes of the versions in the engine", registry=registry
        )
        self.versions_in_use = Gauge(
            "paceline_sampler_versions_in_use", "Versions that requests use, each in a slot", registry=registry
        )
        self.slots = Gauge("paceline_sampler_slots", "Versions that one step can mix", registry=registry)
        self.slot_bytes = Gauge("paceline_sampler_slots_bytes", "Memory set aside for the slots", registry=registry)
        self.versions_on_disk = Gauge(
            "paceline_sampler_versions_on_disk", "Versions that wait on disk", registry=registry
        )
        self.disk_bytes = Gauge(
            "paceline_sampler_versions_on_disk_bytes", "Bytes of the versions on disk", registry=registry
        )
        self.completions_running = Gauge(
            "paceline_sampler_completions_running", "Completions waiting or running in the engine", registry=registry
        )
        self.completions_waiting = Gauge(
            "paceline_sampler_completions_waiting",
            "Completions that wait for their tenant's turn in the engine",
            registry=registry,
        )
        self.requests_queued = Gauge(
            "paceline_sampler_requests_queued", "Requests that wait for the engine's model to change", registry=registry
        )
        self.rebuilding = Gauge(
            "paceline_sampler_rebuilding", "1 while the engine's model is being changed", registry=registry
        )
        self.engine_restarts = Counter(
            "paceline_sampler_engine_restarts_total", "Engines that took the place of one that died", registry=registry
        )
        self.group_losses = Counter(
            "paceline_sampler_group_losses_total", "Process groups that lost a member", registry=registry
        )
        self.logprob_difference = Gauge(
            "paceline_sampler_logprob_difference",
            "Absolute difference of log-probabilities between this sampler and its trainer",
            ("weights", "statistic"),
            registry=registry,
        )
        self.runs_refused = Gauge(
            "paceline_sampler_runs_refused",
            "Runs whose versions are refused until one agrees with the trainer",
            registry=registry,
        )
        self.tokens = Counter("paceline_sampler_tokens_total", "Tokens sampled", registry=registry)
        self.fetch_seconds = Histogram(
            "paceline_sampler_fetch_seconds", "Bringing and verifying a version", buckets=_SECONDS, registry=registry
        )
        self.load_seconds = Histogram(
            "paceline_sampler_load_seconds", "Loading a version into the engine", buckets=_SECONDS, registry=registry
        )
        self.step_wait_seconds = Histogram(
            "paceline_sampler_step_wait_seconds",
            "Waiting for the engine's running step before a version was loaded",
            buckets=_SECONDS,
            registry=registry,
        )
        self.slot_seconds = Histogram(
            "paceline_sampler_slot_seconds",
            "Putting a version into the engine, during which no request advances",
            buckets=_SECONDS,
            registry=registry,
        )
        self.apply_seconds = Histogram(
            "paceline_sampler_apply_seconds",
            "From a version's announcement to its being active",
            buckets=_SECONDS,
            registry=registry,
        )

    def observe_load(self, times: LoadTimes) -> None:
        """Record the breakdown of a version's load time."""
        self.step_wait_seconds.observe(times.step_wait_milliseconds / 1e3)
        self.slot_seconds.observe(times.apply_milliseconds / 1e3)
