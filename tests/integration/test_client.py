"""Training through the client, against real services: order, retries, custom losses, errors."""

import asyncio
import gc
import logging
import re
from time import monotonic

import numpy as np
import pytest
from support.patience import PATIENCE
from support.stacks.cluster import wait_for
from support.stacks.toy_trainer import VOCABULARY, make_data

from paceline import RetryPolicy, SamplingParams, ServiceClient, Timeouts, errors
from paceline.client.commands import MAX_COMMANDS_UNANSWERED
from paceline.client.loop_thread import THREAD
from paceline.trainer.v1 import trainer_service_pb2 as pb

QUICK = RetryPolicy(budget=60.0, first_delay=0.01, max_delay=0.05)
SHORT = SamplingParams(max_tokens=3)


@pytest.fixture
async def client(server):
    async with ServiceClient(server.address, retry=QUICK) as connected:
        yield connected


async def test_commands_execute_in_the_order_of_issue_without_waiting_between_them(server, training):
    futures = []
    for _ in range(2 * MAX_COMMANDS_UNANSWERED):
        futures += [training.forward_backward(make_data()), training.optim_step()]
    steps = [(await future).step for future in futures[1::2]]
    assert steps == list(range(1, 2 * MAX_COMMANDS_UNANSWERED + 1))
    assert server.trainer.executed == ["ForwardBackward", "OptimStep"] * (2 * MAX_COMMANDS_UNANSWERED)


async def test_commands_of_several_threads_leave_no_gap(server, training):
    def issue():
        return [training.forward(make_data()) for _ in range(20)]

    for futures in await asyncio.gather(*(asyncio.to_thread(issue) for _ in range(4))):
        for future in futures:
            await future
    assert sorted(server.trainer.accepted) == list(range(1, 81))


