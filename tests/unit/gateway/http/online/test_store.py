"""What online training keeps on disk: each example ends once, and the totals are those of the examples."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc

import pytest

from gateway.http.online import store as store_module
from gateway.http.online.store import ExampleState, NewExample, OnlineStore, Settled, StoredCommand
from paceline import errors


@pytest.fixture
def store(tmp_path):
    store = OnlineStore(tmp_path / "online.sqlite")
    yield store
    store.close()


@pytest.fixture
async def model(store):
    made = await store.add_model("tenant", "online", "request", "apollo_mini", {})
    await store.attach(made, "run-1", 1, 1)
    return store.again(made)


def examples(*names, datums=1):
    return [NewExample(name.encode(), datums, name.encode() * 10) for name in names]


async def issue(store, model, batch):
    """Issue a batch's two commands."""
    first = store.again(model).next_seq_id
    commands = [
        StoredCommand(first + index, kind, first, b"") for index, kind in enumerate(("forward_backward", "optim_step"))
    ]
    await store.issue(model, commands, batch)
    return commands


def totals(store, model):
    now = store.again(model)
    return now.waiting, now.trained, now.failed, now.waiting_bytes


async def test_an_example_is_taken_once(store, model):
    assert await store.add_examples(model, examples("a", "b", "a"), 1e-4, 8) == 2
    assert await store.add_examples(model, examples("b", "c"), 1e-4, 8) == 1
    assert totals(store, model) == (3, 0, 0, 30)
    forward, step = await issue(store, model, await store.next_batch(model, 1 << 20))
    await store.answered(model, forward, loss=1.0)
    await store.answered(model, step, Settled(ExampleState.TRAINED), step=1, tokens=5)
    assert totals(store, model) == (0, 3, 0, 0)
    assert await store.add_examples(model, examples("a", "b", "c"), 1e-4, 8) == 0
    assert (store.again(model).tokens, store.again(model).loss, store.commands(model)) == (5, 1.0, [])


async def train(store, model, *names):
    """Train on examples, one batch each."""
    for name in names:
        assert await store.add_examples(model, examples(name), 1e-4, 1)
        _, step = await issue(store, model, await store.next_batch(model, 1 << 20))
        await store.answered(model, step, Settled(ExampleState.TRAINED))


