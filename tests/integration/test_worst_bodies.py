"""What the worst small bodies of one tenant cost another, through every door of the real services."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import grpc
import httpx
import pytest
import zstandard
from support.fuzz.floods import watching
from support.fuzz.fuzz_cases import methods, path_of
from support.fuzz.fuzz_run import CONTEXT, SETTINGS
from support.fuzz.valid_http import FORWARD_BACKWARD
from support.fuzz.valid_requests import CONVERSATION, Owned, valid_request
from support.fuzz.worst_bodies import processor_seconds, worst_json, worst_messages
from support.models.tiny_models import make_tiny_llama
from support.stacks.cluster import Cluster

import paceline
from gateway.http.edge import most_parts
from gateway.http.metaclaw.bodies import BATCHES
from paceline.files.key_changes import add_key
from paceline.requests.bodies import MAX_JSON_PARTS
from paceline.rpc.identity import peer_metadata
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.tinker.v1 import tinker_pb2
from paceline.trainer.v1 import trainer_service_pb2 as trainer_pb

_DATUM = b'{"session_id":"a","datums":[{"model_input_tokens":[1],"target_tokens":[1],"logprobs":[1],"advantages":'
ROUTES = {
    "/v1/completions": (b'{"model":"model","prompt":', b"}"),
    "/v1/chat/completions": (b'{"model":"model","messages":', b"}"),
    "/v1/chat/completions of the newest session": (b'{"messages":', b"}"),
    "/weights/model/v1/completions": (b'{"prompt":[1],"logit_bias":', b"}"),
    "/generate": (b'{"model":"model","prompt":', b"}"),
    "/train": (b'{"conversations":', b"}"),
    "/train of messages": (b'{"conversations":[', b"]}"),
    "/checkpoint": (b'{"model":', b"}"),
    BATCHES: (_DATUM, b"}]}"),
    f"{BATCHES} of datums": (b'{"session_id":"a","datums":', b"}"),
    "/v1/sample": (b'{"tokens":', b"}"),
    "/v1/lora/create": (b'{"rank":', b"}"),
    "/v1/weights/save": (b'{"session_id":', b"}"),
    "/api/v1/create_session": (b'{"user_metadata":', b"}"),
    "/api/v1/create_session with tags": (b'{"tags":', b"}"),
    "/api/v1/create_model": (b'{"session_id":"a","model_seq_id":0,"user_metadata":', b"}"),
    "/api/v1/save_weights": (b'{"model_id":"a","seq_id":1,"user_metadata":', b"}"),
    "/api/v1/optim_step": (b'{"model_id":"a","seq_id":1,"optimizer_params":', b"}"),
    "/api/v1/asample": (b'{"sampling_session_id":"$","seq_id":1,"prompt":{"chunks":[{"tokens":', b"}]}}"),
    "/api/v1/asample of chunks": (b'{"sampling_session_id":"$","seq_id":2,"prompt":{"chunks":', b"}}"),
    "/api/v1/asample with parameters": (
        b'{"sampling_session_id":"$","seq_id":3,"prompt":{"chunks":[]},"sampling_params":{"stop":',
        b"}}",
    ),
    "/api/v1/client/config": (b'{"sdk_version":', b"}"),
}
"""Each route with JSON, perhaps with what it is called here, and what is before and after a value of its body."""
LONG = [route for route in ROUTES if (most_parts(route.split(" ")[0]) or 0) >= MAX_JSON_PARTS]
PARSED = ("/v1/completions", "/generate", BATCHES, "/v1/sample", "/api/v1/asample", "/api/v1/asample of chunks")
"""Those that parse most bodies to the end, one of each kind."""
TRAINER = ("ForwardBackward", "CreateRun", "RenderConversations")
SAMPLER = ("Sample", "ComputeLogprobs", "CompleteText")
_JSON = {"Content-Type": "application/json"}
_SECONDS, _RATIO = 0.5, 50
"""How long another tenant's call may take, beside other tests; and how many times as long as one on an idle service."""
_BYTES = 256 << 20
"""How much memory the bodies may take of a service, one after the other."""
_ON_LOOP = 0.7
"""Most of the computing of bodies that an event loop may do: it receives and sends them."""


