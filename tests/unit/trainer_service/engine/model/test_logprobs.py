"""Chunked log-probabilities equal dense ones and never hold more than a chunk of logits."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_service.engine.model.logprobs import target_logprobs

POSITIONS, HIDDEN, VOCAB = 23, 16, 301


class LogitsAlive(TorchDispatchMode):
    """Records the maximum number of rows of logits, or of anything as wide, that exist at the same time."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and VOCAB in tensor.shape and HIDDEN not in tensor.shape:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._alive[storage.cdata] = (storage, tensor.untyped_storage().nbytes() // (4 * VOCAB))
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(rows for _, rows in self._alive.values()))
        return result


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    upstream = torch.randn(POSITIONS, generator=generator)
    return hidden, targets, upstream


def make_head(*, adapter, frozen=False):
    generator = torch.Generator().manual_seed(2)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    torch.nn.init.normal_(head.weight, generator=generator)
    head.requires_grad_(not frozen)
    if not adapter:
        return head
    head = LoraLinear(head, "run", LoraConfig(r=4, lora_alpha=8), r=4, lora_alpha=8)
    torch.nn.init.normal_(head.lora_A["run"].weight, std=0.1, generator=generator)
    torch.nn.init.normal_(head.lora_B["run"].weight, std=0.1, generator=generator)
    return head


def dense(head, hidden, targets):
    return head(hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def trainable(head):
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("chunk", [1, 5, POSITIONS, 1000])
@pytest.mark.parametrize("adapter", [False, True])
def test_chunked_equals_dense_with_its_gradients(inputs, chunk, adapter):
    hidden, targets, upstream = inputs
    head = make_head(adapter=adapter)
    expected, chunked = dense(head, hidden, targets), target_logprobs(head, hidden, targets, chunk)
    torch.testing.assert_close(chunked, expected)
    wanted = torch.autograd.grad(expected, [hidden, *trainable(head)], upstream)
    got = torch.autograd.grad(chunked, [hidden, *trainable(head)], upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("chunk", "sizes"), [(POSITIONS - 1, [12, 11]), (10, [8, 8, 7]), (1000, [POSITIONS])])
def test_no_chunk_is_of_a_few_left_over_positions(inputs, chunk, sizes):
    hidden, targets, _ = inputs
    head, seen = make_head(adapter=False, frozen=True), []
    head.register_forward_hook(lambda _head, _args, logits: seen.append(len(logits)))
    target_logprobs(head, hidden, targets, chunk)
    assert seen == sizes


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_several_targets_per_position_share_its_logits(inputs, chunk):
    hidden, _, _ = inputs
    generator = torch.Generator().manual_seed(6)
    targets = torch.randint(0, VOCAB, (POSITIONS, 3), generator=generator)
    upstream = torch.randn(POSITIONS, 3, generator=generator)
    head = make_head(adapter=True)
    expected = torch.stack([dense(head, hidden, column) for column in targets.T], 1)
    together = target_logprobs(head, hidden, targets, chunk)
    torch.testing.assert_close(together, expected)
    wanted = torch.autograd.grad(expected, [hidden, *trainable(head)], upstream)
    got = torch.autograd.grad(together, [hidden, *trainable(head)], upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_frozen_head_still_passes_the_gradient_on(inputs):
    hidden, targets, upstream = inputs
    head = make_head(adapter=False, frozen=True)
    (wanted,) = torch.autograd.grad(dense(head, hidden, targets), hidden, upstream)
    (got,) = torch.autograd.grad(target_logprobs(head, hidden, targets, 4), hidden, upstream)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def logits_alive(positions, *, adapter, frozen, width=()):
    """Return the peak number of rows of logits, forward and backward, with chunks of 4 positions."""
    head = make_head(adapter=adapter, frozen=frozen)
    hidden = torch.randn(positions, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
    targets = torch.zeros(positions, *width, dtype=torch.int64)
    with LogitsAlive() as alive:
        target_logprobs(head, hidden, targets, 4).sum().backward()
    return alive.peak


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_logits_of_one_chunk_exist_however_many_positions_there_are(adapter, frozen):
    one_chunk = logits_alive(4, adapter=adapter, frozen=frozen)
    assert 4 <= one_chunk <= 4 * 6, "a few arrays of a chunk's shape"
    assert logits_alive(400, adapter=adapter, frozen=frozen) <= one_chunk + 4


def test_the_logits_do_not_grow_with_the_targets_per_position():
    one, many = (logits_alive(40, adapter=True, frozen=True, width=width) for width in [(), (50,)])
    assert many <= one + 4


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_softmax_is_float32_whatever_the_head_computes_in(inputs, temperature, frozen):
    hidden, targets, _ = inputs
    head = make_head(adapter=False, frozen=frozen).bfloat16()
    temperatures = None if temperature == 1.0 else torch.full((POSITIONS,), temperature)
    result = target_logprobs(head, hidden.bfloat16(), targets, 4, (), temperatures)
    logits = head(hidden.bfloat16()).double() / temperature
    expected = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("adapter", "frozen"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("several", [False, True])
def test_logits_are_divided_by_the_temperature_of_their_position(inputs, adapter, frozen, several):
    hidden, targets, _ = inputs
    generator = torch.Generator().manual_seed(3)
    if several:
        targets = torch.randint(0, VOCAB, (POSITIONS, 2), generator=generator)
    temperatures = torch.rand(POSITIONS, generator=generator) + 0.3
    upstream = torch.randn(targets.shape, generator=generator)
    head = make_head(adapter=adapter, frozen=frozen)
    logprobs = target_logprobs(head, hidden, targets, 5, (), temperatures)
    (gradient,) = torch.autograd.grad((logprobs * upstream).sum(), hidden)

    exact = hidden.detach().double().requires_grad_()
    wide = head.double()
    logits = wide(exact) / temperatures.double()[:, None]
    wanted = logits.log_softmax(-1).gather(1, targets.reshape(POSITIONS, -1)).reshape(targets.shape)
    (slope,) = torch.autograd.grad((wanted * upstream.double()).sum(), exact)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-4)
