"""Versions that are whole models, and the reference values of transformers."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM

from paceline.layout import new_run_id
from paceline.types import ServedModel
from paceline.weights import Sums, describe_weights, write_manifest, write_sums
from support.models.tiny_models import make_tiny_llama
from support.stacks.sampler_stack import PROMPT, until, version_ref
from support.stacks.weight_stack import BASE, TENANT

RUN = new_run_id()


def make_model_version(volume, version, run_id=RUN, **config):
    """Put a whole model on the volume, as the trainer publishes it; `config` overrides its configuration."""
    directory = make_tiny_llama(volume.version(run_id, version), seed=version)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    manifest = describe_weights(directory, ServedModel(BASE, run_id, version), tenant=TENANT, step=version)
    write_manifest(directory, manifest)
    write_sums(directory, manifest, Sums.BLAKE3)
    return manifest


def announce(volume, trainer, manifest):
    directory = volume.version(manifest.model.run_id, manifest.model.version)
    trainer.announce(manifest, str(directory.relative_to(volume.root)))


@torch.no_grad()
def expected(directory):
    """Return the prompt's log-probabilities, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def close(data, reference):
    return torch.allclose(torch.frombuffer(bytearray(data), dtype=torch.float32)[1:], reference, atol=1e-4)


async def publish_and_check(volume, trainer, client, version):
    """Announce the next version; check that it is acknowledged and that the served model matches transformers."""
    manifest = make_model_version(volume, version)
    announce(volume, trainer, manifest)
    ack = (await until(lambda: trainer.heard("acknowledgement")[version - 1 :]))[0]
    assert (ack.version, ack.blake3) == (version, manifest.model.blake3)
    logprobs, served = await client.logprobs(version_ref(RUN))
    assert served == manifest.model
    assert close(logprobs, expected(volume.version(RUN, version)))
