"""Clients that end with their process or by Ctrl-C, that are forked or pickled: scripts against a real server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from support.models.tiny_models import make_tokenizer
from support.patience import PATIENCE
from support.stacks.toy_services import toy_server
from support.stacks.toy_trainer import make_data

from paceline import RetryPolicy, SamplingParams, ServiceClient, Timeouts, errors

ROOT = Path(__file__).parents[2]
QUICK = RetryPolicy(budget=60.0, first_delay=0.01, max_delay=0.05)
SCRIPT = """
import os, sys
import paceline
from support.stacks.toy_trainer import make_data
address, run_id = sys.argv[1:]
client = paceline.ServiceClient(address, timeouts=paceline.Timeouts(close={close}))
training = client.get_training_client(run_id)
"""


@pytest.fixture
async def server():
    async with toy_server() as running:
        yield running
        running.trainer.load_may_end.set()


async def start(server, body, close=60):
    """Start a script that has a training client; return its process."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    arguments = ["-c", SCRIPT.format(close=close) + body, server.address, server.trainer.run_id]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, env=environment, **pipes)


async def run(server, body, close=60):
    """Run a script to its end; return its exit status, stdout and stderr."""
    process = await start(server, body, close)
    out, said = await process.communicate()
    return process.returncode, out.decode(), said.decode()


async def read_until(process, text):
    said = ""
    while text not in said:
        line = await process.stderr.readline()
        assert line, f"ended without {text!r}: {said}"
        said += line.decode()


@pytest.mark.parametrize(
    ("ending", "status"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError('of the script')", 1)]
)
async def test_a_script_that_ends_without_asking_for_answers_loses_no_command(server, ending, status):
    server.trainer.refusals[1] = [errors.EngineUnavailable("starting", retry_after=0.3)]
    body = "training.forward_backward(make_data())\nstepped = training.optim_step()\n"
    returned, _, said = await run(server, body + ending)
    assert (returned, server.trainer.steps) == (status, 1), said


async def test_a_loss_of_ones_own_is_still_computed_when_the_script_has_ended(server):
    server.trainer.refusals[1] = [errors.EngineUnavailable("starting", retry_after=0.5)]
    body = (
        "training.forward_backward_custom(make_data(), lambda data, rows: (sum(row.sum() for row in rows), {}))\n"
        "training.optim_step()\n"
    )
    status, _, said = await run(server, body)
    assert (status, server.trainer.steps) == (0, 1), said


async def test_a_script_with_an_event_loop_and_another_thread_loses_no_command(server):
    body = """
import asyncio, threading
async def main():
    training.forward_backward(make_data())
asyncio.run(main())
thread = threading.Thread(target=lambda: training.optim_step())
thread.start()
"""
    status, _, said = await run(server, body)
    assert (status, server.trainer.steps) == (0, 1), said


async def test_a_process_that_waits_for_commands_says_so_and_ends_when_they_are_answered(server):
    server.trainer.load_may_end.clear()
    process = await start(server, "training.load_state('paceline://somewhere')\ntraining.optim_step()\n")
    await read_until(process, "waiting up to")
    server.trainer.load_may_end.set()
    await process.communicate()
    assert (process.returncode, server.trainer.executed) == (0, ["LoadCheckpoint", "OptimStep"])


async def test_what_is_not_answered_in_time_is_named(server):
    server.trainer.load_may_end.clear()
    status, _, said = await run(server, "training.load_state('paceline://a')\ntraining.optim_step()\n", close=0.3)
    assert status == 0
    assert f"2 command(s): LoadCheckpoint 1 of {server.trainer.run_id}, OptimStep 2 of" in said
    assert "lost" in said


async def test_ctrl_c_ends_the_wait_and_what_is_lost_is_named(server):
    server.trainer.load_may_end.clear()
    # A shell starts its background jobs, which may have started this process, with SIGINT ignored.
    body = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = await start(server, body + "training.load_state('paceline://somewhere')\n", close=2 * PATIENCE)
    await read_until(process, "waiting up to")
    process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(PATIENCE):
            _, said = await process.communicate()
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
    assert "LoadCheckpoint 1" in said.decode()


async def test_ctrl_c_ends_the_example_that_streams_and_its_request(server, tmp_path, forked_engines):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    files = (path for path in (tmp_path / "tokenizer").iterdir() if path.is_file())
    server.trainer.tokenizer_files = {path.name: path.read_bytes() for path in files}
    server.sampler.silent = True
    body = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    body += "import runpy; runpy.run_path('examples/stream_tokens.py', run_name='__main__')\n"
    script = tmp_path / "script.py"
    script.write_text(body)
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    own = {"PYTHONPATH": str(ROOT), "PACELINE_ADDRESS": server.address, "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, **own}
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), cwd=ROOT, env=environment, **pipes)
    try:
        async with asyncio.timeout(PATIENCE):
            await server.sampler.entered.wait()
            process.send_signal(signal.SIGINT)
            out, said = await process.communicate()
            await server.sampler.stream_ended.wait()
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
    assert (process.returncode, "Traceback" in said.decode()) == (0, False), said.decode()
    assert "0 tokens in" in out.decode()
    assert "ended by Ctrl-C" in out.decode()


