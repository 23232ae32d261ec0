"""The grouped LoRA operators of vLLM's CPU worker, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping

from sampler_service.engine.cpu_lora import GroupedPunicaWrapper, Joined

SLOTS, RANK, INPUT, SLICES = 3, 4, 24, (16, 8, 8)
SLOT_IDS: list[int | None] = [11, 12, 13]

MAPPINGS = {
    "one adapter": [12] * 7,
    "base only": [0] * 7,
    "adapters and base": [11, 0, 13, 13, 0, 12, 11],
    "every other row": [11, 12, 11, 12, 11, 12, 11],
    "base with the last slot taken": [0, 0, 13, 0, 0, 0, 0],
}


def wrapper(mapping: list[int], *, prefill: bool) -> GroupedPunicaWrapper:
    punica = GroupedPunicaWrapper(64, 16, "cpu")
    punica.update_metadata(LoRAMapping(tuple(mapping), tuple(mapping), is_prefill=prefill), SLOT_IDS, SLOTS + 1, 100)
    return punica


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def expected(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mapping: list[int]) -> torch.Tensor:
    out = y.double().clone()
    for row, adapter in enumerate(mapping):
        if adapter:
            slot = SLOT_IDS.index(adapter)
            out[row] += b[slot, 0].double() @ (a[slot, 0].double() @ x[row].double())
    return out


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_each_row_gets_its_own_adapter_and_base_rows_none(mapping, prefill, dtype, tolerance, joined):
    x, y = random(7, INPUT, dtype=dtype), random(7, sum(SLICES), dtype=dtype)
    a = tuple(random(SLOTS, 1, RANK, INPUT, dtype=dtype) for _ in SLICES)
    b = tuple(random(SLOTS, 1, width, RANK, dtype=dtype) for width in SLICES)
    if joined:
        a, b = Joined.below(a), Joined.diagonally(b)
    parts = [expected(part, x, a[i], b[i], mapping) for i, part in enumerate(y.split(SLICES, dim=1))]
    base_rows = [row for row, adapter in enumerate(mapping) if not adapter]
    untouched = y[base_rows].clone()
    wrapper(mapping, prefill=prefill).add_lora_linear(y, x, a, b, 1.0, SLICES)
    torch.testing.assert_close(y.double(), torch.cat(parts, 1), rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(y[base_rows], untouched)


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_logits_and_embeddings_are_grouped_alike(mapping):
    x, y = random(7, INPUT), random(7, 104)
    a, b = random(SLOTS, 1, RANK, INPUT), random(SLOTS, 1, 100, RANK)
    logits = y.clone()
    wrapper(mapping, prefill=False).add_lora_logits(logits, x, a, b, 1.0)
    torch.testing.assert_close(logits[:, :100].double(), expected(y[:, :100], x, a, b, mapping), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits[:, 100:], y[:, 100:])
    rows, embedded = random(7, RANK), random(7, 100)
    identity = torch.eye(RANK).expand(SLOTS, 1, RANK, RANK)
    target = expected(embedded, rows, identity, b, mapping)
    wrapper(mapping, prefill=True).add_lora_embedding(embedded, rows, b)
    torch.testing.assert_close(embedded.double(), target, rtol=1e-5, atol=1e-4)


def test_a_scale_multiplies_what_is_added():
    x, y = random(7, INPUT), torch.zeros(7, 16)
    a, b = random(SLOTS, 1, RANK, INPUT), random(SLOTS, 1, 16, RANK)
    once, thrice = y.clone(), y.clone()
    punica = wrapper([11, 0, 13, 13, 0, 12, 11], prefill=True)
    punica.add_lora_linear(once, x, (a,), (b,), 1.0, (16,))
    punica.add_lora_linear(thrice, x, (a,), (b,), 3.0, (16,))
    torch.testing.assert_close(thrice, 3 * once)


def test_an_adapter_that_is_not_finite_harms_its_own_rows_alone():
    mapping = [11, 13, 0, 12, 11, 13, 12]
    x, y = random(7, INPUT), random(7, 8)
    a, b = random(SLOTS, 1, RANK, INPUT), random(SLOTS, 1, 8, RANK)
    a[1], b[1] = torch.nan, torch.inf
    wanted = expected(y, x, a, b, mapping)
    wrapper(mapping, prefill=False).add_lora_linear(y, x, (a,), (b,), 1.0, (8,))
    others = [row for row, adapter in enumerate(mapping) if adapter != 12]
    torch.testing.assert_close(y[others].double(), wanted[others], rtol=1e-5, atol=1e-4)
    assert not y[[3, 6]].isfinite().any()
