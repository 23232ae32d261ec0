"""Alerts, dashboard and scrape configuration: valid, and about metrics that the services have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import promql_parser as promql
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from support.doc_pages import page, section
from support.metrics_table import series
from support.stacks.deploy_files import DEPLOY, ROOT, SERVICES, image_environment, load, port

FOLDER = DEPLOY / "monitoring"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "paceline.json"
TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus adds to each series."""
KNOWN = series() | {name: set() for name in ("up", "process_resident_memory_bytes", "process_cpu_seconds_total")}
TEXT = {"type": "string", "minLength": 1}
DURATION = {"type": "string", "pattern": r"^\d+[smhd]$"}
RULES_SCHEMA = {
    "type": "object",
    "required": ["groups"],
    "additionalProperties": False,
    "properties": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": TEXT,
                    "interval": DURATION,
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr", "labels", "annotations"],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"type": "string", "pattern": r"^Paceline\w+$"},
                                "expr": TEXT,
                                "for": DURATION,
                                "labels": {"type": "object", "additionalProperties": TEXT},
                                "annotations": {"type": "object", "additionalProperties": TEXT},
                            },
                        },
                    },
                },
            },
        }
    },
}
"""Alerting rules as Prometheus' documentation defines them."""

ALERTS = {rule["alert"]: rule for group in load(FOLDER / "alerts.yaml")["groups"] for rule in group["rules"]}
PANELS = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"}
EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=name) for name, rule in ALERTS.items()),
    *(pytest.param(target["expr"], id=f"{title}-{target['refId']}") for title, panel in PANELS.items()
      for target in panel["targets"]),
]  # fmt: skip


def parts(node: object) -> Iterator[object]:
    """Yield an expression's nodes."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (child := getattr(node, name, None)) is not None:
            yield from parts(child)
    for child in getattr(node, "args", ()):
        yield from parts(child)


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    parsed = promql.parse(expression.replace("$__rate_interval", "5m"))
    return (node for node in parts(parsed) if isinstance(node, promql.VectorSelector))


def labels_of(name: str) -> set[str]:
    return set(KNOWN[name]) | TARGET_LABELS


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_exist(expression):
    found = list(selectors(expression))
    assert found
    assert not {selector.name for selector in found} - KNOWN.keys()
    for selector in found:
        matched = {matcher.name for matcher in selector.matchers.matchers} - {"__name__"}
        assert matched <= labels_of(selector.name)
    available = set.union(*(labels_of(selector.name) for selector in found))
    for node in parts(promql.parse(expression.replace("$__rate_interval", "5m"))):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= available


def test_rules_fit_their_schema_and_each_has_a_severity_and_a_summary():
    jsonschema.Draft202012Validator(RULES_SCHEMA).validate(load(FOLDER / "alerts.yaml"))
    for rule in ALERTS.values():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert "summary" in rule["annotations"]


@pytest.mark.parametrize("name", ALERTS)
def test_a_summary_uses_labels_that_the_expression_leaves(name):
    expression, summary = ALERTS[name]["expr"], ALERTS[name]["annotations"]["summary"]
    used = set(re.findall(r"\$labels\.(\w+)", summary))
    aggregated = [
        set(node.modifier.labels)
        for node in parts(promql.parse(expression))
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None
    ]
    names = [selector.name for selector in selectors(expression)]
    assert used <= (set.union(*aggregated) if aggregated else set.intersection(*map(labels_of, names)))


def test_every_alert_is_described_and_no_other():
    first_cells = re.findall(r"^\| (`Pace.*?) \|", section(page("monitoring.md"), "Alerts and dashboard"), re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(first_cells))) == set(ALERTS)


def test_prometheus_scrapes_the_ports_of_the_images_under_the_jobs_that_expressions_name():
    configuration = load(FOLDER / "prometheus.yaml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in configuration["scrape_configs"]}
    assert targets == {
        f"paceline-{service}": [
            f"{service}:{port(image_environment(service)[f'PACELINE_{service.upper()}_METRICS_LISTEN'])}"
        ]
        for service in SERVICES
    }
    assert configuration["rule_files"] == ["alerts.yaml"]


def test_panels_do_not_overlap_and_take_their_data_from_the_chosen_source():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert all(panel["datasource"]["uid"] == "${source}" for panel in PANELS.values())


def test_the_compose_file_mounts_files_that_exist_and_opens_ports_on_this_machine_alone():
    compose = load(FOLDER / "compose.yaml")
    jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec")).validate(compose)
    for service in compose["services"].values():
        mounted = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((ROOT / path).exists() for path in mounted if path.startswith("./"))
        assert {path for path in mounted if not path.startswith("./")} <= compose["volumes"].keys()
        assert all(published.startswith("127.0.0.1:") for published in service["ports"])
    provider = load(FOLDER / "grafana/provisioning/dashboards/paceline.yaml")["providers"][0]
    (mount,) = [one for one in compose["services"]["grafana"]["volumes"] if "dashboards:" in one]
    assert mount.split(":")[1] == provider["options"]["path"]