async def test_a_failure_that_nobody_asked_for_is_told(server):
    body = "training.forward_backward(make_data(), 'no_such_loss')\nkept = training.forward(make_data(), 'nor_this')\n"
    status, _, said = await run(server, body)
    assert status == 0
    assert said.count("its answer was never retrieved: loss_fn: is not served") == 2


async def test_a_failure_that_was_asked_for_is_not_told_again(server, caplog):
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        for refused in [training.forward(make_data(), "no_such_loss") for _ in range(2)]:
            with pytest.raises(errors.UnknownLoss):
                await refused
    assert caplog.records == []


async def test_only_the_answer_that_tells_of_another_client_is_told(server, caplog):
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        await client.get_training_client_async(server.trainer.run_id)
        training.optim_step()
        stepped, kept = training.optim_step(), training.forward(make_data())
        with pytest.raises(errors.ClientSuperseded):
            await stepped
    del kept
    gc.collect()
    assert caplog.messages == []


async def test_that_another_client_trains_the_run_is_told_once_if_no_answer_was_asked_for(server, caplog):
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        await client.get_training_client_async(server.trainer.run_id)
        for _ in range(3):
            training.optim_step()
    (message,) = caplog.messages
    assert "OptimStep 1 of" in message
    assert "attached" in message


async def give_up_result(future):
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(future.result, 0.01)


async def give_up_await(future):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(future, 0.01)


@pytest.mark.parametrize("give_up", [give_up_result, give_up_await])
async def test_a_failure_after_its_caller_has_given_up_waiting_is_told(server, caplog, give_up):
    server.trainer.load_may_end.clear()
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        loaded = training.load_state("paceline://somewhere")
        await give_up(training.forward(make_data(), "no_such_loss"))
        server.trainer.load_may_end.set()
        await loaded
    gc.collect()
    (record,) = caplog.records
    assert "its answer was never retrieved: loss_fn: is not served" in record.getMessage()


async def test_a_failure_that_a_callback_got_is_not_told_again(server, caplog):
    failed = asyncio.Queue()
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        loop = asyncio.get_running_loop()
        training.forward(make_data(), "no_such_loss").add_done_callback(
            lambda future: loop.call_soon_threadsafe(failed.put_nowait, future)
        )
        with pytest.raises(errors.UnknownLoss):
            await (await failed.get())
    assert caplog.records == []


async def fail_and_drop(server):
    """Drop a client whose command has failed; return a reference to its transport."""
    client = ServiceClient(server.address, retry=QUICK)
    training = await client.get_training_client_async(server.trainer.run_id)
    with pytest.raises(errors.UnknownLoss):
        await training.forward(make_data(), "no_such_loss")
    return weakref.ref(client.transport)


async def test_a_failed_command_does_not_keep_the_client_that_is_dropped(server):
    transport = await fail_and_drop(server)
    async with asyncio.timeout(PATIENCE):
        while transport() is not None:
            gc.collect()
            await round_trip(server)


async def round_trip(server):
    """Let the thread of all clients finish what it was doing."""
    async with ServiceClient(server.address) as client:
        await client.get_run_async(server.trainer.run_id)


async def test_leaving_the_block_waits_for_commands(server):
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        training.forward_backward(make_data())
        training.optim_step()
    assert server.trainer.steps == 1


