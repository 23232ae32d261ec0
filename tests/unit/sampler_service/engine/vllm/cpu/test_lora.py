"""The grouped LoRA operators of vLLM's CPU worker, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping

from sampler_service.engine.vllm.cpu.lora import GroupedPunicaWrapper

SLOTS, RANK, INPUT, SLICES = 3, 4, 64, (64, 32, 32)
SLOT_IDS: list[int | None] = [11, 12, 13]

MAPPINGS = {
    "one adapter": [12] * 7,
    "base only": [0] * 7,
    "adapters and base": [11, 0, 13, 13, 0, 12, 11],
    "every other row": [11, 12, 11, 12, 11, 12, 11],
    "base with the last slot taken": [0, 0, 13, 0, 0, 0, 0],
}


def wrapper(mapping: list[int], *, prefill: bool) -> GroupedPunicaWrapper:
    punica = GroupedPunicaWrapper(128, 16, "cpu")
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


@pytest.mark.parametrize("rank", [RANK, 40], ids=["few ranks", "many ranks"])
@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_each_row_gets_its_own_adapter_and_base_rows_none(mapping, prefill, dtype, tolerance, rank):
    x, y = random(7, INPUT, dtype=dtype), random(7, sum(SLICES), dtype=dtype)
    a = tuple(random(SLOTS, 1, rank, INPUT, dtype=dtype) / 8 for _ in SLICES)
    b = tuple(random(SLOTS, 1, width, rank, dtype=dtype) / rank**0.5 for width in SLICES)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_that_is_not_finite_harms_its_own_rows_alone(dtype):
    mapping = [11, 13, 0, 12, 11, 13, 12]
    x, y = random(7, INPUT, dtype=dtype), random(7, 32, dtype=dtype)
    a, b = random(SLOTS, 1, RANK, INPUT, dtype=dtype) / 8, random(SLOTS, 1, 32, RANK, dtype=dtype)
    a[1], b[1] = torch.nan, torch.inf
    wanted = expected(y, x, a, b, mapping)
    wrapper(mapping, prefill=False).add_lora_linear(y, x, (a,), (b,), 1.0, (32,))
    others = [row for row, adapter in enumerate(mapping) if adapter != 12]
    torch.testing.assert_close(y[others].double(), wanted[others], rtol=3e-2, atol=3e-2)
    assert not y[[3, 6]].isfinite().any()


@pytest.mark.parametrize("mapping", [[12] * 7, [11, 0, 13, 13, 0, 12, 11], [12] * 70], ids=["one", "several", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_to_a_slot_counts_from_the_next_product_on(mapping, dtype):
    a, b = (torch.zeros(SLOTS, 1, RANK, INPUT, dtype=dtype),), (torch.zeros(SLOTS, 1, 32, RANK, dtype=dtype),)
    x, y = random(len(mapping), INPUT, dtype=dtype), random(len(mapping), 32, dtype=dtype)
    kept, rows, punica = (
        a[0][1, 0],
        [row for row, one in enumerate(mapping) if one == 12],
        wrapper(mapping, prefill=True),
    )
    new_a, new_b = random(RANK, INPUT, dtype=dtype) / 8, random(32, RANK, dtype=dtype)

    def change() -> torch.Tensor:
        into = y.clone()
        punica.add_lora_linear(into, x, a, b, 1.0, (32,))
        return (into.double() - y.double())[rows]

    assert not change().any()
    with torch.inference_mode():
        kept.copy_(new_a)
        b[0][1, 0, :, :RANK].copy_(new_b)
    torch.testing.assert_close(change(), x[rows].double() @ new_a.double().T @ new_b.double().T, rtol=3e-2, atol=5e-2)
    b[0][1] = 0
    assert not change().any()