@pytest.mark.parametrize(
    "refusal",
    [
        errors.MessageTooLarge("is too long"),
        errors.UnreadableMessage("is cut"),
        errors.OutOfRange("has too many"),
        errors.InvalidApiKey("is not known"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
async def test_commands_after_one_that_was_not_accepted_execute(server, refusal):
    server.trainer.refusals[2] = [refusal]
    async with ServiceClient(server.address, retry=QUICK, max_in_flight=2) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        futures = [training.forward_backward(make_data()) for _ in range(6)]
        with pytest.raises(type(refusal)):
            await futures.pop(1)
        for future in futures:
            await future
        assert (await training.optim_step()).step == 1


@pytest.mark.parametrize("denial", [errors.InvalidApiKey("is not known"), errors.Overloaded("full")], ids=repr)
async def test_commands_execute_again_once_the_service_no_longer_turns_them_away(server, denial):
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        await training.forward_backward(make_data())
        gradient = server.trainer.gradient.copy()
        server.trainer.denial = denial
        for future in [training.forward_backward(make_data()) for _ in range(3)]:
            with pytest.raises(type(denial)):
                await future
        with pytest.raises(type(denial)):
            await training.publish_weights()
        server.trainer.denial = None
        await training.forward_backward(make_data())
        np.testing.assert_allclose(server.trainer.gradient, 2 * gradient)
        assert (await training.optim_step()).step == 1
    assert "PublishWeights" not in server.trainer.executed


async def test_commands_that_were_issued_before_one_was_turned_away_for_good_end_as_it_does(server):
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        await training.forward_backward(make_data())
        server.trainer.denial = errors.Overloaded("full")
        outcomes = await asyncio.gather(
            *(training.forward_backward(make_data()) for _ in range(10)), return_exceptions=True
        )
        assert {type(outcome) for outcome in outcomes} == {errors.Overloaded}
        assert {outcome.fate for outcome in outcomes} == {errors.Fate.TURNED_AWAY}
        assert len({id(outcome) for outcome in outcomes}) == len(outcomes), "each has its own traceback"
        assert server.trainer.arrivals == [1, 2], "they do not each wait for the service"
        server.trainer.denial = None
        await training.forward_backward(make_data())
        assert (await training.optim_step()).step == 1
    assert server.trainer.executed == ["ForwardBackward", "ForwardBackward", "OptimStep"]


@pytest.mark.parametrize(
    "refusal", [errors.InvalidApiKey("is not known"), errors.MessageTooLarge("is too long")], ids=repr
)
async def test_a_command_that_is_turned_away_after_its_answer_was_lost_may_have_executed_and_does_once(
    server, training, refusal
):
    server.trainer.replies_to_drop[1] = 1
    server.trainer.refusals[1] = [None, refusal]
    with pytest.raises(errors.UpstreamUnavailable) as caught:
        await training.forward_backward(make_data())
    assert "turned away" in caught.value.__notes__[0]
    assert (await training.optim_step()).step == 1
    assert server.trainer.executed == ["ForwardBackward", "OptimStep"]
    assert server.trainer.arrivals == [1, 1, 2]


async def test_a_command_that_may_not_have_arrived_is_not_passed_over(server):
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        server.trainer.refusals[1] = [errors.ShuttingDown("stopping")]
        lost, issued_before = training.forward_backward(make_data()), training.optim_step()
        with pytest.raises(errors.ShuttingDown) as caught:
            await lost
        assert caught.value.fate is errors.Fate.UNKNOWN
        assert "may have executed: attach again with ServiceClient.get_training_client(" in str(caught.value)
        with pytest.raises(errors.ShuttingDown) as caught:
            await issued_before
        assert caught.value.fate is errors.Fate.TURNED_AWAY
        for _ in range(2):
            with pytest.raises(errors.SeqIdGap) as caught:
                await training.optim_step()
            assert caught.value.fate is errors.Fate.TURNED_AWAY
            assert "so this one was not sent; attach again with ServiceClient.get_training_client(" in str(caught.value)
        assert not server.trainer.executed
        again = await client.get_training_client_async(server.trainer.run_id)
        await again.forward_backward(make_data())
        assert (await again.optim_step()).step == 1


async def test_the_next_command_follows_one_that_arrived_though_its_fate_was_unknown(server):
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        server.trainer.replies_to_drop[1] = 1
        with pytest.raises(errors.UpstreamUnavailable) as caught:
            await training.forward_backward(make_data())
        assert caught.value.fate is errors.Fate.UNKNOWN
        assert (await training.optim_step()).step == 1
    assert server.trainer.arrivals == [1, 2]


async def test_a_command_that_the_trainer_has_is_no_longer_kept(server, training):
    server.trainer.places = asyncio.Semaphore(0)
    passed = training.forward_backward(make_data(), loss_fn_config={"mark": 1.0})
    while not server.trainer.accepted:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0.01)
    await training.get_info_async()  # the answer of Execute has been read
    gc.collect()
    commands = [one for one in gc.get_objects() if isinstance(one, pb.ForwardBackwardRequest)]
    bodies = [one.forward_backward for one in gc.get_objects() if isinstance(one, pb.ExecuteRequest)]
    arrived = {id(request) for request in server.trainer.requests}
    kept = [one for one in (*commands, *bodies) if "mark" in one.loss_fn_config and id(one) not in arrived]
    server.trainer.places.release()
    await passed
    assert not kept


async def test_commands_that_wait_say_once_what_is_ahead_of_them(server, training, caplog, monkeypatch):
    monkeypatch.setattr("paceline.client.commands.WAIT_NOTICE_SECONDS", 0.2)
    server.trainer.places = asyncio.Semaphore(0)

    def notices():
        return [(one.levelno, one.getMessage()) for one in caplog.records if "no answer after" in one.getMessage()]

    with caplog.at_level(logging.INFO, "paceline"):
        queue = [training.forward_backward(make_data()), training.optim_step()]
        await asyncio.to_thread(wait_for, notices)
        for _ in queue:
            server.trainer.places.release()
        await asyncio.gather(*queue)
        later = [training.forward_backward(make_data()), training.optim_step()]
        await asyncio.to_thread(wait_for, lambda: len(notices()) > 1)
        for _ in later:
            server.trainer.places.release()
        await asyncio.gather(*later)
    reason = "none of this run is ahead of it: the trainer works for other runs"
    assert notices() == [
        (logging.WARNING, f"command 1 of {training.run_id}: no answer after 0.2 s; {reason}"),
        (logging.INFO, f"command 3 of {training.run_id}: no answer after 0.2 s; {reason}"),
    ]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("mine")], ids=repr)