async def test_leaving_the_block_by_ctrl_c_does_not_wait(server, caplog):
    server.trainer.load_may_end.clear()
    with pytest.raises(KeyboardInterrupt):
        async with ServiceClient(server.address, retry=QUICK) as client:
            training = await client.get_training_client_async(server.trainer.run_id)
            loaded = training.load_state("paceline://somewhere")
            raise KeyboardInterrupt
    with pytest.raises(errors.Cancelled):
        await loaded
    assert "LoadCheckpoint 1" in caplog.text


async def test_a_gateway_that_is_not_there_is_named_with_the_reason(server):
    await server.stop()
    for address, reason in ((server.address, "refused"), ("no-such-host.invalid:1", "no-such-host")):
        async with ServiceClient(address, timeouts=Timeouts(connect=0.3)) as client:
            with pytest.raises(errors.UpstreamUnavailable) as caught:
                await client.list_runs_async()
        assert address in caught.value.message
        assert reason in caught.value.message.lower()
        assert caught.value.field == "address"
    await server.start()
    assert Timeouts().connect == 5.0


async def test_a_client_whose_gateway_comes_late_connects_at_the_next_call(server):
    await server.stop()
    async with ServiceClient(server.address, timeouts=Timeouts(connect=0.2), retry=QUICK) as client:
        with pytest.raises(errors.UpstreamUnavailable):
            await client.get_run_async(server.trainer.run_id)
        await server.start()
        client.transport.timeouts = Timeouts(connect=60)
        assert (await client.get_run_async(server.trainer.run_id)).run_id == server.trainer.run_id


async def test_a_client_that_found_no_gateway_leaves_nothing_behind_when_it_is_closed(server):
    body = """
for _ in range(5):
    with paceline.ServiceClient("127.0.0.1:1", timeouts=paceline.Timeouts(connect=0.2)) as lost:
        try:
            lost.list_runs()
        except paceline.errors.UpstreamUnavailable:
            print("unavailable", end=" ")
    for _ in range(20):
        training.get_info()
"""
    assert await run(server, body) == (0, "unavailable " * 5, "")


async def test_a_client_can_be_made_where_the_answer_of_another_one_arrives(server):
    body = """
from concurrent.futures import Future
made = Future()
training.optim_step().add_done_callback(lambda _: made.set_result(paceline.ServiceClient(address)))
print(made.result(60).get_run(run_id).run_id == run_id)
"""
    status, out, said = await run(server, body)
    assert (status, out) == (0, "True\n"), said


async def test_what_would_block_is_refused_in_a_callback_before_anything_is_sent(server):
    # Delayed, because the callback of a future that has ended runs on the thread that adds it.
    server.trainer.refusals[1] = [errors.EngineUnavailable("starting", retry_after=0.5)]
    body = """
import signal
from concurrent.futures import Future
signal.alarm(60)
told, sampling, later = Future(), client.create_sampling_client(), []
blocking = (
    client.create_lora_training_client,
    lambda: later[0].result(),
    lambda: list(sampling.sample_stream([1])),
)
def callback(future):
    refused = 0
    later.append(training.forward(make_data()))
    for call in blocking:
        try:
            call()
        except paceline.errors.Unsupported as error:
            refused += "another thread" in str(error)
    told.set_result((refused, future.result().metrics["tokens:sum"]))
training.forward(make_data()).add_done_callback(callback)
print(told.result(), later[0].result().metrics["tokens:sum"])
"""
    status, out, said = await run(server, body)
    assert (status, out) == (0, "(3, 10.0) 10.0\n"), said
    assert server.trainer.created == []
    assert not server.sampler.entered.is_set()


