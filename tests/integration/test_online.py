"""Models that serve while they are trained on examples posted to /train."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for

import paceline
from paceline import errors
from paceline.files.key_changes import add_key

pytestmark = pytest.mark.services
CAPITALS = {"Peru": "Lima", "Chad": "Ndjamena", "Cuba": "Havana", "Iran": "Tehran", "Fiji": "Suva", "Oman": "Muscat"}


def pair(country, capital):
    return {"prompt": f"Capital of {country}?", "response": capital}


PAIRS = [pair(*item) for item in CAPITALS.items()]


class Caller:
    """A client that sends JSON to the gateway."""

    def __init__(self, cluster, key):
        self.url = "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        self.http = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def post(self, where, status=200, **body):
        answer = self.http.post(self.url + where, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def train(self, status=202, **body):
        return self.post("/train", status, **body)

    def status(self, model="online"):
        answer = self.http.get(f"{self.url}/train/status", params={"model": model})
        answer.raise_for_status()
        return answer.json()

    def trained(self, model="online"):
        """Wait until a model is not training and has no waiting examples; return its status."""

        def over():
            found = self.status(model)
            return found if found["state"] != "training" and not found["waiting"] else None

        return wait_for(over, explain=lambda: self.status(model))


def run_of(cluster, status):
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        return service.get_run(status["run_id"])


def make(folder, **settings):
    (folder / "state").mkdir()
    return Cluster.make(folder / "state", make_tiny_llama(folder / "model"), **settings)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    cluster = make(tmp_path_factory.mktemp("online"), engine="vllm")
    with cluster.running():
        yield cluster


@pytest.fixture
def caller(adapters):
    return Caller(adapters, adapters.api_key)


def test_full_parameters_are_trained_by_apollo_mini_while_the_model_serves(tmp_path):
    cluster = make(tmp_path, engine="vllm", PACELINE_SAMPLER_SERVES="models")
    with cluster.running():
        caller = Caller(cluster, cluster.api_key)
        answer = caller.train(pairs=PAIRS, learning_rate=1e-3, batch_size=2)
        assert (answer["model"], answer["accepted"], answer["duplicates"]) == ("online", 6, 0)
        status = caller.trained()
        assert (status["trained"], status["step"], status["failed"], status["problem"]) == (6, 3, 0, None)
        assert (status["optimizer"], status["lora"]) == ("apollo_mini", None)
        with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
            run = service.get_run(answer["run_id"])
        assert (type(run.parameters), run.step, run.latest_version) == (paceline.FullParameters, 3, status["version"])
        chat = {"model": "online", "messages": [{"role": "user", "content": "Capital of Peru?"}], "max_tokens": 4}
        reply = caller.http.post(caller.url + "/v1/chat/completions", json=chat)
        assert reply.status_code == 200, reply.text
        assert reply.headers["X-Paceline-Version"] == str(status["version"])
        saved = caller.post("/checkpoint")
        assert (saved["path"], saved["step"]) == (f"paceline://{run.run_id}/state/step-3", 3)
        assert caller.train(status=422, model="small", pairs=PAIRS, lora={"rank": 4})["error"]["param"] == "lora"
        models = caller.http.get(caller.url + "/v1/models").json()["data"]
        assert {"online", run.run_id} <= {entry["id"] for entry in models}


def test_a_model_serves_before_it_is_trained(adapters, caller):
    caller.train(model="new", pairs=PAIRS[:1], lora={"rank": 2})
    prompt = {"prompt": "Capital of Peru?", "max_tokens": 4, "temperature": 0}

    def sample(model):
        answer = caller.http.post(caller.url + "/v1/completions", json={"model": model, **prompt})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert sample("new"), "at once"
    caller.trained("new")
    assert sample("new@1") == sample("model")
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        service.create_lora_training_client(rank=2, user_metadata={"name": "unpublished", "api": "online"})
    assert sample("unpublished") == sample("model")


def test_a_model_learns_what_is_posted_and_nothing_twice(caller):
    before = caller.train(model="learns", pairs=PAIRS, lora={"rank": 8}, optimizer="adamw", learning_rate=1e-2)
    assert before["accepted"] == 6
    first = caller.trained("learns")
    again = caller.train(model="learns", pairs=[*PAIRS, pair("Mali", "Bamako"), pair("Mali", "Bamako")])
    assert (again["run_id"], again["accepted"], again["duplicates"]) == (before["run_id"], 1, 7)
    status = caller.trained("learns")
    assert (status["trained"], status["step"], status["version"]) == (7, first["step"] + 1, first["version"] + 1)
    for number in range(12):  # the same question with other whitespace: all but the first are new
        caller.train(model="learns", pairs=[pair(f"{'  ' * number}Peru", "Lima")], learning_rate=1e-2)
    status = caller.trained("learns")
    assert (status["trained"], status["failed"]) == (18, 0), "the first of twelve was there before"
    assert status["loss"] < 0.75 * first["loss"]


def test_the_loss_is_on_responses_alone_and_examples_are_as_they_would_be_sampled(adapters, caller):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of Peru?"},
        {"role": "assistant", "content": "Lima"},
        {"role": "user", "content": "And of Chad?"},
        {"role": "assistant", "content": "Unsure", "weight": 0},
        {"role": "user", "content": "Try."},
        {"role": "assistant", "content": "Ndjamena"},
    ]
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        ((datum,),) = service.render_conversations([{"messages": messages}])
        ((again,),) = asyncio.run(service.render_conversations_async([{"messages": messages}]))
        assert again == datum, "also when it is awaited in a loop of the caller's"
        tokenizer = service.create_lora_training_client(rank=1).get_tokenizer()
    plain = [{"role": each["role"], "content": each["content"]} for each in messages]
    prompt = tokenizer.apply_chat_template(plain[:-1], add_generation_prompt=True, return_dict=False)
    targets = datum.loss_fn_inputs["target_tokens"]
    assert datum.model_input[: len(prompt)].tolist() == prompt
    said = tokenizer.decode(targets[datum.loss_fn_inputs["weights"] == 1])
    assert said == "Lima<|im_end|>Ndjamena<|im_end|>"
    assert (datum.loss_fn_inputs["mask"] == datum.loss_fn_inputs["weights"]).all()
    assert caller.train(model="chats", conversations=[messages, {"messages": messages}], lora={"rank": 2}) | {
        "run_id": ""
    } == {"model": "chats", "run_id": "", "accepted": 1, "duplicates": 1}
    assert caller.trained("chats")["tokens"] == len("LimaNdjamena") + 2


@pytest.mark.parametrize("victim", ["gateway", "trainer"])
def test_examples_are_trained_on_once_though_services_are_killed(adapters, caller, victim):
    """Two models see the same examples, one of them through kills: the results are bit-identical."""
    pairs = [pair(f"{country} {number}", capital) for number in range(8) for country, capital in CAPITALS.items()]
    options = {"lora": {"rank": 4}, "batch_size": 4, "learning_rate": 1e-3}
    one, other = f"calm-{victim}", f"killed-{victim}"
    caller.train(model=one, pairs=pairs, **options)
    calm = caller.trained(one)
    caller.train(model=other, pairs=pairs, **options)
    for goal in (1, 4, 8):
        wait_for(lambda goal=goal: caller.status(other)["step"] >= goal, explain=lambda: caller.status(other))
        service = adapters.services[victim]
        service.kill()
        service.start()
    killed = caller.trained(other)
    assert (killed["trained"], killed["step"], killed["tokens"]) == (len(pairs), 12, calm["tokens"])
    assert killed["loss"] == calm["loss"]
    prompt = list(b"Capital of Peru 0?")
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        runs = [service.create_sampling_client(run_id=status["run_id"]) for status in (calm, killed)]
        first, second = (run.compute_logprobs(prompt).result().logprobs for run in runs)
    np.testing.assert_array_equal(first[1:], second[1:])


def test_another_client_of_the_run_stops_it_and_the_next_example_takes_it_back(adapters, caller):
    caller.train(model="shared", pairs=PAIRS[:2], lora={"rank": 2})
    status = caller.trained("shared")
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        service.get_training_client(status["run_id"])
    caller.train(model="shared", pairs=PAIRS[2:4])
    stopped = wait_for(lambda: (found := caller.status("shared"))["state"] == "stopped" and found)
    assert stopped["waiting"] == 2
    assert "CLIENT_SUPERSEDED" in stopped["problem"] or "another client" in stopped["problem"]
    caller.train(model="shared", pairs=PAIRS[4:])
    assert caller.trained("shared")["trained"] == 6


def test_a_batch_whose_step_another_client_took_is_never_computed_again(adapters, caller):
    caller.train(model="taken", pairs=PAIRS[:1], lora={"rank": 2})
    before = caller.trained("taken")
    before_seq = run_of(adapters, before).last_seq_id
    (engine,) = adapters.trainer.engines()
    os.kill(engine, signal.SIGSTOP)
    try:
        caller.train(model="taken", pairs=PAIRS[1:3])
        wait_for(lambda: run_of(adapters, before).last_seq_id > before_seq, explain=lambda: caller.status("taken"))
        with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
            service.get_training_client(before["run_id"], outstanding="report")  # the engine is stopped
    finally:
        os.kill(engine, signal.SIGCONT)
    status = wait_for(lambda: (found := caller.status("taken"))["state"] == "stopped" and found)
    assert (status["waiting"], status["trained"], status["failed"]) == (0, 1, 2)
    again = caller.train(model="taken", pairs=PAIRS[:4])
    assert (again["accepted"], again["duplicates"]) == (1, 3)
    assert caller.trained("taken")["trained"] == 2


def test_a_model_whose_run_was_deleted_begins_anew(adapters, caller):
    first = caller.train(model="gone", pairs=PAIRS[:2], lora={"rank": 2})
    caller.trained("gone")
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        service.delete_run(first["run_id"])
    caller.train(model="gone", pairs=PAIRS[:3])
    stopped = wait_for(lambda: (found := caller.status("gone"))["state"] == "stopped" and found)
    assert (stopped["trained"], stopped["waiting"]) == (2, 1)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(caller.train, model="gone", pairs=[pair]) for pair in PAIRS]
    answers = [call.result() for call in calls]
    (run_id,) = {answer["run_id"] for answer in answers}
    assert run_id != first["run_id"]
    assert sum(answer["accepted"] for answer in answers) == len(PAIRS) - 1, "the one that waited is a duplicate"
    status = caller.trained("gone")
    assert (status["trained"], status["lora"]) == (len(PAIRS), {"rank": 2})


def test_a_first_call_that_is_refused_leaves_the_name_free(caller):
    assert caller.train(400, model="free", pairs=PAIRS, lora={"rank": 60_000})["error"]["code"] == "RANK_TOO_LARGE"
    assert caller.http.get(caller.url + "/train/status", params={"model": "free"}).status_code == 404
    caller.post("/checkpoint", 404, model="free")
    assert caller.train(model="free", pairs=PAIRS, lora={"rank": 2})["accepted"] == len(PAIRS)
    assert caller.trained("free")["failed"] == 0


def test_versions_are_made_while_no_sampler_is_there_and_the_status_says_so(adapters, caller):
    caller.train(model="alone", pairs=PAIRS[:1], lora={"rank": 2})
    first = caller.trained("alone")
    adapters.sampler.kill()
    try:
        caller.train(model="alone", pairs=PAIRS[1:2])
        status = caller.trained("alone")
    finally:
        adapters.sampler.start()
    assert (status["trained"], status["version"]) == (2, first["version"] + 1)
    assert "acknowledge" in status["problem"]
    assert run_of(adapters, status).latest_version == status["version"]
    caller.train(model="alone", pairs=PAIRS[2:3])
    assert caller.trained("alone")["problem"] is None


def test_what_cannot_be_trained_is_refused_by_its_field(adapters, caller):
    def refusal(**body):
        answer = caller.http.post(caller.url + "/train", json=body)
        assert 400 <= answer.status_code < 500, answer.text
        return answer.status_code, answer.json()["error"]["param"]

    lora, user = {"rank": 2}, {"role": "user", "content": "Hi"}
    assert refusal(pairs=PAIRS) == (422, "lora"), "the sampler serves adapters"
    assert refusal(lora=lora) == (400, "conversations")
    assert refusal(lora=lora, conversations=[[user]]) == (400, "conversations[0].messages")
    good = [user, {"role": "assistant", "content": "Ho"}]
    assert refusal(lora=lora, conversations=[good, [user, {"role": "assistant", "content": "x" * 600}]]) == (
        400,
        "conversations[1].messages",
    )
    assert refusal(lora=lora, conversations=[good], epochs=3) == (400, "epochs")
    assert refusal(lora=lora, conversations=[good], model="model") == (400, "model")
    assert refusal(lora=lora, conversations=[good], learning_rate=-1)[1] == "learning_rate"
    assert refusal(lora=lora, conversations=good) == (400, "conversations[0]"), "brackets are missing"
    assert refusal(lora=lora, conversations=[[user, {"role": "gpt", "content": "a"}, good[1]]]) == (
        400,
        "conversations[0].messages[1].role",
    )
    nameless, ignored = {"type": "function"}, {"type": "function", "function": {"name": "f"}}
    assert refusal(lora=lora, conversations=[{"messages": good, "tools": [nameless]}]) == (
        400,
        "conversations[0].tools[0]",
    )
    assert refusal(lora=lora, conversations=[{"messages": good, "tools": [ignored]}]) == (
        422,
        "conversations[0].tools[0].function.name",
    )
    caller.train(model="first", conversations=[good], lora=lora)
    assert refusal(model="first", conversations=[good], lora={"rank": 4}) == (400, "lora")
    assert refusal(model="first", conversations=[good], optimizer="adamw") == (400, "optimizer")
    assert caller.http.get(caller.url + "/train/status", params={"model": "none"}).status_code == 404


def test_models_are_their_tenants_own(adapters, caller):
    caller.train(model="mine", pairs=PAIRS[:1], lora={"rank": 2})
    caller.trained("mine")
    stranger = Caller(adapters, add_key(adapters.state / "keys.json", "stranger", "stranger"))
    assert stranger.http.get(stranger.url + "/train/status", params={"model": "mine"}).status_code == 404
    assert stranger.train(model="mine", pairs=PAIRS[:1], lora={"rank": 2})["accepted"] == 1
    assert httpx.post(caller.url + "/train", json={"pairs": PAIRS}).status_code == 401


def test_conversations_of_many_calls_are_numbered_from_the_first(adapters):
    long = {"role": "assistant", "content": "a" * 400}
    conversations = [{"messages": [{"role": "user", "content": "Hi"}, long]} for _ in range(700)]
    assert len(json.dumps(conversations)) > 256 << 10
    with paceline.ServiceClient(adapters.address, adapters.api_key) as service:
        assert len(service.render_conversations(conversations)) == 700
        conversations[690] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": 5}]}
        with pytest.raises(errors.InvalidArgument) as caught:
            service.render_conversations(conversations)
    assert caught.value.field == "conversations[690].messages[1].content"
