"""Losses that the client computes: their gradients reach the trainer, and a loss that fails changes nothing."""

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from support.patience import PATIENCE
from support.stacks.toy_trainer import VOCABULARY, make_data

from paceline import Datum, ServiceClient, errors


@pytest.fixture
async def training(server):
    async with ServiceClient(server.address) as client:
        yield await client.get_training_client_async(server.trainer.run_id)


async def test_a_custom_loss_gives_the_gradient_that_autograd_gives(server, training):
    mask = np.array([0, 1, 1, 1, 1], np.uint8)
    data = make_data(3, mask=mask, advantages=np.linspace(-1, 1, 5, dtype=np.float32))

    def loss_fn(given, logprobs):
        pairs = zip(given, logprobs, strict=True)
        rows = [torch.from_numpy(datum.loss_fn_inputs["advantages"]) * row**2 for datum, row in pairs]
        return torch.cat(rows).sum(), {"rows:sum": float(len(rows))}

    output = await training.forward_backward_custom(data, loss_fn)
    theta = torch.tensor(server.trainer.theta, requires_grad=True)
    table = theta.log_softmax(-1)
    logprobs = [table[datum.model_input, datum.loss_fn_inputs["target_tokens"]] * torch.tensor(mask) for datum in data]
    expected, _ = loss_fn(data, logprobs)
    expected.backward()
    np.testing.assert_allclose(server.trainer.gradient, theta.grad, rtol=1e-4, atol=1e-6)
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-5)
    assert output.metrics["rows:sum"] == 3


async def test_data_may_be_changed_once_a_custom_loss_is_issued(server, training):
    def loss_fn(given, logprobs):
        pairs = zip(given, logprobs, strict=True)
        return sum((torch.from_numpy(datum.loss_fn_inputs["advantages"]) * row).sum() for datum, row in pairs), {}

    def inputs():
        return {"mask": np.array([0, 1, 1, 1, 1], np.uint8), "advantages": np.linspace(-1, 1, 5, dtype=np.float32)}

    data = make_data(2, **inputs())
    changed = training.forward_backward_custom(data, loss_fn)
    for datum in data:
        for values in (datum.model_input, *datum.loss_fn_inputs.values()):
            values[:] = 0
        datum.loss_fn_inputs.clear()
    await changed
    gradient = server.trainer.gradient.copy()
    assert gradient.any()
    await training.forward_backward_custom(make_data(2, **inputs()), loss_fn)
    np.testing.assert_allclose(server.trainer.gradient, 2 * gradient)


def with_several_targets(data, count=3):
    rng = np.random.default_rng(7)
    for datum in data:
        shape = (len(datum.model_input), count)
        datum.loss_fn_inputs |= {
            "target_tokens": rng.integers(VOCABULARY, size=shape),
            "weights": np.zeros(shape, "f4"),
        }
    return data


async def test_a_custom_loss_of_several_targets_per_position_has_a_gradient_for_each(server, training):
    mask = np.array([0, 1, 1, 1, 1], np.uint8)
    data = with_several_targets(make_data(2, mask=mask))
    await training.forward_backward_custom(data, lambda _, rows: (sum((row**2).sum() for row in rows), {}))
    theta = torch.tensor(server.trainer.theta, requires_grad=True)
    table = theta.log_softmax(-1)
    for datum in data:
        rows = table[datum.model_input].gather(1, torch.from_numpy(datum.loss_fn_inputs["target_tokens"]))
        (torch.from_numpy(mask)[:, None] * rows**2).sum().backward(retain_graph=True)
    np.testing.assert_allclose(server.trainer.gradient, theta.grad, rtol=1e-4, atol=1e-6)


async def test_a_custom_loss_of_several_targets_that_fails_keeps_the_order(server, training):
    failed = training.forward_backward_custom(with_several_targets(make_data()), lambda *_: (torch.zeros(()), {}))
    with pytest.raises(errors.InvalidArgument):
        await failed
    await training.forward_backward(make_data())
    assert server.trainer.arrivals == [1, 2]


async def test_a_custom_loss_of_what_is_no_list_of_datums_is_refused_before_anything_is_sent(server, training):
    (datum,) = make_data(1)
    for data, field in ((datum, "data"), ([datum, [1, 2]], "data[1]")):
        with pytest.raises(errors.InvalidArgument) as caught:
            training.forward_backward_custom(data, lambda _, rows: (rows[0].sum(), {}))
        assert caught.value.field == field
    assert server.trainer.arrivals == []


async def test_a_custom_loss_of_a_datum_without_targets_is_refused_by_its_place(server, training):
    data = [*make_data(1), Datum([1, 2], {"advantages": [0.5, 0.5]})]
    with pytest.raises(errors.MissingField) as caught:
        training.forward_backward_custom(data, lambda _, rows: (rows[0].sum(), {}))
    assert caught.value.field == "data[1].loss_fn_inputs[target_tokens]"
    assert server.trainer.arrivals == []


