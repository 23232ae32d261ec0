"""The compose files and Dockerfiles agree with their schema, with the services' settings and with one another."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from support.stacks.deploy_files import (
    DEPLOY,
    GRPC_SERVICES,
    ROOT,
    SERVICES,
    SETTINGS,
    USER,
    compose_container,
    compose_services,
    default_port,
    image_environment,
    instructions,
    load,
    make_secrets,
    port,
    settings_of,
)

from gateway.keys import KeyRing
from paceline.files.key_changes import add_key, remove_key
from paceline.rpc.identity import Identity

FILES = ("compose.yaml", "compose.cpu.yaml")
each_file = pytest.mark.parametrize("file", FILES)
each_service = pytest.mark.parametrize("service", SERVICES)


@pytest.fixture
def credential(tmp_path: Path) -> Path:
    path = tmp_path / "credential"
    path.write_text("a-credential-of-the-tests\n")
    return path


@pytest.mark.parametrize("file", [*FILES, "deploy/compose/services.yaml"])
def test_compose_file_fits_the_compose_specification(file: str) -> None:
    jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec")).validate(load(ROOT / file))


@each_file
@each_service
def test_service_starts_with_the_variables_it_is_given(
    file: str, service: str, monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    settings = settings_of(compose_container(file, service), monkeypatch, credential)
    assert settings.secret == "a-credential-of-the-tests"
    assert not settings.insecure


@each_file
def test_services_are_given_addresses_that_others_listen_on(
    file: str, monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    gateway, trainer, sampler = (
        settings_of(compose_container(file, service), monkeypatch, credential) for service in SERVICES
    )
    assert gateway.trainer == sampler.trainer == f"trainer:{port(trainer.listen)}"
    assert gateway.samplers == (f"sampler:{port(sampler.listen)}",)
    assert trainer.model == sampler.model
    assert trainer.dtype == sampler.dtype != "auto"


@each_file
def test_trainer_and_sampler_share_the_checkpoint_volume_and_only_the_trainer_writes(
    file: str, monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    folders = [
        settings_of(compose_container(file, name), monkeypatch, credential).checkpoint_dir
        for name in ("trainer", "sampler")
    ]
    services = compose_services(file)
    assert f"checkpoints:{folders[0]}" in services["trainer"]["volumes"]
    assert f"checkpoints:{folders[1]}:ro" in services["sampler"]["volumes"]


@each_file
def test_only_the_gateway_leaves_the_network_and_only_on_loopback_by_default(file: str) -> None:
    published = {name: spec["ports"] for name, spec in compose_services(file).items() if "ports" in spec}
    http = port(compose_container(file, "gateway").environment["PACELINE_GATEWAY_HTTP_LISTEN"])
    ports = (default_port("gateway", "listen"), http)
    assert published == {"gateway": [f"${{GATEWAY_BIND:-127.0.0.1}}:{number}:{number}" for number in ports]}


@each_file
@each_service
def test_healthcheck_asks_the_health_port_for_the_service(file: str, service: str) -> None:
    container = compose_container(file, service)
    _, _, _, module, address, name = container.spec["healthcheck"]["test"]
    assert (module, name) == ("paceline.rpc.health", GRPC_SERVICES[service])
    assert port(address) == port(container.environment[f"PACELINE_{service.upper()}_HEALTH_LISTEN"])


@each_file
@each_service
def test_a_container_writes_to_its_volumes_alone_and_is_bounded(file: str, service: str) -> None:
    spec = compose_services(file)[service]
    assert spec["read_only"]
    assert spec["cap_drop"] == ["ALL"]
    assert 0 < spec["pids_limit"] <= 4096
    assert "mem_limit" in spec


@each_file
def test_the_gateways_memory_holds_the_messages_that_it_admits(
    file: str, monkeypatch: pytest.MonkeyPatch, credential: Path
) -> None:
    """A message takes up to three times its bytes (docs/operations.md, quotas)."""
    container = compose_container(file, "gateway")
    gateway = settings_of(container, monkeypatch, credential)
    memory = container.spec["mem_limit"].removeprefix("${GATEWAY_MEMORY:-").removesuffix("g}")
    assert 0 < 3 * gateway.max_bytes_in_flight < int(memory) << 30


@each_file
def test_volumes_and_secrets_that_services_use_are_declared(file: str) -> None:
    document = load(ROOT / file)
    for spec in compose_services(file).values():
        sources = [
            volume.split(":")[0] for volume in spec.get("volumes", []) if isinstance(volume, str) and ":" in volume
        ]
        assert {source for source in sources if not source.startswith(".")} <= set(document["volumes"])
        assert all((ROOT / source).exists() for source in sources if source.startswith("."))
        assert set(spec.get("secrets", [])) <= set(document["secrets"])


@each_file
def test_a_key_that_is_removed_is_refused_at_once(
    file: str, monkeypatch: pytest.MonkeyPatch, credential: Path, tmp_path: Path
) -> None:
    keys_file = settings_of(compose_container(file, "gateway"), monkeypatch, credential).keys_file
    (mount,) = [volume for volume in compose_services(file)["gateway"]["volumes"] if isinstance(volume, dict)]
    # Removing a key replaces the file, which a mount of the file itself would not show.
    assert Path(mount["target"]) == keys_file.parent
    assert mount["read_only"]

    make_secrets(tmp_path / "secrets")
    assert mount["source"].startswith("./deploy/secrets/")
    mounted = tmp_path / mount["source"].removeprefix("./deploy/") / keys_file.name
    ring = KeyRing(mounted)
    token = add_key(mounted, "team-a", "laptop")
    assert ring.identify(token) == Identity("team-a", "laptop")
    remove_key(mounted, "laptop")
    assert ring.identify(token) is None
    # The container reads it as another user.
    assert mounted.stat().st_mode & 0o777 == 0o644


@each_file
def test_every_image_can_be_built_from_the_repository(file: str) -> None:
    for spec in compose_services(file).values():
        build = spec["build"]
        context = DEPLOY / "compose" / build["context"] if build["context"] == "../.." else ROOT / build["context"]
        assert context.resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()


@each_file
@each_service
def test_grace_period_outlasts_the_drain(file: str, service: str) -> None:
    grace = compose_services(file)[service]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > SETTINGS[service].model_fields["drain_seconds"].default


def test_trainer_and_sampler_each_have_a_gpu() -> None:
    services = compose_services("compose.yaml")
    devices = {
        name: services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("trainer", "sampler")
    }
    assert devices == {"trainer": ["0"], "sampler": ["1"]}


def test_trainer_and_sampler_on_cpu_have_cores_of_their_own() -> None:
    services = compose_services("compose.cpu.yaml")
    assert services["trainer"]["cpuset"] == "${TRAINER_CPUS:-0}"
    assert services["sampler"]["cpuset"] == "${SAMPLER_CPUS:-1}"
    for service in ("trainer", "sampler"):
        assert compose_container("compose.cpu.yaml", service).environment["OMP_NUM_THREADS"] == "1"
    assert compose_container("compose.cpu.yaml", "sampler").environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_model_of_the_cpu_variant_is_in_its_images(monkeypatch: pytest.MonkeyPatch, credential: Path) -> None:
    for service in ("trainer", "sampler"):
        model = settings_of(compose_container("compose.cpu.yaml", service), monkeypatch, credential).model
        made = [rest for name, rest in instructions(service) if name == "RUN" and "make_model.py" in rest]
        assert any(model in rest.split() for rest in made)


@each_service
def test_image_runs_as_a_user_that_is_not_root(service: str) -> None:
    last = [rest for name, rest in instructions(service) if name == "USER"][-1]
    assert last == f"{USER}:{USER}"


@each_service
def test_image_starts_the_service_without_a_shell(service: str) -> None:
    module = "gateway" if service == "gateway" else f"{service}_service"
    assert ("ENTRYPOINT", f'["python", "-m", "paceline.services", "{module}"]') in instructions(service)


@each_service
def test_image_listens_everywhere_on_the_default_ports(service: str) -> None:
    environment, prefix = image_environment(service), f"PACELINE_{service.upper()}_"
    assert environment[f"{prefix}LISTEN"] == f"0.0.0.0:{default_port(service, 'listen')}"
    assert environment[f"{prefix}HEALTH_LISTEN"] == f"0.0.0.0:{default_port(service, 'health_listen')}"
    ports = [port(environment[f"{prefix}{name}"]) for name in ("LISTEN", "HEALTH_LISTEN", "METRICS_LISTEN")]
    (exposed,) = [rest for name, rest in instructions(service) if name == "EXPOSE"]
    assert [int(number) for number in exposed.split()] == ports


def test_gateway_image_installs_neither_torch_nor_vllm() -> None:
    copied = [rest.split()[0] for name, rest in instructions("gateway") if name == "COPY"]
    assert "requirements/gateway.txt" in copied
    pins = (ROOT / "requirements" / "gateway.txt").read_text()
    assert not any(line.startswith(("torch", "vllm", "transformers")) for line in pins.splitlines())


def test_trainer_and_sampler_images_share_their_large_layers() -> None:
    both = [instructions(service) for service in ("trainer", "sampler")]
    same = [first for first, second in zip(*both, strict=True) if first == second]
    assert any("pip install" in rest and "requirement" in rest for name, rest in same if name == "RUN")
    first_difference = next(at for at, (one, two) in enumerate(zip(*both, strict=True)) if one != two)
    assert both[0][first_difference][0] == "ENV"


def test_build_context_leaves_out_secrets_and_checkpoints() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert not any(path.startswith(("deploy", "tests", ".")) for path in allowed)
