"""`scripts/make_secrets.py` makes the files that the deployments mount."""

from __future__ import annotations

from pathlib import Path

from support.stacks.deploy_files import ROOT, compose_services, load, make_secrets

from gateway.keys import KeyRing

KEYS = "keys/keys.json"


def test_gateway_knows_the_key_that_is_made(tmp_path: Path) -> None:
    made = make_secrets(tmp_path / "secrets")
    identity = KeyRing(tmp_path / "secrets" / KEYS).identify(made["api_key"].strip())
    assert identity is not None
    assert identity.tenant == "default"
    assert made["api_key"].strip() not in made[KEYS]


def test_secrets_that_exist_stay(tmp_path: Path) -> None:
    assert make_secrets(tmp_path) == make_secrets(tmp_path)


def test_a_lost_credential_is_made_again_without_touching_the_keys(tmp_path: Path) -> None:
    before = make_secrets(tmp_path)
    (tmp_path / "credential").unlink()
    after = make_secrets(tmp_path)
    assert after["credential"] != before["credential"]
    assert after[KEYS] == before[KEYS]


def test_containers_can_read_the_files_and_other_users_of_the_machine_cannot(tmp_path: Path) -> None:
    make_secrets(tmp_path / "secrets")
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "secrets").rglob("*"):
        private = 0o600 if path.name == ".secrets.lock" else 0o644
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else private)


def test_every_secret_that_compose_mounts_is_made(tmp_path: Path) -> None:
    made = set(make_secrets(tmp_path))
    for file in ("compose.yaml", "compose.cpu.yaml"):
        declared = load(ROOT / file)["secrets"]
        assert {str(Path(secret["file"]).relative_to("deploy/secrets")) for secret in declared.values()} <= made
        assert all(name in made for spec in compose_services(file).values() for name in spec.get("secrets", []))


def test_git_never_sees_the_secrets() -> None:
    ignored = (ROOT / "deploy" / "secrets" / ".gitignore").read_text().split()
    assert ignored == ["*", "!.gitignore"]