@dataclass(frozen=True)
class Deployment:
    """Real services, and what a hostile tenant has of them."""

    cluster: Cluster
    key: str
    run: Owned
    sampler: str
    """A sampler of Tinker's API."""
    http: httpx.Client

    def post(self, path: str, content: bytes, headers: dict[str, str] = _JSON) -> None:
        """Send a body; the gateway may close the connection before all of it was sent."""
        with suppress(httpx.TransportError):
            self.http.post(path, content=content.replace(b"$", self.sampler.encode(), 1), headers=headers)

    def address(self, service: str) -> str:
        places = {"trainer": "PACELINE_GATEWAY_TRAINER", "sampler": "PACELINE_GATEWAY_SAMPLERS"}
        return self.cluster.gateway.plan.environment[places[service]] if service in places else self.cluster.address

    def call(self, service: str, method: str, content: bytes) -> None:
        """Call the gateway, or a service as the gateway does; the call may be refused."""
        metadata = [("authorization", f"Bearer {self.key}")]
        if service != "gateway":
            metadata = peer_metadata((self.cluster.state / "credential").read_text().strip(), "hostile")
        with grpc.insecure_channel(self.address(service)) as channel, suppress(grpc.RpcError):
            list(channel.unary_stream(method)(content, metadata=tuple(metadata), timeout=60))

    def pid(self, service: str) -> int:
        return self.cluster.services[service].process.pid


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bodies")
    (folder / "state").mkdir()
    cluster = Cluster.make(folder / "state", make_tiny_llama(folder / "model", context=CONTEXT), **SETTINGS)
    with cluster.running():
        key = add_key(cluster.state / "keys.json", "hostile", "hostile")
        address = "http://" + cluster.gateway.plan.environment["PACELINE_GATEWAY_HTTP_LISTEN"]
        with (
            paceline.ServiceClient(cluster.address, key) as service,
            httpx.Client(base_url=address, headers={"X-API-Key": key}, timeout=60) as http,
        ):
            training = service.create_lora_training_client(rank=2)
            service.render_conversations([json.loads(CONVERSATION)])
            session = http.post("/api/v1/create_session", json={}).json()["session_id"]
            asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "model"}
            sampler = http.post("/api/v1/create_sampling_session", json=asked).json()["sampling_session_id"]
            yield Deployment(cluster, key, Owned(training.run_id, "", ""), sampler, http)


@pytest.fixture(scope="module")
def others_call(up):
    """Small calls of another tenant, by the service that answers them."""
    with paceline.ServiceClient(up.cluster.address, up.cluster.api_key) as service:
        run, sampling = service.create_lora_training_client(rank=2), service.create_sampling_client()
        one = paceline.SamplingParams(max_tokens=1)
        yield {
            "gateway": service.whoami,
            "trainer": partial(service.get_run, run.run_id),
            "sampler": lambda: sampling.sample([1], 1, one).result(),
        }


def check_waits(
    up: Deployment, service: str, call: Callable[[], object], sends: Sequence[Callable[[], object]]
) -> None:
    """Send bodies while another tenant calls, and check how long it waits and what the service holds."""
    with watching(up.pid(service), call) as watched:
        for send in sends:
            send()
    assert max(watched.waits) < max(_SECONDS, _RATIO * watched.idle)
    assert watched.grown < _BYTES


def loop_share(up: Deployment, service: str, sends: Sequence[Callable[[], object]]) -> float:
    """Return the event loop's share of what a service computes for bodies."""
    before = processor_seconds(up.pid(service))
    for send in sends:
        send()
    loop, whole = (now - then for now, then in zip(processor_seconds(up.pid(service)), before, strict=True))
    return loop / whole