async def test_a_tenants_newest_examples_are_known_again_and_older_ones_take_no_space(store, model, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_SETTLED", 4)
    monkeypatch.setattr(store_module, "TRIM_EVERY", 2)
    other = await store.add_model("tenant", "other", "request", "apollo_mini", {})
    stranger = await store.add_model("stranger", "online", "request", "apollo_mini", {})
    await store.add_examples(model, examples("waits"), 1e-3, 1)
    await train(store, stranger, "s")
    for names in ("abcd", "efgh"):
        await train(store, other, *names)
    kept = [row[0].decode() for row in store.rows("SELECT digest FROM examples ORDER BY number")]
    assert kept == ["waits", "s", *"efgh"]
    assert await store.add_examples(other, examples(*"efgh"), 1e-4, 1) == 0
    assert await store.add_examples(model, examples("waits"), 1e-3, 1) == 0
    assert await store.add_examples(other, examples("a"), 1e-4, 1) == 1
    assert store.again(other).trained == 8


async def test_a_tenant_has_so_many_models(store, model, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_MODELS", 2)
    second = await store.add_model("tenant", "second", "request", "apollo_mini", {})
    with pytest.raises(errors.QuotaExceeded):
        await store.add_model("tenant", "third", "request", "apollo_mini", {})
    await store.add_model("tenant", "second", "request", "adamw", {}, instead_of=second)
    await store.add_model("stranger", "third", "request", "apollo_mini", {})


async def test_an_answer_settles_its_own_batch_alone(store, model):
    await store.add_examples(model, examples("a", "b"), 1e-4, 1)
    first = await issue(store, model, await store.next_batch(model, 1 << 20))
    second = await issue(store, model, await store.next_batch(model, 1 << 20))
    await store.answered(model, first[1], Settled(ExampleState.TRAINED))
    assert totals(store, model) == (1, 1, 0, 10)
    await store.answered(model, second[0], Settled(ExampleState.FAILED, "why"))
    await store.answered(model, second[1], Settled(ExampleState.UNSURE, "no gradient"))
    assert totals(store, model) == (0, 1, 1, 0)
    assert store.again(model).problem == "why"


@pytest.mark.parametrize(
    ("state", "accepted", "after"),
    [
        (ExampleState.FAILED, 1, (1, 0, 0, 10)),
        (ExampleState.UNSURE, 0, (0, 0, 1, 0)),
        (ExampleState.WAITING, 0, (1, 0, 0, 10)),
    ],
)
async def test_what_came_to_nothing_may_be_posted_again(store, model, state, accepted, after):
    await store.add_examples(model, examples("a"), 1e-4, 8)
    forward, _ = await issue(store, model, await store.next_batch(model, 1 << 20))
    await store.stop(model, "taken", forward, Settled(state, "taken"))
    assert (store.again(model).stopped, store.commands(model)) == ("taken", [])
    assert await store.add_examples(model, examples("a"), 1e-4, 8) == accepted
    assert totals(store, model) == after
    assert len(await store.next_batch(model, 1 << 20)) == after[0]


async def test_batches_have_one_setting_and_a_size(store, model):
    await store.add_examples(model, examples("a", "b", "c"), 1e-4, 2)
    await store.add_examples(model, examples("d", datums=200), 1e-3, 8)
    await store.add_examples(model, examples("e", datums=100), 1e-3, 8)
    sizes = []
    while batch := await store.next_batch(model, 1 << 20):
        sizes.append((batch[0].learning_rate, len(batch)))
        await issue(store, model, batch)
    assert sizes == [(1e-4, 2), (1e-4, 1), (1e-3, 1), (1e-3, 1)]
    await store.add_examples(model, examples("f", "g"), 1e-3, 8)
    assert len(await store.next_batch(model, 15)) == 1


async def test_of_many_large_examples_only_a_batch_is_loaded_and_not_by_the_callers_thread(store, model):
    size, gate = 1 << 20, threading.Event()
    await store.add_examples(model, [NewExample(bytes([n]), 1, bytes([n]) * size) for n in range(32)], 1e-4, 256)
    blocking = asyncio.ensure_future(store.do(lambda _: gate.wait()))
    tracemalloc.start()
    try:
        loading = asyncio.ensure_future(store.next_batch(model, 2 * size))
        await asyncio.sleep(0)
        assert not loading.done()
        gate.set()
        assert [example.data[0] for example in await loading] == [0, 1]
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()
        gate.set()
        await blocking


async def test_examples_that_a_tenant_may_not_have_waiting_are_refused_together(tmp_path):
    store = OnlineStore(tmp_path / "small.sqlite", most_waiting_bytes=35)
    try:
        one, other = [await store.add_model("tenant", name, name, "adamw", {}) for name in ("one", "other")]
        stranger = await store.add_model("stranger", "one", "request", "adamw", {})
        store.check_waiting("tenant", 35)
        await store.add_examples(one, examples("a", "b"), 1e-4, 8)
        with pytest.raises(errors.Overloaded):
            store.check_waiting("tenant", 16)
        with pytest.raises(errors.Overloaded):
            await store.add_examples(other, examples("c", "d"), 1e-4, 8)
        assert totals(store, other) == (0, 0, 0, 0)
        assert await store.next_batch(other, 1 << 20) == []
        assert await store.add_examples(one, examples("a", "b", "c"), 1e-4, 8) == 1
        assert await store.add_examples(stranger, examples("a", "b", "c"), 1e-4, 8) == 3
    finally:
        store.close()


async def test_a_name_that_was_forgotten_begins_anew(store, model):
    await store.add_examples(model, examples("a"), 1e-4, 8)
    await store.forget_model(model)
    again = await store.add_model("tenant", "online", "request-2", "adamw", {"rank": 4})
    assert again.model_id != model.model_id
    assert await store.add_examples(again, examples("a"), 1e-4, 8) == 1
    assert again.lora == {"rank": 4}


async def test_a_model_that_replaces_another_has_the_examples_that_waited_for_it_and_no_others(store, model):
    await store.add_examples(model, examples("a", "b", "c"), 1e-4, 1)
    forward, step = await issue(store, model, await store.next_batch(model, 1 << 20))
    await store.answered(model, forward)
    await store.answered(model, step, Settled(ExampleState.TRAINED))
    again = await store.add_model("tenant", "online", "request-2", "adamw", {}, instead_of=model)
    assert totals(store, again) == (2, 0, 0, 20)
    assert [made.model_id for made in store.models()] == [again.model_id]
    assert (await store.next_batch(again, 1 << 20))[0].data == b"b" * 10
    assert await store.add_examples(again, examples("a", "b", "c"), 1e-4, 8) == 1


async def test_a_restart_finds_everything(store, model, tmp_path):
    await store.add_examples(model, examples("a", "b"), 1e-4, 1)
    commands = await issue(store, model, await store.next_batch(model, 1 << 20))
    store.close()
    again = OnlineStore(tmp_path / "online.sqlite")
    (found,) = again.models()
    assert (again.commands(found), (await again.next_batch(found, 1 << 20))[0].data) == (commands, b"b" * 10)
    again.close()
    store.__init__(tmp_path / "online.sqlite")  # for the fixture to close
