"""Arguments of the client that cannot be sent: each is refused by its name before anything is sent."""

import asyncio
from datetime import UTC, datetime

import numpy as np
import pytest
import tinker
import torch
from support.stacks.toy_trainer import make_data
from transformers import BatchEncoding

from paceline import AdamParams, Checkpoint, CheckpointKind, Datum, ModelInput, SamplingParams, ServiceClient, errors
from paceline.client.commands import MAX_COMMANDS_UNANSWERED
from paceline.layout import check_run_id


@pytest.fixture
async def client(server):
    async with ServiceClient(server.address) as connected:
        yield connected


@pytest.mark.parametrize("params", [1e-4, 0.0, AdamParams, {"learning_rate": 1e-4}])
async def test_settings_of_no_optimizer_are_refused_and_the_classes_of_settings_are_named(server, training, params):
    with pytest.raises(
        errors.InvalidArgument, match=rf"is of type {type(params).__name__}; give .* AdamParams"
    ) as caught:
        training.optim_step(params)
    assert caught.value.field == "optim_params"
    assert server.trainer.executed == []


@pytest.mark.parametrize(
    ("call", "field", "wanted"),
    [
        (lambda client: client.create_lora_training_client(16), "base_model", "is of type int; give a string"),
        (lambda client: client.create_lora_training_client(rank="16"), "lora.rank", "is of type str; give an integer$"),
        (lambda client: client.create_lora_training_client(layers=3), "lora.layers", "is of type int; give a list"),
        (lambda client: client.create_lora_training_client(target_modules=3), "target_modules", "give a list of names"),
        (lambda client: client.create_full_training_client(storage="float32"), "storage", "WeightStorage.FLOAT32"),
        (lambda client: client.create_training_client_from_state(3), "path", "give the path of a checkpoint"),
        (lambda client: client.get_training_client(3), "run_id", "give a string"),
        (lambda client: client.create_sampling_client(3), "model_path", "give a string"),
        (lambda client: client.get_run(3), "run_id", "give a string"),
        (lambda client: client.delete_run(3), "run_id", "give a string"),
        (lambda client: client.list_checkpoints(3), "run_id", "give a string"),
        (lambda client: client.list_checkpoints(kind="state"), "kind", "CheckpointKind.STATE"),
        (lambda client: client.delete_checkpoint(3), "path", "give a string"),
        (lambda client: client.download_checkpoint(3, "x"), "path", "give the path of a checkpoint"),
        (lambda client: client.render_conversations([], 3), "base_model", "give a string"),
        (lambda client: client.render_conversations(None), "conversations", "give a list of conversations"),
        (lambda _: ServiceClient(3), "address", "give host:port"),
        (lambda _: ServiceClient(api_key=3), "api_key", "give the key"),
    ],
)
async def test_an_argument_of_the_wrong_type_is_refused_by_its_name(client, call, field, wanted):
    with pytest.raises(errors.InvalidArgument, match=wanted) as caught:
        await asyncio.to_thread(call, client)
    assert caught.value.field == field


RUN = "run-" + "0" * 32


@pytest.mark.parametrize("ending", ["\n", " ", "é", "\x00"])
async def test_weights_whose_name_cannot_be_sent_are_refused_when_the_client_is_made(client, training, ending):
    with pytest.raises(errors.InvalidPath) as caught:
        client.create_sampling_client(f"paceline://{RUN}/sampler/a{ending}")
    assert caught.value.field == "model_path"
    with pytest.raises(errors.InvalidPath) as caught:
        training.create_sampling_client(f"paceline://{RUN}/sampler/a{ending}")
    assert caught.value.field == "model_path"
    with pytest.raises(errors.RunNotFound) as caught:
        client.create_sampling_client(run_id=RUN + ending)
    assert caught.value.field == "run_id"


