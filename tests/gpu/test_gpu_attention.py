"""On a GPU, attention over a pack matches attention over each segment alone in float32, forward and backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainer_service.engine.model.packed_attention import packed_attention

pytestmark = pytest.mark.gpu

LENGTHS = (300, 1, 513, 64)


def alone(query, key, value, window):
    length = query.shape[2]
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    mask = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 128)])
def test_packed_attention_equals_that_of_each_segment(window, heads, width):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), width) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in shapes]
    out, _ = packed_attention(nn.Identity(), *inputs, None, segment_lengths=LENGTHS, scaling=0.2, sliding_window=window)
    upstream = torch.randn(out.shape, device="cuda", generator=generator).bfloat16()
    gradients = torch.autograd.grad(out, inputs, upstream)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    parts = zip(*(x.split(LENGTHS, dim=2) for x in exact), strict=True)
    expected = torch.cat([alone(*part, window) for part in parts], dim=2).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, upstream.float()), strict=True):
        assert functional.cosine_similarity(mine.flatten().float(), theirs.flatten(), dim=0) > 0.9999
        assert mine.float().norm().item() == pytest.approx(theirs.norm().item(), rel=1e-2)