async def test_a_callback_that_raises_ends_no_other_call(training, caplog, error):
    def fail(_):
        raise error

    future = training.forward_backward(make_data())
    future.add_done_callback(fail)
    await future
    assert (await asyncio.wait_for(training.optim_step(), 20)).step == 1
    assert "a callback of a future failed" in caplog.text


async def test_arguments_may_be_changed_once_a_command_is_issued(server, training):
    data = make_data(1)
    weights = data[0].loss_fn_inputs["weights"].copy()
    future = training.forward_backward(data)
    data[0].loss_fn_inputs["weights"][:] = 0
    output = await future
    logprobs = output.loss_fn_outputs[0]["logprobs"]
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * logprobs).sum(), rel=1e-5)


async def test_a_command_whose_reply_is_lost_is_sent_again_and_applied_once(server, training):
    server.trainer.replies_to_drop[1] = 2
    passed, stepped = training.forward_backward(make_data()), training.optim_step()
    await passed
    assert (await stepped).step == 1
    assert server.trainer.arrivals.count(1) == 3
    assert server.trainer.executed == ["ForwardBackward", "OptimStep"]


@pytest.mark.parametrize(
    "refusal",
    [errors.ShuttingDown("stopping", retry_after=0.01), errors.Overloaded("full", retry_after=0.01)],
    ids=repr,
)
async def test_a_command_that_was_not_taken_is_sent_again(server, training, refusal):
    server.trainer.refusals[1] = [refusal]
    await training.forward_backward(make_data())
    assert server.trainer.arrivals == [1, 1]


async def test_the_time_of_a_command_begins_again_whenever_one_before_it_is_answered(server, training, monkeypatch):
    loop, passed = THREAD.start(), 0.0
    monkeypatch.setattr(loop, "time", lambda: monotonic() + passed)

    async def let_pass(seconds):
        nonlocal passed
        passed += seconds
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))

    server.trainer.places = asyncio.Semaphore(0)
    futures = [training.forward_backward(make_data()) for _ in range(4)]
    while len(server.trainer.arrivals) < 4:  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0.01)
    for future in futures[:2]:
        await let_pass(0.7 * Timeouts().training)
        server.trainer.places.release()
        await future
    await let_pass(1.1 * Timeouts().training)
    async with asyncio.timeout(PATIENCE):
        for future in futures[2:]:
            with pytest.raises(
                errors.TimedOut, match=r"nor one before it was answered within 600 s \(Timeouts.training"
            ):
                await future
    assert sorted(server.trainer.arrivals) == [1, 2, 3, 4]


async def test_a_call_survives_a_restart_of_the_server(server, training):
    server.trainer.load_may_end.clear()
    loaded = training.load_state("paceline://somewhere")
    await server.trainer.load_began.wait()
    await server.stop()
    server.trainer.load_may_end.set()
    await server.start()
    assert (await loaded).run_id == server.trainer.run_id
    assert server.trainer.arrivals == [1], "it is followed, not sent again"


async def test_making_a_run_is_retried_with_the_same_request_id(server, client):
    training = await client.create_lora_training_client_async(rank=8)
    assert training.run_id == server.trainer.run_id
    assert len(server.trainer.created) == 2
    assert len(set(server.trainer.created)) == 1


async def test_a_spent_budget_raises_the_last_error(server):
    policy = RetryPolicy(budget=0.0)
    async with ServiceClient(server.address, retry=policy) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        server.trainer.refusals[1] = [errors.ShuttingDown("stopping")]
        with pytest.raises(errors.ShuttingDown):
            await training.forward_backward(make_data())
    assert server.trainer.arrivals == [1]