async def test_a_sampling_client_of_a_checkpoint_samples_from_no_other_weights(client, training):
    with pytest.raises(errors.InvalidPath):
        training.create_sampling_client("")
    path = f"paceline://{RUN}/sampler/a"
    assert training.create_sampling_client(path).model == client.create_sampling_client(path).model


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ((SamplingParams(max_tokens=1),), errors.InvalidArgument, "num_samples"),
        ((-1,), errors.OutOfRange, "num_samples"),
        ((0,), errors.OutOfRange, "num_samples"),
        ((1, SamplingParams(json_schema={"type": "object"})), errors.InvalidArgument, "params.json_schema"),
        ((1, SamplingParams(top_k=-1)), errors.OutOfRange, "params.top_k"),
        ((1, SamplingParams(stop_token_ids=[2, -1])), errors.OutOfRange, "params.stop_token_ids[1]"),
    ],
)
async def test_a_sample_whose_arguments_cannot_be_sent_is_refused_by_the_field(client, arguments, error, field):
    sampling = client.create_sampling_client()
    for sample in (sampling.sample, sampling.sample_stream):
        with pytest.raises(error) as caught:
            sample([1], *arguments)
        assert type(caught.value) is error
        assert caught.value.field == field


async def test_a_negative_number_is_out_of_range(client, training):
    calls = {
        "ttl_seconds": lambda: client.set_checkpoint_ttl("paceline://a", -1),
        "lora.layers[1]": lambda: client.create_lora_training_client(layers=[0, -1]),
    }
    for field, call in calls.items():
        with pytest.raises(errors.OutOfRange, match=r"must not be negative$") as caught:
            await asyncio.to_thread(call)
        assert caught.value.field == field
    for save in (training.save_state, training.save_weights_for_sampler):
        with pytest.raises(errors.OutOfRange) as caught:
            save("a", -1)
        assert caught.value.field == "ttl_seconds"


async def test_a_command_whose_arguments_cannot_be_sent_uses_up_no_place_in_the_order(server, training):
    with pytest.raises(errors.InvalidArgument, match="give a string") as caught:
        training.load_state(3)
    assert caught.value.field == "path"
    with pytest.raises(errors.InvalidArgument, match="give a number") as caught:
        training.optim_step(AdamParams(learning_rate="high"))
    assert caught.value.field == "adamw.learning_rate"
    await training.forward(make_data())
    assert server.trainer.executed == ["ForwardBackward"]


