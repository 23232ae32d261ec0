"""The arguments of the GPU attention describe the attention of each segment by itself."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from trainer_service.engine.model.packed_attention import packed_attention
from trainer_service.engine.model.varlen_gpu import reach, segment_offsets, varlen_attention

LENGTHS = (7, 1, 40, 12)


def random_heads(*heads, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, sum(LENGTHS), 16, generator=generator).to(dtype) for count in heads]


def visible(offsets, before, after):
    """Return the mask [T, T] that the kernel documents: `before` earlier to `after` later positions in the segment."""
    positions = torch.arange(sum(LENGTHS))
    segments = torch.bucketize(positions, offsets[1:], right=True)
    ahead = positions[None] - positions[:, None]
    return (segments[:, None] == segments) & (ahead <= after) & ((before < 0) | (ahead >= -before))


@pytest.mark.parametrize("window", [None, 5])
def test_offsets_and_reach_describe_causal_attention_within_segments(window):
    query, key, value = random_heads(4, 2, 2)
    mask = visible(segment_offsets(LENGTHS, query.device), *reach(window))
    expected, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, segment_lengths=LENGTHS, scaling=0.3, sliding_window=window
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