async def test_closing_one_client_leaves_the_calls_of_another_alone(server):
    server.trainer.load_may_end.clear()
    async with ServiceClient(server.address, retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        loaded = training.load_state("paceline://somewhere")
        await server.trainer.load_began.wait()
        async with ServiceClient(server.address) as other:
            await other.get_run_async(server.trainer.run_id)
        server.trainer.load_may_end.set()
        assert (await loaded).run_id == server.trainer.run_id


@pytest.mark.parametrize("unsaid", [0.0, 3600.0])
async def test_what_is_sent_again_for_longer_is_logged_with_its_reason_and_not_once_for_each_call(
    server, caplog, monkeypatch, unsaid
):
    caplog.set_level(logging.INFO, "paceline")
    monkeypatch.setattr("paceline.client.retry.SILENT_SECONDS", unsaid)
    server.sampler.refusals = [errors.EngineUnavailable("the engine starts again", retry_after=0.01)] * 20
    async with ServiceClient(server.address, retry=QUICK) as client:
        sampling = client.create_sampling_client()
        await asyncio.gather(*(sampling.sample([1], sampling_params=SamplingParams(max_tokens=2)) for _ in range(20)))
    lines = [record.getMessage() for record in caplog.records if "retrying" in record.getMessage()]
    if unsaid:
        assert lines == []
        return
    assert len(lines) == 1
    assert "Sample: ENGINE_UNAVAILABLE (the engine starts again)" in lines[0]
    assert "up to 60 s" in lines[0]


async def test_a_given_up_call_says_how_often_and_how_long_it_was_sent(server):
    server.sampler.refusals = [errors.EngineUnavailable("starting", retry_after=0.01)] * 1000
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.1, first_delay=0.01)) as client:
        with pytest.raises(errors.EngineUnavailable) as caught:
            await client.create_sampling_client().sample([1])
    assert "RetryPolicy.budget is 0.1 s" in caught.value.__notes__[0]


FORKED = """
child = os.fork()
if not child:
    refused = 0
    for call in (client.list_runs, training.optim_step, lambda: paceline.ServiceClient(address)):
        try:
            call()
        except paceline.errors.Forked as error:
            refused += "spawn" in str(error)
    client.close()
    os.write(1, f"refused {refused}".encode())
    sys.exit(0)
os.waitpid(child, 0)
training.forward_backward(make_data())
training.optim_step()
"""


async def test_a_forked_process_is_refused_at_once_and_its_parent_goes_on(server):
    status, out, said = await run(server, FORKED)
    assert (status, out, server.trainer.steps) == (0, "refused 3", 1), said


async def test_a_forked_process_that_drops_its_parents_client_goes_on(server):
    body = """
import gc, signal
child = os.fork()
if not child:
    signal.alarm(60)
    del client, training
    gc.collect()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    status, out, said = await run(server, body)
    assert (status, out) == (0, "0\n"), said


async def test_forked_processes_live_while_calls_of_their_parent_are_in_flight(server):
    body = """
import time
sampling, ended = client.create_sampling_client(), set()
for _ in range(30):
    waiting = [sampling.sample([1]) for _ in range(20)]
    child = os.fork()
    if not child:
        time.sleep(0.05)  # in which threads of gRPC would crash it
        os._exit(0)
    ended.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for call in waiting:
        call.result()
print(ended)
"""
    status, out, said = await run(server, body)
    assert (status, out) == (0, "{0}\n"), said


async def test_a_forked_process_does_not_wait_for_a_call_of_its_parent(server):
    server.trainer.refusals[1] = [errors.EngineUnavailable("starting", retry_after=200)]
    body = """
import asyncio, signal
waiting = training.forward(make_data())
done = client.create_sampling_client().sample([1], sampling_params=paceline.SamplingParams(max_tokens=1))
done.result()
for _ in range(20):
    training.get_info()
async def wait():
    await waiting
child = os.fork()
if not child:
    signal.alarm(60)
    refused = 0
    for call in (waiting.result, lambda: waiting.result(60), lambda: asyncio.run(wait())):
        try:
            call()
        except paceline.errors.Forked as error:
            refused += "spawn" in str(error)
    os.write(1, f"refused {refused}, answered {len(done.result().sequences)}".encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    _, out, said = await run(server, body, close=0)
    assert out == "refused 3, answered 1", said


async def test_a_process_that_is_forked_before_the_first_client_has_its_own(server):
    body = "import os, sys, paceline\nif os.fork():\n    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    script = body + "print(paceline.ServiceClient(sys.argv[1]).get_run(sys.argv[2]).step)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["-c", script, server.address, server.trainer.run_id]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"0\n")


async def test_service_and_sampling_clients_work_from_a_pickle_in_another_process(server, monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "key-of-the-variable")
    async with ServiceClient(server.address) as client:
        pickled = pickle.dumps((client, client.create_sampling_client(run_id=server.trainer.run_id, version=3)))
    assert b"key-of-the-variable" not in pickled
    script = (
        "import pickle, sys, paceline\n"
        "client, sampling = pickle.loads(sys.stdin.buffer.read())\n"
        f"print(client.get_run({server.trainer.run_id!r}).step)\n"
        "print(sampling.sample([4], sampling_params=paceline.SamplingParams(max_tokens=2)).result().model.version)\n"
    )
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT, **pipes)
    out, _ = await process.communicate(pickled)
    assert out.decode() == "0\n3\n"
    assert server.trainer.metadata["authorization"] == "Bearer key-of-the-variable"


