"""Metrics that every service has."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from paceline import __version__
from paceline.rpc.process_metrics import add_process_metrics, free_bytes
from paceline.rpc.tenant_labels import OTHERS, TenantLabels


def test_a_service_exports_its_process_its_python_and_its_version():
    registry = CollectorRegistry()
    add_process_metrics("trainer", registry)
    assert registry.get_sample_value("paceline_trainer_build_info", {"version": __version__}) == 1
    assert registry.get_sample_value("process_resident_memory_bytes") > 1 << 20
    assert registry.get_sample_value("process_start_time_seconds") > 0
    assert registry.get_sample_value("python_gc_collections_total", {"generation": "0"}) is not None


def test_the_room_of_a_directory_that_is_not_made_yet_is_its_disks(tmp_path):
    missing = tmp_path / "made" / "later"
    assert free_bytes(missing) > 0
    assert not missing.exists()


def test_the_room_that_cannot_be_asked_for_is_not_a_number(tmp_path):
    (tmp_path / "file").write_text("")
    assert math.isnan(free_bytes(tmp_path / "file" / "directory"))


def test_tenants_beyond_the_limit_share_a_label():
    labels = TenantLabels(most=2)
    assert [labels.of(tenant) for tenant in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]
