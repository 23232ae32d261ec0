"""Tinker's newest SDK, and its HTTP API without the SDK, against the real services."""

from __future__ import annotations

import json
import re
import threading
from contextlib import ExitStack
from uuid import uuid4

import compatibility_page
import httpx
import numpy as np
import psutil
import pytest
import tinker
import zstandard
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster, wait_for
from test_tinker_releases import run_calls
from tinker import types

import paceline
from paceline.files.key_changes import add_key, remove_key

pytestmark = pytest.mark.services
PROMPT = [5, 6, 7, 8]
ALIAS = "Qwen/Qwen3-8B-Base"
MAX_RUNS = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    cluster = Cluster.make(
        folder / "state",
        make_tiny_llama(folder / "model"),
        PACELINE_GATEWAY_HTTP_ALIASES=ALIAS,
        PACELINE_TRAINER_MAX_RUNS_PER_TENANT=str(MAX_RUNS),
        PACELINE_TRAINER_GAP_WAIT_SECONDS="2",
    )
    with cluster.running():
        yield cluster


@pytest.fixture(scope="module")
def address(cluster):
    return "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]


@pytest.fixture
def sdk(cluster, address):
    service = tinker.ServiceClient(base_url=address, api_key=f"tml-{cluster.api_key}")
    yield service
    service.close("success").result()