def json_of(up: Deployment, route: str) -> list[Callable[[], object]]:
    path, (begin, end) = route.split(" ", maxsplit=1)[0], ROUTES[route]
    return [partial(up.post, path, begin + value + end) for value in worst_json(most_parts(path))]


def batches_of(up: Deployment) -> list[Callable[[], object]]:
    """Return batches of Tinker's API, compressed."""
    bodies = [
        *worst_messages(tinker_pb2.ForwardBackwardRequest.DESCRIPTOR, b""),
        b"\x1a\0" * (16 << 20),
        bytes(64 << 20),
    ]
    headers = {"Content-Encoding": "zstd"}
    return [partial(up.post, FORWARD_BACKWARD, zstandard.compress(body), headers=headers) for body in bodies]


def messages_of(up: Deployment, service: str, *names: str) -> list[Callable[[], object]]:
    sends: list[Callable[[], object]] = []
    for method in methods():
        if method.name not in names:
            continue
        bodies = list(worst_messages(method.input_type, valid_request(method, up.run).SerializeToString()))
        if method.name == "CompleteText":
            texts = [b'{"prompt":' + value + b"}" for value in worst_json(MAX_JSON_PARTS)]
            bodies += [sampler_pb.CompleteTextRequest(endpoint=2, body=text).SerializeToString() for text in texts]
        if method.name == "RenderConversations":
            texts = [b'{"messages":' + value + b"}" for value in worst_json(MAX_JSON_PARTS)]
            batches = [*([text] for text in texts), [CONVERSATION] * 256, [b'{"messages":[]}'] * 4096]
            bodies += [
                trainer_pb.RenderConversationsRequest(conversations=some).SerializeToString() for some in batches
            ]
        sends += [partial(up.call, service, path_of(method), body) for body in bodies]
    return sends


@pytest.mark.parametrize("route", LONG)
def test_long_json_keeps_no_other_tenant_waiting(up, others_call, route):
    service = "sampler" if "completions" in route else "gateway"
    check_waits(up, "gateway", others_call[service], json_of(up, route))


def test_other_json_and_heads_keep_no_other_tenant_waiting(up, others_call):
    sends = [send for route in ROUTES if route not in LONG for send in json_of(up, route)]
    heads = ({f"h{number}": "v" for number in range(4_000)}, {"h": "v" * 60_000}, {"Authorization": "v" * 100_000})
    sends += [partial(up.post, "/checkpoint", b"{}", headers=head) for head in heads]
    check_waits(up, "gateway", others_call["gateway"], sends)


def test_batches_that_expand_keep_no_other_tenant_waiting(up, others_call):
    check_waits(up, "gateway", others_call["trainer"], batches_of(up))


@pytest.mark.parametrize(
    ("service", "names"), [("gateway", TRAINER + SAMPLER), ("trainer", TRAINER), ("sampler", SAMPLER)]
)
def test_messages_keep_no_other_tenant_waiting(up, others_call, service, names):
    check_waits(up, service, others_call[service], messages_of(up, service, *names))


@pytest.mark.parametrize("route", PARSED)
def test_long_json_is_decoded_away_from_the_event_loop(up, route):
    # What is longer is text, of which most is to receive it.
    sends = [send for send in json_of(up, route) if len(send.args[1]) < 8 * most_parts(send.args[0])]
    share = loop_share(up, "gateway", sends)
    assert share < _ON_LOOP


@pytest.mark.parametrize(
    ("service", "name"),
    [("trainer", "ForwardBackward"), ("trainer", "RenderConversations"), ("sampler", "CompleteText")],
)
def test_messages_are_decoded_away_from_the_event_loop(up, service, name):
    share = loop_share(up, service, messages_of(up, service, name))
    assert share < _ON_LOOP


def test_batches_that_expand_are_decoded_away_from_the_event_loop(up):
    assert loop_share(up, "gateway", batches_of(up)) < _ON_LOOP
