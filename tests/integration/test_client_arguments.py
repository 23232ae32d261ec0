"""Arguments of the client that cannot be sent: each is refused by its name before anything is sent."""

import asyncio

import pytest
from support.stacks.toy_trainer import make_data

from paceline import AdamParams, SamplingParams, ServiceClient, errors


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
    assert caught.value.field == "params"
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
        (lambda client: client.create_sampling_client(3), "model.checkpoint", "give a string"),
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
    assert caught.value.field == "path"
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
