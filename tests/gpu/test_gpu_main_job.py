"""The main job on GPUs: trainer on the first, sampler on the second, or both on one."""

import numpy as np
import pytest
from support.models.stock_libraries import bound
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from paceline import AdamParams, Datum, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

PROMPT = list(b"Country: Peru\nCapital:")


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_sample_comes_from_the_version_that_was_published(tmp_path, engine):
    model = make_tiny_llama(tmp_path / "model")
    most = bound(model, PROMPT)
    cluster = Cluster.make(tmp_path, model, engine=engine)
    try:
        cluster.start()
        with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
            training = service.create_lora_training_client(rank=8)
            for _ in range(3):
                training.forward_backward([Datum.from_completion(PROMPT, list(b" Lima"))])
                training.optim_step(AdamParams(learning_rate=1e-2))
            published = training.publish_weights(wait_for="all").result()
            sampling = service.create_sampling_client(run_id=training.run_id, version=published.model.version)
            sequence = sampling.sample(PROMPT, 1, SamplingParams(max_tokens=16, ignore_eos=True)).result().sequences[0]
            output = training.forward([Datum.from_completion(PROMPT, sequence.tokens)]).result()
            ours = output.loss_fn_outputs[0]["logprobs"][len(PROMPT) - 1 :]
            assert float(np.abs(ours - sequence.logprobs).mean()) <= most
    finally:
        cluster.stop()