async def test_what_cannot_be_pickled_says_so(server):
    async with ServiceClient(server.address, "key-of-the-argument", retry=QUICK) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        with pytest.raises(errors.InvalidArgument, match="PACELINE_API_KEY"):
            pickle.dumps(client)
        with pytest.raises(errors.Unsupported, match="get_training_client"):
            pickle.dumps(training)
        with pytest.raises(errors.Unsupported, match="result"):
            pickle.dumps(training.forward(make_data()))


@pytest.mark.parametrize("key", ["a key\n", "\n a key"])
async def test_whitespace_around_a_key_is_stripped(server, key):
    async with ServiceClient(server.address, key) as client:
        await client.get_run_async(server.trainer.run_id)
    assert server.trainer.metadata["authorization"] == "Bearer a key"


async def test_arguments_and_variables_that_cannot_be_used_are_refused_by_name(server, monkeypatch, tmp_path):
    cases = {
        "api_key": {"api_key": "two\nlines"},
        "address": {"address": f"http://{server.address}"},
        "tls_ca": {"tls_ca": tmp_path / "absent.pem"},
        "tls_cert": {"tls_ca": "system", "tls_cert": tmp_path / "absent.pem"},
    }
    for field, arguments in cases.items():
        with pytest.raises(errors.InvalidArgument) as caught:
            ServiceClient(**arguments)
        assert caught.value.field == field
    for variable, value in (
        ("PACELINE_API_KEY", "two\nlines"),
        ("PACELINE_ADDRESS", "https://x"),
        ("PACELINE_TLS_CA", "/absent"),
    ):
        with monkeypatch.context() as context, pytest.raises(errors.InvalidArgument) as caught:
            context.setenv(variable, value)
            ServiceClient()
        assert caught.value.field == variable
        assert "two" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "gateway.example", "localhost:", "[::1]", "::1"])
async def test_an_address_without_a_port_is_refused_at_once_with_the_default(monkeypatch, address):
    with pytest.raises(errors.InvalidArgument, match=r"without a port; give host:port.* 50050") as caught:
        ServiceClient(address)
    assert caught.value.field == "address"
    monkeypatch.setenv("PACELINE_ADDRESS", address)
    with pytest.raises(errors.InvalidArgument) as caught:
        ServiceClient()
    assert caught.value.field == "PACELINE_ADDRESS"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:99999", "localhost:0", "gateway.example:65536", "[::1]:70000", "dns:///gateway.example:99999"],
)
async def test_an_address_with_a_port_that_cannot_be_is_refused_at_once(monkeypatch, address):
    with pytest.raises(errors.InvalidArgument, match="port from 1 to 65535") as caught:
        ServiceClient(address)
    assert caught.value.field == "address"
    monkeypatch.setenv("PACELINE_ADDRESS", address)
    with pytest.raises(errors.InvalidArgument) as caught:
        ServiceClient()
    assert caught.value.field == "PACELINE_ADDRESS"


@pytest.mark.parametrize("address", ["[::1]:50050", "dns:///gateway.example:50050", "unix:/run/gateway.socket"])
async def test_other_addresses_that_grpc_knows_are_taken(address):
    ServiceClient(address).close()


@pytest.mark.parametrize(("key", "field"), [(None, "PACELINE_API_KEY"), ("wrong", "api_key")])
async def test_a_refused_key_names_where_it_came_from_and_what_to_set(server, key, field):
    server.sampler.refusals = [errors.InvalidApiKey("is not known")]
    async with ServiceClient(server.address, key) as client:
        with pytest.raises(errors.InvalidApiKey, match="PACELINE_API_KEY") as caught:
            await client.create_sampling_client().sample([1])
    assert caught.value.field == field
    assert server.address in caught.value.message


async def test_an_expired_key_is_told_as_the_gateway_tells_it(server):
    server.sampler.refusals = [errors.ApiKeyExpired("the API key laptop expired at noon")]
    async with ServiceClient(server.address, "old") as client:
        with pytest.raises(errors.ApiKeyExpired, match="laptop expired at noon"):
            await client.create_sampling_client().sample([1])
