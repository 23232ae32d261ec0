"""A step that depends on its passes is taken on all of them, or not at all."""

import numpy as np
import pytest
from support.stacks.toy_trainer import make_data

from paceline import AdamParams, Datum, ServiceClient, codec, errors
from paceline.client.batching import MAX_DATUMS
from paceline.client.retry import call_name
from paceline.trainer.v1 import trainer_service_pb2 as pb

DATUM = Datum.from_completion([1, 2, 3], [4, 5, 6])
BAD = Datum.from_completion([1, 2, 3], [4, 5, 10**6])
STEP = AdamParams(learning_rate=0.1)


@pytest.fixture
async def client(server):
    async with ServiceClient(server.address) as connected:
        yield connected


@pytest.mark.services
async def test_a_step_on_a_batch_of_which_a_part_is_refused_is_refused_and_the_run_goes_on(fresh_trainer):
    assert fresh_trainer.start(), fresh_trainer.text()
    async with ServiceClient(f"127.0.0.1:{fresh_trainer.port}") as service:
        training = await service.create_lora_training_client_async(rank=2)
        before = await training.forward([DATUM])
        parts = [DATUM] * MAX_DATUMS, [DATUM, BAD]
        whole = training.forward_backward([datum for part in parts for datum in part])
        update = training.optim_step(STEP, only_if_succeeded=whole)
        after = training.forward([DATUM])
        with pytest.raises(errors.TokenOutOfRange):
            await whole
        with pytest.raises(errors.PrecedingRefused, match=r"TOKEN_OUT_OF_RANGE.*discard_gradient") as caught:
            await update
        assert caught.value.field == "only_if_succeeded"
        assert caught.value.fate is errors.Fate.ANSWERED
        first, second = (answer.loss_fn_outputs[0]["logprobs"] for answer in (before, await after))
        assert np.array_equal(first, second), "the weights are those of before"
        run = await training.get_info_async()
        assert run.step == 0
        assert await training.discard_gradient() == run.gradient_tokens > 0
        passes = [training.forward_backward(part) for part in ([DATUM], [DATUM] * 3)]
        assert (await training.optim_step(STEP, only_if_succeeded=passes)).step == 1
        await training.forward_backward([DATUM])
        assert (await training.optim_step(STEP, only_if_succeeded=passes[1])).step == 2
        await service.delete_run_async(training.run_id)


async def test_a_step_on_a_batch_of_which_the_trainer_lacks_a_part_is_not_sent(server, training):
    server.trainer.refusals[2] = [errors.MessageTooLarge("is too large")]
    whole = training.forward_backward(make_data(2500, length=3))
    update = training.optim_step(only_if_succeeded=whole)
    with pytest.raises(errors.MessageTooLarge):
        await whole
    with pytest.raises(errors.PrecedingRefused, match="discard_gradient") as caught:
        await update
    assert caught.value.fate is errors.Fate.TURNED_AWAY
    assert server.trainer.arrivals == [1, 2]
    assert await training.discard_gradient() > 0
    await training.forward_backward(make_data())
    assert (await training.optim_step()).step == 1


async def test_a_step_on_a_loss_of_ones_own_that_raises_is_not_sent(server, training):
    def failing(data, logprobs):
        raise KeyError("reward")

    passed = training.forward_backward_custom(make_data(), failing)
    with pytest.raises(errors.PrecedingRefused):
        await training.optim_step(only_if_succeeded=passed)
    with pytest.raises(KeyError):
        await passed
    passed = training.forward_backward_custom(make_data(), lambda _, logprobs: (sum(row.sum() for row in logprobs), {}))
    assert (await training.optim_step(only_if_succeeded=passed)).step == 1
    steps = [one for one in server.trainer.requests if call_name(one) == "OptimStep"]
    assert [step.only_if_succeeded_since for step in steps] == [2]


@pytest.mark.parametrize("between", ["turned away", "own loss"])
async def test_a_pass_between_that_the_trainer_lacks_is_part_of_the_condition(server, training, between):
    def failing(data, logprobs):
        raise KeyError("reward")

    first = training.forward_backward(make_data())
    if between == "own loss":
        second = training.forward_backward_custom(make_data(), failing)
    else:
        server.trainer.refusals[2] = [errors.MessageTooLarge("is too large")]
        second = training.forward_backward(make_data())
    with pytest.raises(errors.PrecedingRefused) as caught:
        await training.optim_step(only_if_succeeded=first)
    assert caught.value.fate is errors.Fate.TURNED_AWAY
    with pytest.raises((errors.MessageTooLarge, KeyError)):
        await second
    third = training.forward_backward(make_data())
    assert (await training.optim_step(only_if_succeeded=third)).step == 1, "it came before"


@pytest.mark.services
async def test_a_pass_whose_place_another_caller_has_taken_is_none_that_succeeded(fresh_trainer):
    assert fresh_trainer.start(), fresh_trainer.text()
    async with ServiceClient(f"127.0.0.1:{fresh_trainer.port}") as service:
        training = await service.create_lora_training_client_async(rank=2)
        request = pb.ForwardBackwardRequest(loss_fn="cross_entropy", data=[codec.datum_to_proto(DATUM)])
        request.run_id, request.seq_id = training.run_id, 1
        with fresh_trainer.connect() as stub:
            stub.ForwardBackward(request)
        passed = training.forward_backward([DATUM, DATUM])
        with pytest.raises(errors.PrecedingRefused):
            await training.optim_step(only_if_succeeded=passed)
        with pytest.raises(errors.SeqIdReused):
            await passed
        assert (await training.get_info_async()).step == 0


async def test_a_condition_that_lies_too_far_back_says_so_by_the_arguments_name(server, training):
    server.trainer.step_errors = [errors.OutOfRange("is 1; give more", field="only_if_succeeded_since")]
    passed = training.forward_backward(make_data())
    with pytest.raises(errors.OutOfRange, match="too many commands") as caught:
        await training.optim_step(only_if_succeeded=passed)
    assert caught.value.field == "only_if_succeeded"
    assert caught.value.fate is errors.Fate.ANSWERED


async def test_only_passes_of_this_client_are_taken_as_conditions(server, client, training):
    passed, update = training.forward_backward(make_data()), training.optim_step()
    await update
    other = await client.get_training_client_async(server.trainer.run_id)
    theirs = other.forward(make_data())
    sampled = client.create_sampling_client().sample([1])
    for given, place, told in [
        (await passed, "only_if_succeeded", "ForwardBackwardOutput; give a future"),
        ([passed, await passed], r"only_if_succeeded\[1\]", "ForwardBackwardOutput; give a future"),
        ([update], r"only_if_succeeded\[0\]", "another call"),
        (sampled, "only_if_succeeded", "another call"),
        (theirs, "only_if_succeeded", "another TrainingClient"),
        ([], "only_if_succeeded", "is empty; give a future"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=f"^{place}: .*{told}"):
            training.optim_step(only_if_succeeded=given)
    await theirs
    await sampled
