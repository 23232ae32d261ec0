"""A client written from MetaClaw's documented JSON, and one for Atropos' /generate, on vLLM."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from paceline import SamplingParams
from paceline.files.key_changes import add_key

pytestmark = pytest.mark.services
WRONG_DATUMS = (
    ({"model_input_tokens": [10**6] * 16}, "datums[1].model_input_tokens"),
    ({"model_input_tokens": "x"}, "datums[1].model_input_tokens"),
    ({"target_tokens": [1]}, "datums[1].target_tokens"),
    ({"target_tokens": ["x"]}, "datums[1].target_tokens[0]"),
    ({"advantages": [1.0]}, "datums[1].advantages"),
)
PROMPT, RESPONSE = list(b"Country: Peru"), list(b" Lima")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metaclaw")
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model"), engine="vllm")
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def address(cluster):
    return "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]


@pytest.fixture(scope="module")
def call(cluster, address):
    with httpx.Client(headers={"Authorization": f"Bearer {cluster.api_key}"}, timeout=60) as client:

        def post(where, *, status=200, **body):
            answer = client.post(f"{address}{where}", json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        yield post


@pytest.fixture
def session(call):
    return call("/v1/lora/create", base_model="some/folder/model", rank=4)["session_id"]


def datum(advantage=1.0, logprob=-4.0):
    tokens = PROMPT + RESPONSE
    return {
        "model_input_tokens": tokens[:-1],
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * (len(PROMPT) - 1) + [logprob] * len(RESPONSE),
        "advantages": [0.0] * (len(PROMPT) - 1) + [advantage] * len(RESPONSE),
    }


def test_the_loop_trains_saves_samples_and_loads(call, session):
    made = call("/v1/train/forward_backward", session_id=session, datums=[datum(), datum(-0.5)])
    assert made.keys() == {"status", "loss", "total_tokens", "num_datums"}
    assert (made["total_tokens"], made["num_datums"]) == (2 * len(RESPONSE), 2)
    step = call("/v1/train/optim_step", session_id=session, learning_rate=1e-2)
    assert step.keys() == {"status", "step", "grad_norm", "avg_loss", "learning_rate"}
    assert (step["step"], step["learning_rate"], step["avg_loss"]) == (1, 1e-2, made["loss"])
    saved = call("/v1/weights/save", session_id=session)
    assert saved["adapter_path"].endswith("/sampler/adapter_step_0001")
    state = call("/v1/checkpoint/save", session_id=session, name="one")
    sample = call("/v1/sample", tokens=PROMPT, num_samples=3, max_tokens=4)
    assert [len(one["tokens"]) == len(one["logprobs"]) for one in sample["sequences"]] == [True] * 3
    assert {one["stop_reason"] for one in sample["sequences"]} <= {"stop", "length"}
    assert sample["version"] == 1
    call("/v1/train/forward_backward", session_id=session, datums=[datum()])
    assert call("/v1/train/optim_step", session_id=session)["step"] == 2
    assert call("/v1/checkpoint/load", session_id=session, path=state["path"])["step"] == 1
    call("/v1/train/forward_backward", session_id=session, datums=[datum()])
    assert call("/v1/train/optim_step", session_id=session)["step"] == 2


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_losses_are_means_over_the_tokens_that_have_an_advantage(cluster, call, session, loss_fn):
    data = [datum(0.7, -5.5), datum(-0.3, -5.0)]
    answer = call("/v1/train/forward_backward", session_id=session, datums=data, loss_fn=loss_fn)
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        scores = (
            service.create_sampling_client(base_model="model").compute_logprobs(PROMPT + RESPONSE).result().logprobs
        )
    logprobs = np.array(scores[len(PROMPT) :], np.float64)
    wanted = []
    for one in data:
        advantage, old = one["advantages"][-1], one["logprobs"][-1]
        ratio = np.exp(logprobs - old)
        clipped = np.clip(ratio, 0.8, 1.2)
        loss = {
            "importance_sampling": -ratio * advantage,
            "ppo": -np.minimum(ratio * advantage, clipped * advantage),
            "cispo": -clipped * logprobs * advantage,
        }[loss_fn]
        wanted.append(loss.mean())
    assert answer["loss"] == pytest.approx(np.mean(wanted), rel=1e-3)


def test_several_sessions_live_beside_each_other(call):
    one, other = (call("/v1/lora/create", base_model="model", rank=2)["session_id"] for _ in range(2))
    for session, rate in ((one, 1e-2), (other, 0.0)):
        call("/v1/train/forward_backward", session_id=session, datums=[datum()])
        call("/v1/train/optim_step", session_id=session, learning_rate=rate)
        call("/v1/weights/save", session_id=session, name="x")
    versions = [
        call("/v1/sample", tokens=PROMPT, max_tokens=1, session_id=session)["version"] for session in (one, other)
    ]
    assert versions == [1, 1]


def test_what_is_wrong_is_told_by_a_status_and_a_field(cluster, call, session, address):
    key = {"Authorization": f"Bearer {cluster.api_key}"}
    call("/v1/train/forward_backward", session_id=session, datums=[datum()], loss_fn="nothing", status=400)
    none = call("/v1/train/forward_backward", session_id=session, datums=[], status=400)
    assert none["error"]["param"] == "datums"
    absent = call("/v1/train/optim_step", session_id="run-" + "0" * 32, status=404)
    assert absent["error"]["param"] == "session_id"
    call("/v1/train/optim_step", session_id="../../etc", status=404)
    call("/v1/checkpoint/save", session_id=session, name="../../x", status=400)
    call("/v1/checkpoint/load", session_id=session, path="/etc/passwd", status=400)
    for fields, place in WRONG_DATUMS:
        wrong = datum() | fields
        refusal = call("/v1/train/forward_backward", session_id=session, datums=[datum(), wrong], status=400)
        assert refusal["error"]["param"] == place
    call("/v1/lora/create", base_model="other", status=404)
    assert call("/v1/sample", tokens=[], status=400)["error"]["param"] == "tokens"
    assert call("/v1/sample", tokens=[1], temperature=-1, status=400)["error"]["param"] == "temperature"
    assert call("/v1/lora/create", rank=9999, status=400)["error"]["param"] == "rank"
    for content in (b'{"tokens": [1', b'{"base_model": "\xff"}'):
        broken = httpx.post(f"{address}/v1/sample", content=content, headers=key | {"content-type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["param"]) == (400, None)
        assert broken.json()["error"]["code"] == "UNREADABLE_MESSAGE"
    assert call("/v1/lora/create", rank="x", status=400)["error"]["param"] == "rank"
    assert httpx.post(f"{address}/v1/lora/create", json={}).status_code == 401
    call("/v1/train/forward_backward", session_id=session, datums=[datum()])
    assert call("/v1/train/optim_step", session_id=session)["step"] == 1


def test_anothers_session_looks_absent(cluster, session, address):
    key = add_key(cluster.state / "keys.json", "other", "other")
    for path, body in (
        ("train/optim_step", {}),
        ("weights/save", {}),
        ("checkpoint/save", {"name": "a"}),
        ("sample", {"tokens": PROMPT, "max_tokens": 1}),
    ):
        answer = httpx.post(
            f"{address}/v1/{path}", json={"session_id": session, **body}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 404, answer.text


def test_health_is_open_and_tells_more_to_who_shows_a_key(cluster, address):
    assert httpx.get(f"{address}/v1/health").json() == {"status": "healthy", "version": "0.1.0"}
    told = httpx.get(f"{address}/v1/health", headers={"Authorization": f"Bearer {cluster.api_key}"}).json()
    assert (told["model"], told["inference_backend"]) == ("model", "vllm")


def test_a_chat_without_a_model_is_of_the_newest_session(call, session, address, cluster):
    call("/v1/weights/save", session_id=session, name="chat")
    answer = httpx.post(
        f"{address}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        headers={"Authorization": f"Bearer {cluster.api_key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-paceline-run"] == session


def test_null_means_that_a_field_is_not_set(call, session):
    call("/v1/weights/save", session_id=session, name="null")
    chat = {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "ignore_eos": True, "logprobs": True}
    nothing = dict.fromkeys(("temperature", "top_k", "top_p", "max_tokens", "max_completion_tokens"))
    plain, nulls = (call("/v1/chat/completions", **chat, **more)["choices"][0] for more in ({}, nothing))
    assert plain["message"]["content"] == nulls["message"]["content"]
    assert len(plain["logprobs"]["content"]) > 400  # MetaClaw's limit is beyond this context
    nothing = dict.fromkeys(("temperature", "top_k", "top_p", "num_samples", "stop"))
    sample = call("/v1/sample", tokens=PROMPT, session_id=session, max_tokens=None, **nothing)
    assert len(sample["sequences"]) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_is_scored_once_whatever_is_sampled_after_it(call, service, n):
    asked = {"prompt": PROMPT, "max_tokens": 2, "n": n, "prompt_logprobs": 0}
    for choice in call("/v1/completions", model="model", **asked)["choices"]:
        told = [
            position[str(token)]["logprob"]
            for position, token in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
        ]
        scores = service.create_sampling_client(base_model="model").compute_logprobs(PROMPT).result().logprobs
        assert told == pytest.approx(list(scores[1:]), abs=1e-4)


def test_generate_answers_as_atropos_expects(cluster, call, service):
    sampling = service.create_sampling_client(base_model="model")
    greedy = sampling.sample(PROMPT, 1, SamplingParams(max_tokens=5, temperature=0)).result().sequences[0]
    answer = call(
        "/weights/model/generate",
        prompt={"prompt_token_ids": PROMPT},
        logprobs=0,
        max_tokens=5,
        temperature=0.0,
        n=1,
        prompt_logprobs=2,
    )
    tokens = [int(next(iter(position[0]))) for position in answer["logprobs"][0]]
    logprobs = [next(iter(position[0].values())) for position in answer["logprobs"][0]]
    assert tokens == greedy.tokens.tolist() == answer["token_ids"][0]
    assert np.allclose(logprobs, greedy.logprobs, atol=1e-4)
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["finish_reasons"] in (["length"], ["stop"])
    scores = sampling.compute_logprobs(PROMPT).result().logprobs
    told = answer["prompt_logprobs"]
    assert told[0] is None
    assert [row[str(token)] for row, token in zip(told[1:], PROMPT[1:], strict=True)] == pytest.approx(
        list(scores[1:]), abs=1e-4
    )


@pytest.mark.parametrize("top", [-1, 10**12, True, "2"])
def test_generate_refuses_prompt_logprobs_before_it_samples(call, top):
    prompt = {"prompt_token_ids": PROMPT}
    answer = call("/weights/model/generate", prompt=prompt, max_tokens=1, prompt_logprobs=top, status=400)
    assert "prompt_logprobs" in str(answer)


def test_generate_by_a_run_s_name_moves_with_its_versions(call, service, address):
    training = service.create_lora_training_client(rank=2, user_metadata={"name": "policy"})
    call("/weights/policy/generate", prompt="a", status=404)
    for version in ("1", "2"):
        training.publish_weights().result()
        answer = httpx.post(
            f"{address}/weights/policy/generate",
            json={"prompt": "a", "max_tokens": 1},
            headers={"Authorization": f"Bearer {service.transport.connection.api_key}"},
            timeout=60,
        )
        assert answer.headers["x-paceline-version"] == version
    assert httpx.get(
        f"{address}/weights/policy/health",
        headers={"Authorization": f"Bearer {service.transport.connection.api_key}"},
    ).is_success
    call("/generate", prompt="a", status=400)
    image = {"prompt_token_ids": [1], "multi_modal_data": {"image": "x"}}
    call("/weights/model/generate", prompt=image, status=400)


def test_health_of_weights_is_that_of_a_run_that_exists(address, service):
    headers = {"Authorization": f"Bearer {service.transport.connection.api_key}"}
    run_id = service.create_lora_training_client(rank=2).run_id
    for name, status in (("model", 200), (run_id, 200), ("run-" + "0" * 32, 404), ("nobody", 404)):
        assert httpx.get(f"{address}/weights/{name}/health", headers=headers).status_code == status


def test_a_name_stays_with_the_run_that_has_published(call, service, tmp_path):
    training = service.create_lora_training_client(rank=2, user_metadata={"name": "kept"})
    training.publish_weights().result()
    path = training.save_state("a").result().path
    service.create_training_client_from_state(path)
    assert call("/weights/kept/generate", prompt="a", max_tokens=1)["text"]


def test_a_field_that_is_not_known_is_refused(call, session):
    refusal = call("/v1/train/optim_step", session_id=session, lr=1e-3, status=400)
    assert refusal["error"]["param"] == "lr"


@pytest.mark.parametrize("field", ["tokens", "max_tokens", "temperature", "stop"])
def test_a_value_of_another_type_is_not_taken_for_one(call, session, field):
    wrong = {"tokens": [True, 2], "max_tokens": "5", "temperature": True, "stop": [1]}[field]
    body = {"tokens": PROMPT, "max_tokens": 1, "session_id": session, field: wrong}
    refusal = call("/v1/sample", **body, status=400)
    assert refusal["error"]["param"].startswith(field)