async def test_a_refused_command_keeps_its_type_and_the_next_ones_go_on(server, training):
    refused = training.forward_backward(make_data(), "no_such_loss")
    passed, stepped = training.forward_backward(make_data()), training.optim_step()
    with pytest.raises(errors.UnknownLoss) as caught:
        await refused
    assert caught.value.field == "loss_fn"
    await passed
    assert (await stepped).step == 1
    assert sorted(server.trainer.arrivals) == [1, 2, 3]


async def test_an_error_of_a_query_carries_its_metadata(client):
    with pytest.raises(errors.RunNotFound) as caught:
        await client.get_run_async("run-nobody")
    assert caught.value.metadata == {"run_id": "run-nobody"}


async def test_a_large_batch_is_sent_in_parts_and_merged_in_order(server, training):
    data = make_data(2500, length=3)
    whole = await training.forward_backward(data)
    assert sorted(server.trainer.arrivals) == [1, 2, 3]
    parts = [await training.forward([datum]) for datum in data[::500]]
    for part, output in zip(parts, whole.loss_fn_outputs[::500], strict=True):
        np.testing.assert_array_equal(part.loss_fn_outputs[0]["logprobs"], output["logprobs"])
    assert whole.metrics["tokens:sum"] == 7500
    assert whole.metrics["logprob:mean"] == pytest.approx(-whole.metrics["loss:sum"] / 7500)


async def test_a_reduction_is_asked_for_by_its_name_and_an_unknown_one_is_refused_before_anything_is_sent(
    server, training
):
    await training.forward_backward(make_data(2, length=5), reduction="token_mean")
    await training.forward(make_data(2, length=5), reduction="sequence_mean")
    sent = [(request.reduction, request.reduction_count) for request in server.trainer.requests[-2:]]
    assert sent == [(pb.REDUCTION_TOKEN_MEAN, 10), (pb.REDUCTION_SEQUENCE_MEAN, 2)]
    with pytest.raises(errors.InvalidArgument) as caught:
        training.forward_backward(make_data(), reduction="mean")
    assert caught.value.field == "reduction"
    assert sorted(server.trainer.arrivals) == [1, 2]


async def test_an_error_in_a_part_names_the_datum_of_the_whole_batch(training):
    data = make_data(1500, length=3)
    data[1200].model_input[0] = VOCABULARY
    with pytest.raises(errors.TokenOutOfRange) as caught:
        await training.forward_backward(data)
    assert caught.value.field == "data[1200].model_input"
    assert "datums 1024 to 1499" in caught.value.__notes__[0]


async def test_a_batch_of_which_a_part_may_have_been_executed_ends_in_the_error_of_that_part(server):
    server.trainer.replies_to_drop[2] = 1
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        with pytest.raises(errors.UpstreamUnavailable) as caught:
            await training.forward_backward(make_data(2500, length=3))
        assert "datums 1024 to 2047" in caught.value.__notes__[-1]
        assert caught.value.fate is errors.Fate.UNKNOWN
    assert server.trainer.arrivals == [1, 2], "the rest of the batch is not sent"


async def test_nothing_is_sent_after_a_load_before_it_is_answered(server, client, training):
    server.trainer.lost = True
    server.trainer.load_may_end.clear()
    with pytest.raises(errors.RunStateLost) as caught:
        await training.forward_backward(make_data())
    loaded = training.load_state_with_optimizer(caught.value.metadata["checkpoint"])
    passed = training.forward_backward(make_data())
    await server.trainer.load_began.wait()
    await client.get_run_async(training.run_id)
    assert server.trainer.arrivals == [1, 1], "a lost run takes only a load, and the seq_id stays free"
    server.trainer.load_may_end.set()
    await loaded
    await passed
    assert server.trainer.arrivals == [1, 1, 2]


