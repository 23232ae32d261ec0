"""Sequences in a pack give the same results as each alone in a stock model, and do not see each other."""

from __future__ import annotations

import pytest
import torch
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3
from transformers import AutoModelForCausalLM

from trainer_service.engine.model.packed_attention import PACKED_ATTENTION

LENGTHS = (7, 1, 19, 12)


@pytest.fixture(scope="module", params=[make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3])
def directory(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("model"))


def load(directory, attention, **config):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention, **config
    )
    return model.eval()


def sequences(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def packed_logits(model, parts):
    lengths = tuple(len(part) for part in parts)
    positions = torch.cat([torch.arange(length) for length in lengths])
    logits = model(
        input_ids=torch.cat(parts)[None], position_ids=positions[None], use_cache=False, segment_lengths=lengths
    ).logits[0]
    return logits.split(lengths)


@pytest.mark.parametrize("reference", ["eager", "sdpa"])
def test_packed_sequences_equal_separate_ones_in_a_stock_model(directory, reference):
    packed, stock = load(directory, PACKED_ATTENTION), load(directory, reference)
    parts = sequences()
    for part, logits in zip(parts, packed_logits(packed, parts), strict=True):
        torch.testing.assert_close(logits, stock(input_ids=part[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_changing_one_sequence_leaves_the_others_as_they_were(directory):
    model = load(directory, PACKED_ATTENTION)
    parts = sequences()
    before = packed_logits(model, parts)
    parts[2] = (parts[2] + 1) % VOCAB_SIZE
    after = packed_logits(model, parts)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_gradients_do_not_cross_sequences(directory):
    model = load(directory, PACKED_ATTENTION)
    parts = sequences()
    embeddings = model.get_input_embeddings()(torch.cat(parts))[None].detach().requires_grad_()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logits = model(inputs_embeds=embeddings, position_ids=positions, use_cache=False, segment_lengths=LENGTHS).logits[0]
    logits.split(LENGTHS)[2].sum().backward()
    touched = [part.abs().sum().item() > 0 for part in embeddings.grad[0].split(LENGTHS)]
    assert touched == [False, False, True, False]


def test_sliding_windows_are_kept(tmp_path):
    directory = make_tiny_qwen2(tmp_path)
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    packed, stock = load(directory, PACKED_ATTENTION, **window), load(directory, "eager", **window)
    parts = sequences()
    for part, logits in zip(parts, packed_logits(packed, parts), strict=True):
        torch.testing.assert_close(logits, stock(input_ids=part[None]).logits[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        packed_logits(packed, parts)[2], packed_logits(load(directory, PACKED_ATTENTION), parts)[2]
    )
