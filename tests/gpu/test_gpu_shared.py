"""GPU weights lent by another process: the same bits as own weights, seen by both, refused on another GPU."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.engine_cases import train, warmed, weights
from support.models.stock_libraries import bound
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from paceline import AdamParams, Datum, SamplingParams
from paceline.base_model.weight_sharing import read_base
from paceline.errors import BaseMismatch
from paceline.types import LoraConfig
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine.weight_sharing import open_tensors
from trainer_service.engine_link.options import EngineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROMPT = list(b"Country: Peru\nCapital:")


class Lender:
    """A process that lends a model's weights."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.directory = directory
        program = [sys.executable, str(Path(__file__).parent / "lender.py"), str(model), str(directory)]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "lent\n"

    def sum(self) -> float:
        """Return the sum of all weights as the lender sees them."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@pytest.fixture
def model(tmp_path):
    return make_tiny_llama(tmp_path / "model", tied=True, scaled_rope=True)


@pytest.fixture
def lender(model, tmp_path):
    lender = Lender(model, tmp_path / "base")
    yield lender
    lender.process.kill()
    lender.process.communicate()


def test_runs_on_lent_weights_give_the_bits_of_runs_on_weights_of_their_own(model, lender):
    before = lender.sum()
    engines = [
        PeftEngine(EngineOptions(str(model), "tiny", device="cuda", base_dir=base))
        for base in ("", str(lender.directory))
    ]
    for engine in engines:
        engine.create_run("run", LoraConfig(rank=4))
    own, borrowed = (train(warmed(engine)) for engine in engines)
    for ours, theirs in zip(own.loss_fn_outputs, borrowed.loss_fn_outputs, strict=True):
        assert ours["logprobs"].tobytes() == theirs["logprobs"].tobytes()
    ours, theirs = map(weights, engines)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert lender.sum() == before


def test_lent_weights_take_no_memory_of_the_trainer_s(lender):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensors = open_tensors(lender.directory, read_base(lender.directory), torch.device("cuda"))
    assert all(tensor.is_cuda for tensor in tensors.values())
    assert torch.cuda.memory_allocated() == before


def test_a_borrower_that_is_killed_leaves_the_weights_to_the_next(lender):
    """So does one that ends by itself. Each lowers a counter of torch's that was raised once."""
    before = lender.sum()
    opened = (
        "import os, sys, torch; from pathlib import Path; from paceline.base_model.weight_sharing import read_base; "
        "from trainer_service.engine.weight_sharing import open_tensors; path = Path(sys.argv[1]); "
        "tensors = open_tensors(path, read_base(path), torch.device('cuda')); torch.cuda.synchronize(); "
    )
    for end in ("os.kill(os.getpid(), 9)", "del tensors", "os.kill(os.getpid(), 9)", "del tensors"):
        subprocess.run([sys.executable, "-c", opened + end, str(lender.directory)], check=end == "del tensors")
        assert lender.sum() == before
    tensors = open_tensors(lender.directory, read_base(lender.directory), torch.device("cuda"))
    assert sum(float(tensor.double().sum()) for tensor in tensors.values()) == pytest.approx(before)


def test_what_the_trainer_writes_the_lender_computes_with(lender):
    before = lender.sum()
    tensors = open_tensors(lender.directory, read_base(lender.directory), torch.device("cuda"), writable=True)
    tensors["model.norm.weight"].add_(1)
    torch.cuda.synchronize()
    assert lender.sum() == pytest.approx(before + tensors["model.norm.weight"].numel(), abs=1e-3)


def test_weights_of_another_gpu_are_refused(model, lender):
    manifest = read_base(lender.directory)
    first = manifest.storages[0]
    elsewhere = replace(first, cuda=replace(first.cuda, device_uuid="00000000-0000-0000-0000-000000000000"))
    replace(manifest, storages=[elsewhere, *manifest.storages[1:]]).write(lender.directory)
    with pytest.raises(BaseMismatch, match="CUDA_VISIBLE_DEVICES"):
        PeftEngine(EngineOptions(str(model), "tiny", device="cuda", base_dir=str(lender.directory)))


def test_weights_on_a_gpu_are_refused_on_a_cpu(model, lender):
    with pytest.raises(BaseMismatch, match="computes on cpu"):
        PeftEngine(EngineOptions(str(model), "tiny", device="cpu", base_dir=str(lender.directory)))


@pytest.mark.parametrize("in_place", ["off", "paused"])
def test_trainer_and_sampler_share_a_gpu_s_weights(tmp_path, model, in_place):
    most = bound(model, PROMPT)
    cluster = Cluster.make(tmp_path, model, engine="vllm", bridge="shared", PACELINE_SAMPLER_IN_PLACE=in_place)
    try:
        cluster.start()
        with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
            whole = in_place != "off"
            training = service.create_full_training_client() if whole else service.create_lora_training_client(rank=8)
            for _ in range(2):
                training.forward_backward([Datum.from_completion(PROMPT, list(b" Lima"))])
                training.optim_step(AdamParams(learning_rate=1e-2))
                published = training.publish_weights(wait_for="all").result()
                sampling = service.create_sampling_client(run_id=training.run_id, version=published.model.version)
                params = SamplingParams(max_tokens=16, ignore_eos=True)
                (sequence,) = sampling.sample(PROMPT, 1, params).result().sequences
                output = training.forward([Datum.from_completion(PROMPT, sequence.tokens)]).result()
                ours = output.loss_fn_outputs[0]["logprobs"][len(PROMPT) - 1 :]
                assert float(np.abs(ours - sequence.logprobs).mean()) <= most
                assert [span.version for span in sequence.version_spans] == [published.model.version] * whole
    finally:
        cluster.stop()
