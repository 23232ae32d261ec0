"""Sequences in a pack give the same results as each alone in a stock model, and do not see each other.

The kernels for bfloat16 on a CPU and for GPUs describe the attention of each segment by itself.
"""

from __future__ import annotations

import pytest
import torch
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2, make_tiny_qwen3
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoModelForCausalLM

from trainer_service.engine.model.packed_attention import (
    PACKED_ATTENTION,
    causal_attention,
    packed_attention,
    reach,
    segment_offsets,
    varlen_attention,
)

LENGTHS = (7, 1, 19, 12)
SEGMENTS = (7, 1, 40, 12)


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


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_bfloat16_attention_equals_float32_attention_in_each_segment(heads):
    generator = torch.Generator().manual_seed(0)
    lengths, (query_heads, key_heads) = (300, 1, 513, 64), heads
    shapes = [(query_heads, sum(lengths), 32), *[(key_heads, sum(lengths), 32)] * 2]
    inputs = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    upstream = torch.randn(sum(lengths), query_heads, 32, generator=generator).bfloat16()
    out = causal_attention(*inputs, lengths, 0.2)
    grads = torch.autograd.grad(out, inputs, upstream)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths, dim=1) for x in exact), strict=True)
    expected = torch.cat(
        [
            functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=0.2, enable_gqa=True
            )[0]
            for q, k, v in parts
        ],
        dim=1,
    ).transpose(0, 1)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, exact, upstream.float()), strict=True):
        assert functional.cosine_similarity(mine.double().flatten(), theirs.double().flatten(), dim=0) > 0.9999
        assert mine.float().norm().item() == pytest.approx(theirs.norm().item(), rel=1e-2)


def test_gradients_of_long_sequences_are_summed_in_float32():
    """What every later query adds to the first keys is small beside the sum of what the others added."""
    generator, length = torch.Generator().manual_seed(0), 6144
    inputs = [torch.randn(1, length, 16, generator=generator).mul(0.3).bfloat16().requires_grad_() for _ in range(3)]
    upstream = torch.randn(length, 1, 16, generator=generator).mul(0.2).add(1).bfloat16()
    grads = torch.autograd.grad(causal_attention(*inputs, (length,), 0.25), inputs, upstream)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    whole = causal_attention(*exact, (length,), 0.25)
    for mine, theirs in zip(grads, torch.autograd.grad(whole, exact, upstream.float()), strict=True):
        assert (mine.float() - theirs).norm() < 8e-3 * theirs.norm()


def random_heads(*heads, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, sum(SEGMENTS), 16, generator=generator).to(dtype) for count in heads]


def visible(offsets, before, after):
    """Return the mask [T, T] that the kernel documents: `before` earlier to `after` later positions in the segment."""
    positions = torch.arange(sum(SEGMENTS))
    segments = torch.bucketize(positions, offsets[1:], right=True)
    ahead = positions[None] - positions[:, None]
    return (segments[:, None] == segments) & (ahead <= after) & ((before < 0) | (ahead >= -before))


@pytest.mark.parametrize("window", [None, 5])
def test_offsets_and_reach_describe_causal_attention_within_segments(window):
    query, key, value = random_heads(4, 2, 2)
    mask = visible(segment_offsets(SEGMENTS, query.device), *reach(window))
    expected, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, segment_lengths=SEGMENTS, scaling=0.3, sliding_window=window
    )
    masked = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(masked.transpose(1, 2), expected, rtol=1e-4, atol=1e-4)


def test_the_operator_takes_what_it_is_given():
    with FakeTensorMode():
        query, key, value = (torch.empty(n, 60, 16, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        out = varlen_attention(query, key, value, (20, 40), 0.3, 5)
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert out.shape == (60, 4, 16)
    assert [gradient.shape for gradient in gradients] == [(4, 60, 16), (2, 60, 16), (2, 60, 16)]
