"""The Kubernetes manifests agree with their schemas, with the services' settings and with the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from support.stacks.deploy_files import (
    DEPLOY,
    GRPC_SERVICES,
    SERVICES,
    SETTINGS,
    USER,
    Container,
    default_port,
    kubernetes_container,
    kustomized,
    load,
    port,
    settings_of,
)

K8S = DEPLOY / "k8s"
OLDEST = "1.27"
"""The first release in which gRPC probes are stable."""
each_service = pytest.mark.parametrize("service", SERVICES)


@pytest.fixture
def credential(tmp_path: Path) -> Path:
    path = tmp_path / "credential"
    path.write_text("a-credential-of-the-tests\n")
    return path


def objects(service: str, kind: str) -> list[dict[str, Any]]:
    return [item for item in kustomized(K8S / service) if item["kind"] == kind]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def ports_of(container: Container) -> dict[str, int]:
    return {item["name"]: item["containerPort"] for item in container_of(container.spec)["ports"]}


@pytest.mark.parametrize("folder", ["volume", *SERVICES])
@pytest.mark.parametrize("version", [OLDEST, "1.37"])
def test_objects_fit_the_schemas_of_kubernetes(folder: str, version: str) -> None:
    for item in kustomized(K8S / folder):
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("folder", ["volume", *SERVICES])
def test_folder_applies_by_itself(folder: str) -> None:
    found = kustomized(K8S / folder)
    kept = {item["metadata"]["name"] for item in kustomized(K8S / "volume")}
    for item in found:
        pod = item["spec"]["template"]["spec"] if item["kind"] in {"Deployment", "StatefulSet"} else {}
        claims = [
            volume["persistentVolumeClaim"] for volume in pod.get("volumes", []) if "persistentVolumeClaim" in volume
        ]
        assert {claim["claimName"] for claim in claims} <= kept


def test_deleting_a_folder_deletes_nothing_of_another() -> None:
    """`kubectl delete -k` deletes every object of a kustomization, also those that it shares with others."""
    folders = sorted(path.parent for path in K8S.rglob("kustomization.yaml"))
    found = [(item["kind"], item["metadata"]["name"]) for folder in folders for item in kustomized(folder)]
    assert len(found) == len(set(found)), sorted(one for one in found if found.count(one) > 1)


@each_service
def test_deleting_a_service_deletes_no_data(service: str) -> None:
    kinds = {item["kind"] for item in kustomized(K8S / service)}
    assert not kinds & {"PersistentVolumeClaim", "PersistentVolume", "StorageClass", "Namespace", "Secret"}
    for workload in objects(service, "StatefulSet"):
        policy = workload["spec"].get("persistentVolumeClaimRetentionPolicy", {})
        assert "Delete" not in policy.values()


@pytest.mark.parametrize("folder", ["volume", *SERVICES])
def test_every_file_of_a_folder_is_applied(folder: str) -> None:
    listed = set(load(K8S / folder / "kustomization.yaml")["resources"])
    assert listed == {path.name for path in (K8S / folder).iterdir()} - {"kustomization.yaml"}


@each_service
def test_service_starts_with_the_variables_it_is_given(
    service: str, monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    settings = settings_of(kubernetes_container(service), monkeypatch, credential)
    assert settings.secret == "a-credential-of-the-tests"
    assert not settings.insecure


def test_services_are_given_addresses_that_others_listen_on(monkeypatch: pytest.MonkeyPatch, credential: Path) -> None:
    gateway, trainer, sampler = (
        settings_of(kubernetes_container(service), monkeypatch, credential) for service in SERVICES
    )
    assert gateway.trainer == sampler.trainer == f"paceline-trainer:{port(trainer.listen)}"
    (pods,) = objects("sampler", "StatefulSet")
    assert gateway.samplers == tuple(
        f"paceline-sampler-{number}.{pods['spec']['serviceName']}:{port(sampler.listen)}"
        for number in range(pods["spec"]["replicas"])
    )
    assert trainer.model == sampler.model
    assert trainer.dtype == sampler.dtype != "auto"


@each_service
def test_ports_are_those_that_the_service_listens_on(service: str) -> None:
    container = kubernetes_container(service)
    prefix = f"PACELINE_{service.upper()}_"
    names = {"grpc": "LISTEN", "health": "HEALTH_LISTEN", "metrics": "METRICS_LISTEN"}
    assert ports_of(container) == {name: port(container.environment[prefix + field]) for name, field in names.items()}
    (exposed,) = objects(service, "Service")
    assert [item["port"] for item in exposed["spec"]["ports"]] == [ports_of(container)["grpc"]]


@each_service
def test_probes_ask_the_health_port_for_services_that_exist(service: str) -> None:
    container = kubernetes_container(service)
    spec, health = container_of(container.spec), ports_of(container)["health"]
    ready = {"port": health, "service": GRPC_SERVICES[service]}
    assert spec["readinessProbe"]["grpc"] == spec["startupProbe"]["grpc"] == ready
    # The empty name reports that the process is alive, even while it is busy or draining.
    assert spec["livenessProbe"]["grpc"] == {"port": health}


@each_service
def test_kubernetes_adds_no_variables_that_the_settings_would_refuse(service: str) -> None:
    assert kubernetes_container(service).spec["enableServiceLinks"] is False


@each_service
def test_pod_runs_with_the_least_rights(service: str) -> None:
    pod = kubernetes_container(service).spec
    security, own = pod["securityContext"], container_of(pod)["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["fsGroup"]) == (True, USER, USER)
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False


@each_service
def test_grace_period_outlasts_the_drain(service: str) -> None:
    drain = SETTINGS[service].model_fields["drain_seconds"].default
    assert kubernetes_container(service).spec["terminationGracePeriodSeconds"] > drain


@each_service
def test_files_that_variables_name_are_mounted(service: str) -> None:
    container = kubernetes_container(service)
    mounts = [Path(mount["mountPath"]) for mount in container_of(container.spec)["volumeMounts"]]
    named = [Path(value) for name, value in container.environment.items() if name.endswith(("_FILE", "_DIR", "_HOME"))]
    assert all(any(path.is_relative_to(mount) for mount in mounts) for path in named)


@pytest.mark.parametrize("service", ["trainer", "sampler"])
def test_trainer_and_sampler_have_a_gpu_and_memory_for_staging(service: str) -> None:
    pod = kubernetes_container(service).spec
    assert container_of(pod)["resources"]["limits"]["nvidia.com/gpu"] == 1
    (shm,) = [mount["name"] for mount in container_of(pod)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == shm]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_checkpoints_are_shared_and_only_the_trainer_writes() -> None:
    claims = {item["metadata"]["name"]: item["spec"] for item in kustomized(K8S / "volume")}
    assert claims["paceline-checkpoints"]["accessModes"] == ["ReadWriteMany"]
    mounts = {
        service: next(
            mount
            for mount in container_of(kubernetes_container(service).spec)["volumeMounts"]
            if mount["name"] == "checkpoints"
        )
        for service in ("trainer", "sampler")
    }
    assert "readOnly" not in mounts["trainer"]
    assert mounts["sampler"]["readOnly"]


def test_trainer_is_the_only_writer_of_its_volume() -> None:
    (trainer,) = objects("trainer", "StatefulSet")
    assert trainer["spec"]["replicas"] == 1


@pytest.mark.parametrize(("service", "callers"), [("trainer", ["gateway", "sampler"]), ("sampler", ["gateway"])])
def test_network_policy_lets_in_only_those_that_call(service: str, callers: list[str]) -> None:
    (policy,) = objects(service, "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == service
    (rule,) = [rule for rule in policy["spec"]["ingress"] if {"port": "grpc"} in rule["ports"]]
    (source,) = rule["from"]
    (expression,) = source["podSelector"]["matchExpressions"]
    assert expression == {"key": "app.kubernetes.io/component", "operator": "In", "values": callers}


def test_network_policy_of_the_gateway_opens_its_port_and_lets_it_call_the_services_alone() -> None:
    (policy,) = objects("gateway", "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert {"ports": [{"port": "grpc"}]} in policy["spec"]["ingress"]
    called, _names = policy["spec"]["egress"]
    (target,) = called["to"]
    assert target["podSelector"]["matchExpressions"][0]["values"] == ["trainer", "sampler"]
    assert called["ports"] == [{"port": default_port(name, "listen")} for name in ("trainer", "sampler")]


@each_service
def test_selectors_match_the_pods(service: str) -> None:
    (workload,) = [*objects(service, "Deployment"), *objects(service, "StatefulSet")]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    (exposed,) = objects(service, "Service")
    assert workload["spec"]["selector"]["matchLabels"] == exposed["spec"]["selector"] == labels
    budgets = objects(service, "PodDisruptionBudget")
    assert all(budget["spec"]["selector"]["matchLabels"] == labels for budget in budgets)
    assert bool(budgets) == (service == "gateway")


def test_a_key_that_is_removed_is_refused(monkeypatch: pytest.MonkeyPatch, credential: Path) -> None:
    """Kubernetes updates a changed secret in its pods, except where it is mounted with subPath."""
    container = kubernetes_container("gateway")
    mounts = {mount["name"]: mount for mount in container_of(container.spec)["volumeMounts"]}
    assert not any("subPath" in mount for mount in mounts.values())
    keys_file = settings_of(container, monkeypatch, credential).keys_file
    assert Path(mounts["keys"]["mountPath"]) == keys_file.parent


def test_the_gateways_memory_holds_the_messages_that_it_admits(
    monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    """A message takes up to three times its bytes (docs/operations.md, quotas)."""
    container = kubernetes_container("gateway")
    gateway = settings_of(container, monkeypatch, credential)
    trainer = settings_of(kubernetes_container("trainer"), monkeypatch, credential)
    memory = container_of(container.spec)["resources"]["limits"]["memory"]
    assert memory.endswith("Gi")
    assert 0 < 3 * gateway.max_bytes_in_flight < int(memory.removesuffix("Gi")) << 30
    assert trainer.max_waiting_bytes_per_tenant < gateway.max_bytes_in_flight_per_tenant < gateway.max_bytes_in_flight