async def test_a_run_made_from_a_checkpoint_has_its_configuration_and_weights(server, client):
    path = f"paceline://{server.trainer.run_id}/state/best"
    training = await client.create_training_client_from_state_with_optimizer_async(path)
    assert server.trainer.requests[-2].like_checkpoint == path
    assert (server.trainer.requests[-1].path, server.trainer.requests[-1].with_optimizer) == (path, True)
    await training.forward_backward(make_data())
    assert server.trainer.executed == ["LoadCheckpoint", "ForwardBackward"]


@pytest.mark.parametrize("create", ["from_state", "from_state_with_optimizer"])
async def test_a_run_from_a_checkpoint_that_is_gone_is_refused_by_the_arguments_name(server, client, create):
    path = f"paceline://{server.trainer.run_id}/state/gone"
    with pytest.raises(errors.CheckpointNotFound) as caught:
        await getattr(client, f"create_training_client_{create}_async")(path)
    assert str(caught.value) == "path: no such checkpoint"


async def test_an_attached_client_continues_the_numbering(server, client, training):
    await training.forward_backward(make_data())
    again = await client.get_training_client_async(training.run_id)
    assert (await again.optim_step()).step == 1
    assert server.trainer.arrivals == [1, 2]


async def test_a_client_that_attaches_says_for_what_it_waits(server, client, training, caplog):
    server.trainer.places = asyncio.Semaphore(0)
    left = [training.forward(make_data()) for _ in range(3)]
    while len(server.trainer.accepted) < len(left):  # noqa: ASYNC110 - the trainer is asked for nothing else
        await asyncio.sleep(0.01)
    with caplog.at_level(logging.INFO, "paceline"):
        attaching = asyncio.ensure_future(client.get_training_client_async(training.run_id))
        while not (told := [one for one in caplog.messages if "waiting" in one]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    has_ended = attaching.done()
    for _ in left:
        server.trainer.places.release()
    await attaching
    await asyncio.gather(*left)
    assert not has_ended
    assert re.fullmatch(
        rf"attached to {training.run_id}: waiting up to \d+ s for 3 command\(s\) of an earlier client: 1 to 3",
        told[0],
    )


async def test_what_an_earlier_client_left_of_a_step_is_discarded(client, training):
    left = await training.forward_backward(make_data())
    again = await client.get_training_client_async(training.run_id)
    assert await again.discard_gradient() == left.metrics["tokens:sum"]
    assert await again.discard_gradient() == 0
    with pytest.raises(errors.NoGradient):
        await again.optim_step()


async def test_the_older_of_two_clients_on_a_run_is_told_so_and_shares_no_step(server, client, training):
    await training.forward_backward(make_data())
    newer = await client.get_training_client_async(training.run_id)
    first, second = training.optim_step(), newer.optim_step()
    with pytest.raises(errors.ClientSuperseded, match="attached"):
        await first
    assert (await second).step == 1
    assert server.trainer.executed == ["ForwardBackward", "OptimStep"]


async def test_every_call_on_a_connection_whose_gateway_has_gone_says_so_with_the_address(server):
    async with ServiceClient(server.address, retry=RetryPolicy(budget=0.0)) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        await server.stop()
        calls = (
            training.get_info_async,
            client.create_sampling_client().compute_logprobs,
            training.forward_backward,
            training.save_weights_and_get_sampling_client_async,
        )
        arguments = {"compute_logprobs": ([1, 2],), "forward_backward": (make_data(),)}
        for call in calls:
            with pytest.raises(errors.UpstreamUnavailable) as caught:
                await call(*arguments.get(call.__name__, ()))
            assert f"the gateway at {server.address} does not answer; see whether it runs" in str(caught.value)
            assert caught.value.field == "address"


async def test_clients_and_futures_say_what_they_belong_to_but_not_the_key(server):
    run_id = server.trainer.run_id
    async with ServiceClient(server.address, "a-secret-key") as client:
        training = await client.get_training_client_async(run_id)
        assert repr(client) == f"<ServiceClient of {server.address}>"
        assert repr(training) == f"<TrainingClient of {run_id}>"
        assert repr(client.create_sampling_client()) == "<SamplingClient of base>"
        assert repr(client.create_sampling_client(run_id=run_id)) == f"<SamplingClient of {run_id}@newest>"
        server.trainer.load_may_end.clear()
        loaded = training.load_state("paceline://somewhere")
        pending = repr(loaded)
        server.trainer.load_may_end.set()
        await loaded
        assert pending == f"<PacelineFuture pending: LoadCheckpoint 1 of {run_id}>"
        assert repr(loaded) == f"<PacelineFuture done: LoadCheckpoint 1 of {run_id}>"
        sampled = client.create_sampling_client().sample([1], 1, SHORT)
        await sampled
        assert repr(sampled) == "<PacelineFuture done>"


async def test_a_task_that_gives_up_waiting_leaves_the_command_to_its_end(server, training):
    server.trainer.load_may_end.clear()
    loaded = training.load_state("paceline://somewhere")
    passed = training.forward_backward(make_data())
    waiting = asyncio.ensure_future(_wait(passed))
    await server.trainer.load_began.wait()
    waiting.cancel()
    assert not passed.cancel()
    server.trainer.load_may_end.set()
    await loaded
    assert (await passed).metrics["tokens:sum"] == 10


async def _wait(future):
    return await future


async def test_published_weights_are_sampled_by_their_version(server, training):
    sampling = await training.save_weights_and_get_sampling_client_async()
    result = await sampling.sample([1, 2], sampling_params=SHORT)
    assert result.model.version == 3
    assert server.sampler.routes == [f"{training.run_id}@3"]


async def test_everything_works_from_a_thread_without_an_event_loop(server):
    def program():
        with ServiceClient(server.address, retry=QUICK) as client:
            training = client.create_lora_training_client()
            passed, stepped = training.forward_backward(make_data()), training.optim_step()
            assert passed.result(60).metrics["tokens:sum"] == 10
            assert stepped.result(60).step == training.get_info().step == 1
            sampling = training.save_weights_and_get_sampling_client()
            tokens = [token for delta in sampling.sample_stream([1], sampling_params=SHORT) for token in delta.tokens]
            logprobs = sampling.compute_logprobs(np.array([1, 2, 3])).result(60)
            return len(client.list_runs()), tokens, logprobs

    runs, tokens, logprobs = await asyncio.to_thread(program)
    assert (runs, tokens) == (3, [0, 1, 2])
    assert logprobs.logprobs.shape == (3,)
    assert logprobs.model.version == 3


async def test_address_and_key_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("PACELINE_ADDRESS", server.address)
    monkeypatch.setenv("PACELINE_API_KEY", "a key")
    async with ServiceClient() as client:
        await client.get_run_async(server.trainer.run_id)
    assert server.trainer.metadata["authorization"] == "Bearer a key"


async def test_an_own_certificate_without_authorities_is_refused(server):
    with pytest.raises(errors.InvalidArgument) as caught:
        ServiceClient(server.address, tls_cert="cert.pem", tls_key="key.pem")
    assert caught.value.field == "tls_cert"


async def test_closing_ends_what_is_under_way(server):
    server.trainer.load_may_end.clear()
    client = ServiceClient(server.address)
    training = await client.get_training_client_async(server.trainer.run_id)
    loaded, queued = training.load_state("paceline://somewhere"), training.optim_step()
    await server.trainer.load_began.wait()
    await client.close_async(timeout=0)
    for future in (loaded, queued):
        with pytest.raises(errors.Cancelled):
            await future
    with pytest.raises(errors.Cancelled):
        training.optim_step()


async def test_an_unreachable_server_raises_unavailable(server):
    await server.stop()
    async with ServiceClient(server.address, timeouts=Timeouts(connect=0.2)) as client:
        with pytest.raises(errors.UpstreamUnavailable, match=server.address):
            await client.list_runs_async()
    await server.start()
