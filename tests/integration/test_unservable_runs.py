"""Runs that no watching sampler can serve, on vLLM and a model whose output head gets no adapter there."""

from __future__ import annotations

import logging
import warnings

import httpx
import pytest
import tinker
from support.models.tiny_models import make_tiny_qwen2
from support.stacks.cluster import Cluster, wait_for
from tinker import types

from paceline import errors
from paceline.errors import NotServable, NotServableWarning

pytestmark = pytest.mark.services
PROMPT = [5, 6, 7, 8]
HEAD = r"serves no adapter on lm_head: set train_unembed=False"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unservable")
    model = make_tiny_qwen2(folder / "model")
    settings = {"PACELINE_TRAINER_MAX_LORA_RANK": "32", "PACELINE_TRAINER_LOG_FORMAT": "json"}
    cluster = Cluster.make(folder / "state", model, engine="vllm", **settings)
    with cluster.running():
        cluster.agreements(least=1)  # then the sampler watches
        yield cluster


@pytest.fixture(scope="module")
def address(cluster):
    return "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]


@pytest.fixture
def post(cluster, address):
    with httpx.Client(headers={"Authorization": f"Bearer {cluster.api_key}"}, timeout=60) as client:
        yield lambda where, **body: client.post(f"{address}{where}", json=body)


RUNS = {
    "head": ({"train_unembed": True}, "lora.train_unembed", HEAD),
    "named": ({"target_modules": ["q_proj", "lm_head"]}, "lora.target_modules", "leave it out of target_modules"),
    "rank": ({"rank": 32}, "lora.rank", "no adapter of rank 32: set rank to at most 16"),
}


@pytest.mark.parametrize(("lora", "field", "message"), RUNS.values(), ids=RUNS)
def test_a_run_is_warned_of_when_it_is_created_and_refused_when_it_is_published(service, lora, field, message):
    with pytest.warns(NotServableWarning, match=f"saved, but not published; sampler .* {message}"):
        training = service.create_lora_training_client(**{"rank": 4, **lora})
    with pytest.raises(NotServable, match=message) as failure:
        training.publish_weights(wait_for="none").result()
    assert (failure.value.code, failure.value.field) == (errors.Code.FAILED_PRECONDITION, field)
    assert training.save_weights_for_sampler("mine").result().path.endswith("/sampler/mine")
    assert training.get_info().latest_version == 0


def test_a_run_of_all_parameters_is_refused_by_samplers_of_adapters(service):
    with pytest.warns(NotServableWarning, match="serves adapters and no whole models: train an adapter"):
        training = service.create_full_training_client()
    with pytest.raises(NotServable, match="PACELINE_SAMPLER_SERVES=models"):
        training.publish_weights(wait_for="none").result()


def test_a_run_that_can_be_served_is_published_without_a_warning(service):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotServableWarning)
        training = service.create_lora_training_client(rank=4)
    assert training.publish_weights(wait_for="all").result().model.version == 1
    assert training.get_info().parameters.train_unembed is False


def test_the_default_of_tinkers_sdk_trains_what_can_be_served_and_says_so(cluster, address, service, post, caplog):
    with caplog.at_level(logging.WARNING, "tinker"):
        sdk = tinker.ServiceClient(base_url=address, api_key=f"tml-{cluster.api_key}")
        training = sdk.create_lora_training_client(base_model="model", rank=4).result()
    assert "no sampler here serves an adapter on lm_head" in caplog.text
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2)
    assert sampling.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    (run, *_) = service.list_runs()
    assert (run.parameters.train_unembed, "lm_head" in run.adapted_modules) == (False, False)
    path = training.save_state("mine").result().path
    info = post("/api/v1/weights_info", tinker_path=path).json()
    assert (info["lora_rank"], info["train_unembed"]) == (4, False)
    assert wait_for(lambda: "model not served as asked" in cluster.gateway.log.read_text())
    sdk.close("success").result()


def test_the_other_apis_say_what_is_not_served(post):
    made = post("/v1/lora/create", base_model="model", rank=32).json()
    assert "no adapter of rank 32" in made["warnings"][0]
    refused = post("/v1/weights/save", session_id=made["session_id"], name="mine")
    assert (refused.status_code, "no adapter of rank 32" in refused.text) == (422, True)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    refused = post("/train", conversations=[messages], lora={"rank": 32})
    assert (refused.status_code, "lora.rank" in refused.text) == (400, True)