async def test_commands_after_a_custom_loss_wait_for_its_second_half(server, training):
    custom = training.forward_backward_custom(make_data(), lambda _, rows: (torch.cat(rows).sum(), {}))
    stepped = training.optim_step()
    await custom
    assert (await stepped).grad_norm > 0
    assert sorted(server.trainer.arrivals) == [1, 2, 3]


async def _answer(future):
    return await future


WAITS = {
    "result": lambda training: training.optim_step().result(),
    "await": lambda training: asyncio.run(_answer(training.optim_step())),
    "on another thread": lambda training: asyncio.run(asyncio.to_thread(training.optim_step().result)),
    "in a call that blocks": lambda training: training.save_weights_and_get_sampling_client(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
async def test_a_custom_loss_that_waits_for_a_command_after_it_is_refused_and_the_run_goes_on(server, training, wait):
    before = training.forward(make_data())

    def loss_fn(data, logprobs):
        assert before.result().metrics["tokens:sum"] == 10
        wait(training)
        return sum(row.sum() for row in logprobs), {}

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(errors.Unsupported, match="so loss_fn cannot wait for it"):
            await training.forward_backward_custom(make_data(), loss_fn)
    assert not server.trainer.gradient.any()
    await training.forward_backward(make_data())
    assert (await training.optim_step()).step == 1


async def test_a_custom_loss_that_waits_for_itself_is_refused(training):
    issued = Future()

    def loss_fn(data, logprobs):
        return issued.result().result()

    custom = training.forward_backward_custom(make_data(), loss_fn)
    issued.set_result(custom)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(errors.Unsupported, match="so loss_fn cannot wait for it"):
            await custom


async def test_a_custom_loss_that_raises_changes_nothing_and_the_run_goes_on(server, training):
    def loss_fn(data, logprobs):
        raise ZeroDivisionError("mine")

    failed = training.forward_backward_custom(make_data(1100, length=2), loss_fn)
    stepped = training.optim_step()
    with pytest.raises(ZeroDivisionError, match="mine"):
        await failed
    with pytest.raises(errors.NoGradient):
        await stepped
    await training.forward_backward(make_data())
    assert server.trainer.arrivals == [1, 2, 3, 4]


async def test_a_custom_loss_that_raises_while_the_service_turns_commands_away_leaves_no_gap(server, training):
    def loss_fn(data, logprobs):
        server.trainer.denial = errors.InvalidApiKey("is not known")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await training.forward_backward_custom(make_data(1100, length=2), loss_fn)
    server.trainer.denial = None
    await training.forward_backward(make_data())
    assert (await training.optim_step()).step == 1


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [
        (lambda _, rows: (rows[0], {}), errors.InvalidArgument),
        (lambda _, rows: (torch.zeros(()), {}), errors.InvalidArgument),
        (lambda _, rows: (torch.ones((), requires_grad=True) * 3, {}), errors.InvalidArgument),
        (lambda _, rows: (rows[0].sum() * float("nan"), {}), errors.NonFinite),
        (lambda _, rows: None, errors.InvalidArgument),
        (lambda _, rows: rows[0].sum(), errors.InvalidArgument),
        (lambda _, rows: (rows[0].sum(), None), errors.InvalidArgument),
        (lambda _, rows: (rows[0].sum(), {"a": "b"}), errors.InvalidArgument),
        (lambda _, rows: (rows[0].sum(), {"loss:sum": 1.0}), errors.InvalidArgument),
    ],
)
async def test_a_custom_loss_without_a_usable_gradient_is_refused(server, training, loss_fn, error):
    with pytest.raises(error) as caught:
        await training.forward_backward_custom(make_data(), loss_fn)
    assert caught.value.field == "loss_fn"
    assert not server.trainer.gradient.any()


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
async def test_a_custom_loss_that_ends_its_thread_is_refused_and_the_client_goes_on(server, training, end):
    def loss_fn(data, logprobs):
        raise end

    with pytest.raises(errors.InvalidArgument, match=type(end).__name__) as caught:
        await training.forward_backward_custom(make_data(), loss_fn)
    assert caught.value.__cause__ is end
    await training.forward_backward(make_data())
    assert server.trainer.arrivals == [1, 2]


async def test_a_custom_loss_that_cannot_be_called_is_refused_before_anything_is_sent(server, training):
    with pytest.raises(errors.InvalidArgument, match="is of type str; give a function") as caught:
        training.forward_backward_custom(make_data(), "cross_entropy")
    assert caught.value.field == "loss_fn"
    assert not server.trainer.arrivals
