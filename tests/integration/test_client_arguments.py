"""Arguments of the client that cannot be sent: each is refused by its name before anything is sent."""

import pytest
from support.stacks.toy_services import toy_server

from paceline import AdamParams, ServiceClient, errors


@pytest.fixture
async def server():
    async with toy_server() as running:
        yield running


@pytest.fixture
async def client(server):
    async with ServiceClient(server.address) as connected:
        yield connected


@pytest.fixture
async def training(server, client):
    return await client.get_training_client_async(server.trainer.run_id)


@pytest.mark.parametrize("params", [1e-4, 0.0, AdamParams, {"learning_rate": 1e-4}])
async def test_settings_of_no_optimizer_are_refused_and_the_classes_of_settings_are_named(server, training, params):
    with pytest.raises(
        errors.InvalidArgument, match=rf"is of type {type(params).__name__}; give .* AdamParams"
    ) as caught:
        training.optim_step(params)
    assert caught.value.field == "params"
    assert server.trainer.executed == []