@pytest.mark.parametrize("value", ["mean", [], {}, np.zeros(3)], ids=str)
async def test_what_is_none_of_the_words_of_an_argument_is_refused_with_the_words(client, training, value):
    calls = {
        "reduction": lambda: training.forward(make_data(), reduction=value),
        "wait_for": lambda: training.publish_weights(wait_for=value),
        "outstanding": lambda: client.get_training_client(training.run_id, outstanding=value),
    }
    for field, call in calls.items():
        with pytest.raises(errors.InvalidArgument, match=r"; use \w+, \w+ or \w+$") as caught:
            await asyncio.to_thread(call)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda _, training: training.forward(make_data(), loss_fn_config=np.zeros(3)), "loss_fn_config"),
        (lambda _, training: training.forward([Datum([1], {"a\ud800": [1]})]), "data[0].loss_fn_inputs"),
        (lambda *_: Datum([1], {1: [1]}), "loss_fn_inputs"),
        (lambda client, _: client.create_lora_training_client(user_metadata=np.zeros(3)), "user_metadata"),
    ],
)
async def test_what_protobuf_or_python_cannot_take_is_refused_by_the_field(client, training, call, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        await asyncio.to_thread(call, client, training)
    assert caught.value.field.startswith(field)


async def test_a_command_after_the_largest_seq_id_is_refused_by_the_field(server, client):
    server.trainer.last = 2**64 - 1
    training = await client.get_training_client_async(server.trainer.run_id)
    for _ in range(MAX_COMMANDS_UNANSWERED + 1):
        with pytest.raises(errors.OutOfRange) as caught:
            await training.forward(make_data())
        assert caught.value.field == "seq_id"
        assert caught.value.fate is errors.Fate.TURNED_AWAY


@pytest.mark.parametrize(
    "call",
    [
        lambda training: training.forward([]),
        lambda training: training.forward_backward(make_data(), loss_fn=3),
        lambda training: training.forward_backward_custom(make_data(), 3),
        lambda training: training.forward_backward_custom(make_data(), lambda *_: 3),
        lambda training: training.optim_step(3),
        lambda training: training.save_state("a", -1),
        lambda training: training.save_weights_for_sampler(3),
        lambda training: training.load_state(3),
        lambda training: training.load_state_with_optimizer(3),
        lambda training: training.publish_weights(ack_timeout=-1),
    ],
)
async def test_a_command_that_the_client_refuses_was_turned_away(server, training, call):
    with pytest.raises(errors.InvalidArgument) as caught:
        await call(training)
    assert caught.value.fate is errors.Fate.TURNED_AWAY
    assert not server.trainer.gradient.any()


async def test_what_became_of_the_commands_of_a_closed_client_is_told(server):
    server.trainer.places = asyncio.Semaphore(0)
    async with ServiceClient(server.address) as client:
        training = await client.get_training_client_async(server.trainer.run_id)
        left = training.forward(make_data())
        await client.close_async(timeout=0)
        with pytest.raises(errors.Cancelled) as caught:
            await left
        assert caught.value.fate is errors.Fate.UNKNOWN
        with pytest.raises(errors.Cancelled) as caught:
            training.forward(make_data())
        assert caught.value.fate is errors.Fate.TURNED_AWAY
    server.trainer.places.release()


@pytest.mark.parametrize(
    "prompt",
    [
        BatchEncoding({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}),
        BatchEncoding({"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)}),
        {"input_ids": np.array([1, 2, 3])},
        ModelInput.from_ints([1, 2, 3]),
        tinker.ModelInput.from_ints([1, 2, 3]),
    ],
)
async def test_what_holds_the_token_ids_of_one_text_is_a_prompt_and_a_datums_tokens(client, prompt):
    sampling = client.create_sampling_client()
    params = SamplingParams(max_tokens=2, seed=1)
    one, other = await sampling.sample(prompt, 1, params), await sampling.sample([1, 2, 3], 1, params)
    assert one == other
    assert Datum(prompt).model_input.tolist() == [1, 2, 3]
    assert len(Datum.from_completion(prompt, prompt).model_input) == 5


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (BatchEncoding({"input_ids": [[1, 2], [3, 4]]}), r"holds 2 sequences; give one at a time, \.input_ids\[0\]"),
        (BatchEncoding({"input_ids": [0, 1], "attention_mask": [0, 1]}), "is padded; tokenize one text without"),
        ({"tokens": [1]}, "is a dict without input_ids"),
        ([{"role": "user", "content": "x"}], "is a list of mappings; .*apply_chat_template"),
        (torch.tensor([[1, 2]]), "it holds 1 sequences, give one of them"),
        (np.int64(5), "is one number; give a list of them"),
        ([[1, 2], [3]], "its rows differ in length; give one sequence"),
        ([True, False], "holds bool; give token ids"),
        ("text", "is text; give token ids"),
    ],
)
async def test_what_is_not_one_sequence_of_tokens_is_refused_with_what_to_give(client, prompt, told):
    with pytest.raises(errors.InvalidArgument, match=told) as caught:
        client.create_sampling_client().sample(prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda client, _: client.create_sampling_client().sample([1], max_tokens=3), r"SamplingParams\(max_tokens="),
        (lambda client, _: client.create_sampling_client().sample_stream([1], n=3), "give num_samples="),
        (lambda client, _: client.create_sampling_client(model="x"), "give base_model="),
        (lambda client, _: client.create_lora_training_client(lora_rank=3), "give rank="),
        (lambda client, training: training.optim_step(lr=1e-4), r"give AdamParams\(learning_rate="),
        (lambda client, training: training.forward(make_data(), loss="ppo"), "give loss_fn="),
        (lambda *_: AdamParams(lr=1e-4), "AdamParams has no argument 'lr'; give learning_rate="),
        (lambda *_: SamplingParams(temprature=1), r"did you mean temperature\?"),
        (lambda *_: Datum([1], target_tokens=[1]), 'give loss_fn_inputs={"target_tokens"'),
        (lambda *_: ServiceClient(base_url="x"), "ServiceClient has no argument 'base_url'; give address="),
        (lambda *_: AdamParams(nothing_like_it=1), "it has learning_rate, beta1"),
    ],
)
async def test_an_argument_that_does_not_exist_is_refused_with_what_to_write_instead(client, training, call, told):
    with pytest.raises(TypeError, match=told):
        await asyncio.to_thread(call, client, training)


