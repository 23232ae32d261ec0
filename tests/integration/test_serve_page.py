"""docs/how-to/serve-your-lab.md: its secrets, its settings and its units serve people over TLS, each with limits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from contextlib import ExitStack

import pytest
from support.doc_pages import ROOT
from support.models.tiny_models import make_tiny_llama
from support.page_code import PageRunner, blocks
from support.patience import PATIENCE
from support.ports import free_service_ports
from support.stacks.cluster import wait_for

import paceline
from paceline.rpc.health import wait_until_serving

pytestmark = pytest.mark.services
PAGE = ROOT / "docs" / "how-to" / "serve-your-lab.md"
UNITS = ROOT / "deploy" / "systemd"
SERVICES = {
    "trainer_service": "paceline.trainer.v1.TrainerService",
    "sampler_service": "paceline.sampler.v1.SamplerService",
    "gateway": "paceline.gateway.v1.GatewayService",
}


@pytest.fixture
def changed(tmp_path):
    """Put the page's folders below a test's own, and its host and ports on this machine."""
    port = free_service_ports()

    def change(text):
        text = text.replace("/etc/paceline", f"{tmp_path}/etc").replace("/var/lib/paceline", f"{tmp_path}/var")
        text = text.replace("lab.example.org", "localhost").replace("0.0.0.0", "127.0.0.1")
        return re.sub(r":50([01])5(\d)\b", lambda found: f":{port + 100 * int(found[1]) + int(found[2])}", text)

    return change


@pytest.fixture
def environment(changed, tmp_path):
    """The file of settings, with a tiny model, and with ports for what it leaves at its default."""
    model = make_tiny_llama(tmp_path / "model")
    text = (UNITS / "paceline.env").read_text().replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    text = text.replace("DTYPE=bfloat16", "DTYPE=float32")
    text += """
PACELINE_TRAINER_LISTEN=127.0.0.1:50051
PACELINE_SAMPLER_LISTEN=127.0.0.1:50052
PACELINE_SAMPLER_TRAINER=127.0.0.1:50051
PACELINE_GATEWAY_TRAINER=127.0.0.1:50051
PACELINE_GATEWAY_SAMPLERS=127.0.0.1:50052
PACELINE_TRAINER_HEALTH_LISTEN=127.0.0.1:50151
PACELINE_SAMPLER_HEALTH_LISTEN=127.0.0.1:50152
PACELINE_GATEWAY_HEALTH_LISTEN=127.0.0.1:50150
PACELINE_SAMPLER_ENGINE=hf
"""
    lines = [line for line in changed(text).splitlines() if line and not line.startswith("#")]
    others = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return others | dict(line.split("=", 1) for line in lines)


def unit():
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNITS / "paceline@.service")
    return parser["Service"]


def test_people_reach_the_services_with_their_keys_over_tls(changed, environment, tmp_path, monkeypatch, capsys):
    runner = PageRunner("serve-your-lab", tmp_path, monkeypatch, changed)
    page = [block for block in blocks(PAGE.read_text()) if not block.note.startswith("not run")]
    for block in page:
        if not block.note:
            runner.run(block)
    program, *arguments = unit()["ExecStart"].split()
    assert program == "/opt/paceline/bin/python"
    with ExitStack() as stack:
        for name in SERVICES:
            command = [sys.executable, *(argument.replace("%i", name) for argument in arguments)]
            log = stack.enter_context((tmp_path / f"{name}.log").open("ab"))
            process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
        for name, service in SERVICES.items():
            health = environment[f"PACELINE_{name.removesuffix('_service').upper()}_HEALTH_LISTEN"]
            assert wait_until_serving(health, service, lambda: process.poll() is not None)
        key, authority = (tmp_path / "ada.key").read_text().strip(), tmp_path / "etc" / "tls.pem"
        address = changed("lab.example.org:50050")
        with paceline.ServiceClient(address, key, tls_ca=authority) as client:
            # Services that were not up when the gateway looked for them are looked for again a little later.
            wait_for(lambda: [one for one in client.get_server_capabilities().supported_models if one.sampleable])
        capsys.readouterr()
        for block in page:
            if block.note:
                runner.run(block)
        said = capsys.readouterr().out
    assert said.startswith("vision ada\n")
    assert "runs 0 of 32\n" in said
    assert (tmp_path / "etc" / "keys.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one_that_systemd_takes(tmp_path):
    text = (UNITS / "paceline@.service").read_text().replace("/opt/paceline/bin/python", sys.executable)
    copy = tmp_path / "paceline@.service"
    copy.write_text(text.replace("User=paceline\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_and_the_unit_name_the_same_services():
    assert set(re.findall(r"paceline@(\w+)", PAGE.read_text())) == SERVICES.keys()