@pytest.fixture(scope="module")
def wire(cluster, address):
    """An HTTP client for the API, without the SDK."""
    headers = {"X-API-Key": f"tml-{cluster.api_key}"}
    with httpx.Client(base_url=f"{address}/api/v1", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def stranger(cluster, address):
    key = add_key(cluster.state / "keys.json", f"other-{uuid4().hex}", f"other-{uuid4().hex}")
    with httpx.Client(base_url=f"{address}/api/v1", headers={"X-API-Key": key}, timeout=60) as client:
        yield client


def post(wire, where, **body):
    answer = wire.post(where, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def fetch(wire, request_id):
    """Poll retrieve_future until it answers; return the answer."""
    while True:
        answer = wire.post("/retrieve_future", json={"request_id": request_id})
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            return answer


def open_model(wire, session_id=None):
    session_id = session_id or post(wire, "/create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
    made = post(
        wire, "/create_model", session_id=session_id, model_seq_id=0, base_model="model", lora_config={"rank": 2}
    )
    return session_id, fetch(wire, made["request_id"]).json()["model_id"]


def ask_for_sample(wire, sampler_id, seq_id=0, tokens=PROMPT, **fields):
    """Post a sampling request; return the answer, which names its future."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    return post(wire, "/asample", sampling_session_id=sampler_id, seq_id=seq_id, prompt=prompt, **fields)


def open_sampler(wire, session_id):
    """Create a sampling session of the base model; return its id."""
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "model"}
    return post(wire, "/create_sampling_session", **body)["sampling_session_id"]


def optim_step(wire, model_id, seq_id, learning_rate=1e-3):
    params = {"learning_rate": learning_rate}
    return wire.post("/optim_step", json={"model_id": model_id, "seq_id": seq_id, "adam_params": params})


def forward_backward(model_id, seq_id, loss_fn="cross_entropy"):
    from tinker.proto import tinker_public_pb2 as pb

    dense = np.array([6, 7, 8, 9]).tobytes()
    chunks = [
        pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(part, "<i4").tobytes())) for part in ([5, 6], [7, 8])
    ]
    inputs = {"target_tokens": pb.Tensor(dense=dense, dtype=pb.DTYPE_INT64, shape=[4])}
    datum = pb.Datum(model_input=chunks, loss_fn_inputs=inputs)
    return pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum], loss_fn=loss_fn
    ).SerializeToString()


def datum():
    targets = types.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4])
    return types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs={"target_tokens": targets})


def test_every_call_of_the_newest_sdk_does_what_the_page_says(cluster):
    outcomes = run_calls(cluster)
    assert {call: outcome for call, outcome in outcomes.items() if outcome.startswith("fails")} == {}
    marks = {call: compatibility_page.mark(outcome) for call, outcome in outcomes.items()}
    newest = re.match(r"\d+\.\d+", tinker.__version__)[0]
    page = compatibility_page.column(newest)
    assert marks == {call: page[call] for call in marks}


def test_commands_that_come_out_of_order_and_twice_execute_in_order_and_once(wire):
    _, model_id = open_model(wire)
    last = wire.post("/forward_backward", content=forward_backward(model_id, 3)).json()
    step = optim_step(wire, model_id, 2).json()
    first = wire.post("/forward_backward", content=zstandard.compress(forward_backward(model_id, 1)),
                      headers={"Content-Encoding": "zstd"}).json()  # fmt: skip
    again = optim_step(wire, model_id, 2).json()
    assert again["request_id"] == step["request_id"]
    assert fetch(wire, step["request_id"]).json()["metrics"]["optim/step"] == 1
    for one in (first, last):
        assert fetch(wire, one["request_id"]).headers["content-type"] == "application/x-protobuf"
    assert fetch(wire, first["request_id"]).content != fetch(wire, last["request_id"]).content


def test_a_number_that_was_used_for_another_command_is_refused_at_once(wire):
    _, model_id = open_model(wire)
    assert optim_step(wire, model_id, 1).is_success
    other = optim_step(wire, model_id, 1, learning_rate=5e-2)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "REQUEST_ID_REUSED"


def test_a_gap_waits_longer_than_the_trainer_does(wire):
    _, model_id = open_model(wire)
    step = optim_step(wire, model_id, 2).json()
    threading.Event().wait(3)  # the trainer refuses a gap after 2 seconds
    wire.post("/forward_backward", content=forward_backward(model_id, 1))
    assert fetch(wire, step["request_id"]).json()["metrics"]["optim/step"] == 1


def test_what_is_refused_here_takes_its_number(wire):
    _, model_id = open_model(wire)
    refused = wire.post("/forward_backward", content=forward_backward(model_id, 1, "stable_reinforce")).json()
    wire.post("/forward_backward", content=forward_backward(model_id, 2))
    step = optim_step(wire, model_id, 3).json()
    failure = fetch(wire, refused["request_id"]).json()
    assert failure["category"] == "user"
    assert "importance_sampling" in failure["error"]
    assert fetch(wire, step["request_id"]).json()["metrics"]["optim/step"] == 1


def test_futures_outlive_the_gateway(cluster, wire):
    _, model_id = open_model(wire)
    done = wire.post("/forward_backward", content=forward_backward(model_id, 1)).json()
    result = fetch(wire, done["request_id"]).content
    waiting = optim_step(wire, model_id, 3).json()
    cluster.gateway.kill()
    cluster.gateway.start()
    assert fetch(wire, done["request_id"]).content == result
    wire.post("/forward_backward", content=forward_backward(model_id, 2))
    assert fetch(wire, waiting["request_id"]).json()["metrics"]["optim/step"] == 1


def test_training_goes_on_when_the_trainer_was_killed_in_the_middle(cluster, sdk):
    training = sdk.create_lora_training_client(base_model="model", rank=2, train_unembed=False).result()
    steps = []
    for number in range(6):
        training.forward_backward([datum()], "cross_entropy")
        steps.append(training.optim_step(types.AdamParams(learning_rate=1e-2)))
        if number == 2:
            steps[0].result()
            cluster.trainer.kill()
            cluster.trainer.start()
    assert [step.result().metrics["optim/step"] for step in steps] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_of_either_client_is_loaded_by_the_other(cluster, sdk, tmp_path):
    training = sdk.create_lora_training_client(base_model=ALIAS, rank=2, train_unembed=False).result()
    training.forward_backward([datum()], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    training.save_state("mine").result()
    wanted = training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    with paceline.ServiceClient(cluster.address, cluster.api_key) as service:
        run_id = service.list_runs()[0].run_id
        copy = service.create_training_client_from_state(f"paceline://{run_id}/state/mine")
        found = copy.forward(
            [paceline.Datum([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})]
        ).result()
        assert found.metrics["loss:sum"] == pytest.approx(wanted, abs=1e-5)
        path = copy.save_state("again").result().path
        files = service.download_checkpoint(path, tmp_path / "again")
    assert (files / "adapter_model.safetensors").exists()
    back = sdk.create_training_client_from_state(path).result()
    assert back.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(wanted, abs=1e-5)


def test_a_checkpoint_has_the_metadata_of_its_last_save(wire, service):
    _, model_id = open_model(wire)

    def save(seq_id, **more):
        body = {"model_id": model_id, "seq_id": seq_id, "path": "a", "overwrite": True, **more}
        return fetch(wire, post(wire, "/save_weights", **body)["request_id"]).json()["path"]

    def metadata():
        (found,) = wire.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"]
        return found["user_metadata"]

    save(1, user_metadata={"loss": "2"})
    assert metadata() == {"loss": "2"}
    save(2, user_metadata={"loss": "1"})
    assert metadata() == {"loss": "1"}
    save(3)
    assert metadata() is None
    save(4, user_metadata={"loss": "0"})
    run_id = service.list_runs()[0].run_id
    service.get_training_client(run_id).save_state("a", overwrite=True).result()
    assert metadata() is None


def test_sampled_logprobs_are_of_the_distribution_at_the_temperature(sdk):
    sampling = sdk.create_sampling_client(base_model="model").result()

    def top(temperature):
        params = types.SamplingParams(max_tokens=1, temperature=temperature, seed=1)
        answer = sampling.sample(types.ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=8).result()
        return dict(answer.sequences[0].topk_logprobs[0])

    plain, warm = top(1.0), top(2.0)
    one, other = sorted(set(plain) & set(warm))[:2]
    assert warm[one] - warm[other] == pytest.approx((plain[one] - plain[other]) / 2, abs=1e-4)


def test_runs_of_sessions_that_are_over_are_deleted(wire):
    for _ in range(MAX_RUNS + 1):
        session_id, model_id = open_model(wire)
        wire.post("/forward_backward", content=forward_backward(model_id, 1))
        assert wire.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}}).status_code == 204
    listed = wire.get("/training_runs", params={"limit": 1000}).json()
    assert listed["cursor"]["total_count"] > MAX_RUNS


def test_the_run_of_a_session_that_is_over_is_saved_and_deleted(wire, service):
    session_id, model_id = open_model(wire)
    newest = service.list_runs()[0].run_id
    wire.post("/forward_backward", content=forward_backward(model_id, 1))
    fetch(wire, optim_step(wire, model_id, 2).json()["request_id"])
    wire.post(f"/sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    wait_for(lambda: newest not in {run.run_id for run in service.list_runs()})
    (left,) = wire.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert left["checkpoint_id"].startswith("weights/session-end-")
    assert left["expires_at"]
    session_id = post(wire, "/create_session")["session_id"]
    more = {"session_id": session_id, "model_seq_id": 0, "optimizer": True}
    loaded = post(wire, "/load_weights", path=left["tinker_path"], **more)
    again = fetch(wire, loaded["request_id"]).json()["model_id"]
    wire.post("/forward_backward", content=forward_backward(again, 1))
    assert fetch(wire, optim_step(wire, again, 2).json()["request_id"]).json()["metrics"]["optim/step"] == 2


def test_what_is_kept_of_a_client_is_bounded(wire):
    assert wire.post("/create_session", json={"user_metadata": {"text": "x" * 2000}}).status_code == 400
    session_id, model_id = open_model(wire)
    body = {
        "session_id": session_id,
        "sampling_session_seq_id": 0,
        "base_model": "x" * 2000,
        "model_path": "tinker://x",
    }
    assert wire.post("/create_sampling_session", json=body).status_code == 400
    too_much = {"text": "x" * 2000}
    made = post(wire, "/create_model", session_id=session_id, model_seq_id=1, user_metadata=too_much)
    saved = post(wire, "/save_weights", model_id=model_id, seq_id=1, path="a", user_metadata=too_much)
    for request_id in (made["request_id"], saved["request_id"]):
        assert "OUT_OF_RANGE" in fetch(wire, request_id).json()["error"]
    assert wire.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"] == []
    wire.post("/forward_backward", content=forward_backward(model_id, 2))
    assert fetch(wire, optim_step(wire, model_id, 3).json()["request_id"]).json()["metrics"]["optim/step"] == 1


def test_a_session_that_was_finished_takes_no_more(wire):
    session_id, model_id = open_model(wire)
    wire.post(f"/sessions/{session_id}/finish", json={})
    assert wire.post("/session_heartbeat", json={"session_id": session_id}).status_code == 410
    assert optim_step(wire, model_id, 1).status_code == 404


def test_anothers_things_look_absent(wire, stranger):
    session_id, model_id = open_model(wire)
    state = post(wire, "/save_weights", model_id=model_id, seq_id=1, path="mine")
    path = fetch(wire, state["request_id"]).json()["path"]
    assert stranger.post("/retrieve_future", json={"request_id": state["request_id"]}).status_code == 404
    assert stranger.post("/get_info", json={"model_id": model_id}).status_code == 404
    assert stranger.post("/session_heartbeat", json={"session_id": session_id}).status_code == 410
    assert stranger.get(f"/sessions/{session_id}").status_code == 404
    assert stranger.get(f"/training_runs/{model_id}").status_code == 404
    assert stranger.delete(f"/training_runs/{model_id}/checkpoints/weights/mine").status_code == 404
    assert stranger.post("/weights_info", json={"tinker_path": path}).status_code == 404
    assert stranger.get("/checkpoints").json()["checkpoints"] == []
    assert optim_step(stranger, model_id, 2).status_code == 404
    mine = {one["tinker_path"] for one in wire.get("/checkpoints", params={"limit": 1000}).json()["checkpoints"]}
    assert path in mine


def test_a_sampler_of_a_checkpoint_that_is_none_is_refused_before_it_samples(wire):
    session_id, model_id = open_model(wire)
    make = {"session_id": session_id, "sampling_session_seq_id": 0}
    path = f"tinker://{model_id}/sampler_weights/nothing"
    refused = wire.post("/create_sampling_session", json={**make, "model_path": path})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "CHECKPOINT_NOT_FOUND")
    assert wire.post("/create_sampling_session", json={**make, "base_model": "model"}).is_success


def test_retrieve_futures_tells_of_samples_that_are_done(wire):
    session_id, _ = open_model(wire)
    sampler_id = open_sampler(wire, session_id)
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": 0}
    asked = {
        ask_for_sample(wire, sampler_id, number, tokens, sampling_params={"max_tokens": 2})["request_id"]: bool(tokens)
        for number, tokens in enumerate([PROMPT, [], PROMPT])
    }
    told, cursor = {}, 0
    while set(told) < set(asked):
        answer = post(wire, "/retrieve_futures", target=target, prev_cursor=cursor)
        told |= {one["request_id"]: one["state"] == "finished" for one in answer["completions"]}
        cursor = answer["cursor"]
    assert told == asked


def test_a_sample_that_is_posted_again_is_the_same_sample(wire):
    session_id, _ = open_model(wire)
    sampler_id = open_sampler(wire, session_id)
    body = {"sampling_session_id": sampler_id, "seq_id": 3, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    first, again = (wire.post("/asample", json=body) for _ in range(2))
    assert first.json() == again.json()
    assert wire.post("/asample", json={**body, "num_samples": 2}).status_code == 422


def test_a_number_is_one_sampler_s(wire):
    session_id, model_id = open_model(wire)
    make = {"session_id": session_id, "sampling_session_seq_id": 7, "base_model": "model"}
    assert wire.post("/create_sampling_session", json=make).is_success
    assert wire.post("/create_sampling_session", json=make).is_success
    saved = wire.post(
        "/save_weights_for_sampler", json={"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 7}
    )
    assert "REQUEST_ID_REUSED" in fetch(wire, saved.json()["request_id"]).json()["error"]


def test_a_shape_alone_costs_no_memory(cluster, wire):
    from tinker.proto import tinker_public_pb2 as pb

    _, model_id = open_model(wire)
    datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4)))])
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=b"", dtype=pb.DTYPE_INT64, shape=[16 << 20]))
    sparse = pb.SparseCsr(crow_indices=bytes(16))
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=[1, 16 << 20]))
    before = psutil.Process(cluster.gateway.process.pid).memory_info().rss
    for seq_id, drop in ((1, "weights"), (2, "target_tokens")):
        one = pb.Datum()
        one.CopyFrom(datum)
        del one.loss_fn_inputs[drop]
        body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=[one] * 50, loss_fn="cross_entropy")
        asked = wire.post("/forward_backward", content=body.SerializeToString()).json()
        assert fetch(wire, asked["request_id"]).json()["category"] == "user"
    assert psutil.Process(cluster.gateway.process.pid).memory_info().rss - before < 300 << 20


def test_a_sample_that_is_cancelled_ends(wire):
    session_id, _ = open_model(wire)
    sampler_id = open_sampler(wire, session_id)
    asked = ask_for_sample(wire, sampler_id, num_samples=8, sampling_params={"max_tokens": 400, "stop": []})
    assert len(set(asked["sample_sequence_ids"])) == 8
    post(wire, "/cancel_future", request_id=asked["request_id"])
    assert "CANCELLED" in fetch(wire, asked["request_id"]).json()["error"]


def test_addresses_of_weights_work_without_a_key_and_only_as_they_were_signed(cluster, wire, address):
    _, model_id = open_model(wire)
    saved = post(wire, "/save_weights_external", model_id=model_id, seq_id=1, path="out")
    assert fetch(wire, saved["request_id"]).json()["path"].endswith("/external_weights/out")
    urls = wire.get(f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls").json()["urls"]
    weights = urls["adapter_model.safetensors"]
    assert len(httpx.get(weights).content) > 1000
    token = weights.split("/")[-2]
    for other in (token[:-2] + "AA", "AAAA.BBBB", "x"):
        refused = httpx.get(weights.replace(token, other))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "METHOD_NOT_ALLOWED")
    for other in ("adapter_config.json", "checkpoint.tar", "..%2F..%2Frun.json"):
        assert httpx.get(weights.replace("adapter_model.safetensors", other)).status_code in {403, 404}


def test_downloads_that_nobody_reads_hold_up_no_other_tenant(cluster, wire, address):
    with ExitStack() as resources:
        greedy, other = (resources.enter_context(tenant_of(cluster, address)) for _ in range(2))
        urls = [save_external(tenant) for tenant in (greedy, other)]
        clients = [resources.enter_context(httpx.Client(timeout=60)) for _ in range(64)]
        begun = [resources.enter_context(client.stream("GET", urls[0])).status_code for client in clients]
        assert set(begun) <= {200, 429}
        assert len(httpx.get(urls[1], timeout=60).content) > 1000
        _, model_id = open_model(other)
        assert optim_step(other, model_id, 1).is_success


def test_an_address_dies_with_the_key_that_asked_for_it(cluster, address):
    with tenant_of(cluster, address, "goes-soon") as client:
        url = save_external(client)
        assert httpx.get(url).status_code == 200
        remove_key(cluster.state / "keys.json", "goes-soon")
        assert httpx.get(url).status_code == 403


def tenant_of(cluster, address, name=""):
    """Return an HTTP client of a new tenant."""
    name = name or f"other-{uuid4().hex}"
    key = add_key(cluster.state / "keys.json", name, name)
    return httpx.Client(base_url=f"{address}/api/v1", headers={"X-API-Key": key}, timeout=60)


def save_external(wire):
    """Save a new model's weights; return the address of their file."""
    _, model_id = open_model(wire)
    fetch(wire, post(wire, "/save_weights_external", model_id=model_id, seq_id=1, path="out")["request_id"])
    where = f"/training_runs/{model_id}/checkpoints/external_weights/out/external_weights_urls"
    return wire.get(where).json()["urls"]["adapter_model.safetensors"]


def test_a_checkpoint_without_its_type_is_refused_and_a_time_to_live_has_one_rule(wire):
    _, model_id = open_model(wire)
    saved = post(wire, "/save_weights", model_id=model_id, seq_id=1, path="a", ttl_seconds=1000)
    fetch(wire, saved["request_id"])
    where = f"/training_runs/{model_id}/checkpoints"
    for answer in (wire.delete(f"{where}/a"), wire.put(f"{where}/a/ttl", json={}), wire.get(f"{where}/a/archive")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PATH")
    assert wire.put(f"{where}/weights/a/ttl", json={"ttl_seconds": 1000}).status_code == 204
    for seconds in (0, -1, 10**10):
        assert wire.put(f"{where}/weights/a/ttl", json={"ttl_seconds": seconds}).status_code == 400
    assert wire.delete(f"{where}/weights/a").status_code == 204


@pytest.mark.parametrize("key", ["", "tml-wrong", "Bearer"])
def test_no_path_answers_without_a_key(address, key):
    for path in ("/api/v1/create_session", "/api/v1/nothing", "/"):
        answer = httpx.post(f"{address}{path}", json={}, headers={"X-API-Key": key} if key else {})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "INVALID_API_KEY"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 400),
        (b"\xff" * 100, {}, 400),
        (b"no zstd", {"Content-Encoding": "zstd"}, 400),
        (zstandard.compress(bytes(64 << 20)), {"Content-Encoding": "zstd"}, 413),
        (zstandard.compress(b"one") + zstandard.compress(b"two"), {"Content-Encoding": "zstd"}, 400),
        (zstandard.compress(b"cut off" * 99)[:-4], {"Content-Encoding": "zstd"}, 400),
        (b"x" * 100, {"Content-Encoding": "br"}, 400),
        (bytes(33 << 20), {}, 413),
    ],
    ids=["empty", "garbage", "no zstd", "a bomb", "two frames", "a cut frame", "brotli", "too large"],
)
def test_a_body_that_is_none_is_refused_in_json(wire, content, headers, status):
    try:
        answer = wire.post("/forward_backward", content=content, headers=headers)
    except httpx.WriteError:  # refused before all of it was sent
        assert status == 413
        return
    assert answer.status_code in {status, 404}
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/retrieve_futures", {"target": {"sampling_session_id": "SAMPLER"}, "timeout": float("nan")}),
        ("/asample", {"sampling_session_id": "SAMPLER", "seq_id": 2**63, "prompt": {"chunks": []}}),
        ("/optim_step", {"model_id": "MODEL", "seq_id": 10**40, "adam_params": {}}),
        ("/create_session", {"display_name": "\ud800"}),
        ("/get_info", {"model_id": "\ud800"}),
    ],
)
def test_numbers_and_texts_that_are_none_are_refused(wire, path, body):
    session_id, model_id = open_model(wire)
    sampler_id = open_sampler(wire, session_id)
    content = json.dumps(body).replace("SAMPLER", sampler_id).replace("MODEL", model_id).replace("\\\\", "\\")
    answer = wire.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_a_sample_with_settings_that_fit_no_field_fails_by_itself(wire):
    session_id, _ = open_model(wire)
    sampler_id = open_sampler(wire, session_id)
    asked = ask_for_sample(wire, sampler_id, sampling_params={"stop": [-1]})
    assert fetch(wire, asked["request_id"]).json()["category"] == "user"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/asample", {"sampling_session_id": "x", "seq_id": 1, "prompt": {"chunks": []}, "num_samples": True}, "num"),
        ("/optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {"learning_rate": "1"}}, "adam_params"),
    ],
)
def test_a_value_of_another_type_is_not_taken_for_one(wire, path, body, field):
    answer = wire.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


def test_bad_json_names_the_field(wire):
    answer = wire.post("/create_model", json={"session_id": "x", "model_seq_id": "many", "base_model": "m"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model_seq_id"
    assert wire.post("/create_model", content=b"{").json()["detail"]


def test_openais_api_needs_vllm(wire):
    answer = wire.post("/../../v1/completions", json={"model": "model", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value")


def test_the_log_has_no_key(cluster, wire):
    wire.get("/sessions")
    wait_for(lambda: "/api/v1/sessions" in cluster.gateway.log.read_text())
    assert cluster.api_key not in cluster.gateway.log.read_text()