async def test_a_checkpoint_is_taken_where_its_path_is_and_a_future_names_its_result(client, training):
    path = f"paceline://{RUN}/sampler/a"
    checkpoint = Checkpoint(path, RUN, CheckpointKind.SAMPLER, "a", 1, 1, "", "", datetime.now(UTC))
    assert client.create_sampling_client(checkpoint).model == client.create_sampling_client(path).model
    assert training.create_sampling_client(checkpoint).model.checkpoint == path
    future = training.forward(make_data())
    for call in (training.load_state, client.create_sampling_client, client.create_training_client_from_state):
        with pytest.raises(errors.InvalidArgument, match=r"is of type PacelineFuture; give what its \.result\(\)"):
            await asyncio.to_thread(call, future)
    await future


async def test_a_closed_client_says_what_to_do(server):
    async with ServiceClient(server.address) as client:
        sampling = client.create_sampling_client()
    with pytest.raises(errors.Cancelled, match="is closed; make calls inside its `with` block"):
        sampling.sample([1])


def test_a_run_that_does_not_exist_is_named():
    with pytest.raises(errors.RunNotFound, match="no such run: my-run"):
        check_run_id("my-run")


@pytest.mark.parametrize(
    ("value", "milliseconds"), [(0, 1), (1e-6, 1), (0.25, 250), (np.float32(2), 2000), (86400, 86_400_000)]
)
async def test_a_wait_for_acknowledgements_is_sent_in_milliseconds(server, training, value, milliseconds):
    await training.publish_weights(ack_timeout=value)
    assert server.trainer.requests[-1].ack_timeout_ms == milliseconds


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros(()), torch.zeros(3), 3.5, object()], ids=repr)
async def test_a_value_that_is_no_text_or_list_is_refused_by_the_name_of_its_argument(client, training, value):
    calls = {
        "model_path": lambda: client.create_sampling_client(value),
        "run_id": lambda: client.create_sampling_client(run_id=value),
        "base_model": lambda: client.create_sampling_client(base_model=value),
        "directory": lambda: client.download_checkpoint(f"paceline://{RUN}/state/a", value),
        "name": lambda: training.save_state(value),
        "path": lambda: training.load_state(value),
        "lora.target_modules": lambda: client.create_lora_training_client(target_modules=[value]),
        "timeout": lambda: client.close(str(value)),
    }
    for field, call in calls.items():
        with pytest.raises(errors.InvalidArgument, match="is of type") as caught:
            await asyncio.to_thread(call)
        assert caught.value.field.removesuffix("[0]") == field


@pytest.mark.parametrize("field", ["lora.layers", "target_modules"])
async def test_an_array_of_one_number_is_no_list(client, field):
    with pytest.raises(errors.InvalidArgument, match="is of type ndarray; give a list") as caught:
        await client.create_lora_training_client_async(**{field.removeprefix("lora."): np.array(3)})
    assert caught.value.field == field


async def test_an_argument_for_weights_may_be_none(client):
    assert client.create_sampling_client(None, run_id=None, base_model=None).model.is_base
