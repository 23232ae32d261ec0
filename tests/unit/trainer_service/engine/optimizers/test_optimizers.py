"""Each optimizer against a reference implementation, or its paper's equations, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.models.optimizer_cases import (
    COMMON,
    PARAMS,
    clipped,
    make_gradients,
    make_weights,
    norm_of,
    step_with,
    trained,
)
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from paceline.types import AdafactorParams, Adam8bitParams, AdamParams, ApolloMiniParams, ApolloParams
from trainer_service.engine.optimizers.adamw_8bit import BlockMap
from trainer_service.engine.optimizers.apollo import Apollo
from trainer_service.engine.optimizers.make import make_optimizer

STEPS = 5
BOUNDS = {"exp_avg": 0.00704, "exp_avg_sq": 0.00352}
"""Half the widest gap between neighbouring values of each moment's map."""


def doubles():
    return {name: nn.Parameter(weight.detach().double()) for name, weight in make_weights().items()}


def reference_weights(make):
    """Return weights after some steps of a torch-style optimizer, in float64."""
    weights = doubles()
    optimizer = make(list(weights.values()))
    for step in range(1, STEPS + 1):
        gradients = clipped(make_gradients(step))
        for name, weight in weights.items():
            weight.grad = gradients[name]
        optimizer.step()
    return weights


def assert_equal(weights, expected):
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach().double(), expected[name].detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_cpu"])
def test_adamw_is_torchs(name):
    params = PARAMS[name]
    expected = reference_weights(
        lambda weights: torch.optim.AdamW(
            weights, lr=0.02, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=0.1
        )
    )
    assert_equal(trained(params, STEPS)[0], expected)


def test_adamw_cpu_is_adamw_to_the_last_bit():
    ours, theirs = trained(PARAMS["adamw_cpu"], STEPS)[0], trained(PARAMS["adamw"], STEPS)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("scale_parameter", "eps2"), [(False, 1e-2), (True, 1e-2), (True, 3.0)])
def test_adafactor_is_that_of_transformers(scale_parameter, eps2):
    params = replace(PARAMS["adafactor"], scale_parameter=scale_parameter, eps2=eps2)
    expected = reference_weights(
        lambda weights: TransformersAdafactor(
            weights,
            lr=0.02,
            eps=(params.eps1, params.eps2),
            clip_threshold=params.clip_threshold,
            decay_rate=-params.decay_exponent,
            weight_decay=0.1,
            scale_parameter=scale_parameter,
            relative_step=False,
        )
    )
    assert_equal(trained(params, STEPS)[0], expected)


def test_adafactor_with_relative_steps_is_that_of_the_paper_and_reports_its_rate():
    params = AdafactorParams(1e-2, scale_parameter=True, relative_step=True, grad_clip_norm=COMMON["grad_clip_norm"])
    expected = reference_weights(lambda weights: TransformersAdafactor(weights, lr=None))
    weights, optimizer = trained(params, STEPS)
    assert_equal(weights, expected)
    assert optimizer.learning_rate(params, 4) == 1e-2
    assert optimizer.learning_rate(params, 40_000) == pytest.approx(1 / 200)
    assert optimizer.learning_rate(replace(params, relative_step=False), 40_000) == 1e-2


def test_adafactor_without_clipping_takes_the_whole_update():
    params = AdafactorParams(0.02, clip_threshold=0.0, grad_clip_norm=COMMON["grad_clip_norm"])
    expected = reference_weights(
        lambda weights: TransformersAdafactor(
            weights, lr=0.02, clip_threshold=math.inf, scale_parameter=False, relative_step=False
        )
    )
    assert_equal(trained(params, STEPS)[0], expected)


def apollo_reference(optimizer, params, rank, channels):
    """Return weights after Algorithm 1 of arXiv 2412.05270 in float64, with the optimizer's projections."""
    weights = {name: weight.detach().double() for name, weight in make_weights().items()}
    first, second, last = {}, {}, {}
    for step in range(1, STEPS + 1):
        rate = params.learning_rate * math.sqrt(1 - params.beta2**step) / (1 - params.beta1**step)
        for name, gradient in clipped(make_gradients(step)).items():
            matrix, high = gradient.dim() == 2, gradient.shape[0] >= gradient.shape[-1]
            if matrix:
                g = gradient if high else gradient.T
                p = optimizer.projection(name, g.shape[1], params.seed, (step - 1) // params.update_interval).double()
                assert p.shape == (g.shape[1], rank)
            r = g @ p if matrix else gradient
            first[name] = params.beta1 * first.get(name, 0) + (1 - params.beta1) * r
            second[name] = params.beta2 * second.get(name, 0) + (1 - params.beta2) * r**2
            update = first[name] / (second[name].sqrt() + params.eps)
            if matrix:
                factor = update.norm(dim=channels, keepdim=True) / (r.norm(dim=channels, keepdim=True) + 1e-8)
                update = g * factor
                norm, before = update.norm(), last.get(name, 0.0)
                if before > 0 and norm > params.norm_growth_limit * before:
                    update = update / norm * params.norm_growth_limit * before
                last[name] = update.norm()
                update = (update if high else update.T) * math.sqrt(params.scale)
            weights[name] = weights[name] - rate * update
            weights[name] = weights[name] - params.learning_rate * params.weight_decay * weights[name]
    return weights


@pytest.mark.parametrize(("name", "rank", "channels"), [("apollo", 3, (1,)), ("apollo_mini", 1, (0, 1))])
@pytest.mark.parametrize("limit", [1.1, 0.0])
def test_apollo_is_that_of_the_paper(name, rank, channels, limit):
    params = replace(PARAMS[name], norm_growth_limit=limit)
    weights, optimizer = trained(params, STEPS)
    expected = apollo_reference(optimizer, replace(params, norm_growth_limit=limit or math.inf), rank, channels)
    assert_equal(weights, expected)


@pytest.mark.parametrize("kind", [ApolloParams, ApolloMiniParams])
def test_the_growth_of_apollos_updates_is_limited(kind):
    """The scaled gradient itself shrinks and grows thirtyfold; without the limit, its norm would too."""
    params = kind(norm_growth_limit=1.05)
    weights = make_weights()
    optimizer = make_optimizer(weights, params)
    norms = []
    for step in range(1, 8):
        step_with(optimizer, weights, params, step)
        norms.append(optimizer.tensors["norm.high"].item())
    growth = [after / before for before, after in pairwise(norms)]
    assert max(growth) == pytest.approx(1.05, rel=1e-5)


def test_apollos_rank_is_at_most_the_smaller_side():
    optimizer = make_optimizer(make_weights(), ApolloParams(rank=6))
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.tensors.items()}
    assert (shapes["exp_avg.high"], shapes["exp_avg_sq.wide"], shapes["exp_avg.flat"]) == ((12, 6), (90, 5), (6,))


def test_apollos_projections_are_normal_and_come_from_seed_weight_and_draw():
    weights = {name: nn.Parameter(torch.zeros(500, 400)) for name in ("one", "other")}
    apollo = Apollo(weights, ApolloParams(rank=100))
    drawn = apollo.projection("one", 400, 7, 0)
    assert torch.equal(drawn, Apollo(weights, ApolloParams(rank=100)).projection("one", 400, 7, 0))
    others = [apollo.projection(*case) for case in (("other", 400, 7, 0), ("one", 400, 8, 0), ("one", 400, 7, 1))]
    assert all((drawn * other).mean().abs() < 1e-3 / 4 for other in others)
    assert drawn.mean().item() == pytest.approx(0, abs=2e-3)
    assert drawn.var().item() == pytest.approx(1 / 100, rel=0.03)
    assert (drawn.abs() < 0.1).float().mean().item() == pytest.approx(0.6827, abs=0.01)


def test_apollo_draws_anew_every_update_interval_steps():
    params = ApolloParams(rank=2, update_interval=3)
    weights = make_weights()
    optimizer = make_optimizer(weights, params)
    draws = []
    project = optimizer.projection
    optimizer.projection = lambda *case: draws.append(case[-1]) or project(*case)
    for step in range(1, 8):
        step_with(optimizer, weights, params, step)
    assert draws == [0] * 6 + [1] * 6 + [2] * 2


def dequantised(optimizer, kind, name, codes):
    """Return a moment in float64 (the map's value of each byte times the scale of its block of 256) and the scales."""
    quantised = optimizer.tensors[f"{kind}.{name}"]
    scales = optimizer.tensors[f"{kind}_scale.{name}"].double().repeat_interleave(256)[: quantised.numel()]
    return codes.double()[quantised.long()] * scales.view(quantised.shape), scales.view(quantised.shape)


def test_adamw_8bit_steps_as_adamw_and_rounds_each_moment_to_the_nearest_value_of_its_map():
    """AdamW's equations in float64 between one rounding and the next (arXiv 2110.02861)."""
    params, weights = PARAMS["adamw_8bit"], make_weights()
    optimizer = make_optimizer(weights, params)
    maps = {kind: kept.values for kind, kept in optimizer.maps.items()}
    for step in range(1, STEPS + 1):
        before = {name: weight.detach().double() for name, weight in weights.items()}
        moments = {kind: {name: dequantised(optimizer, kind, name, maps[kind])[0] for name in before} for kind in maps}
        step_with(optimizer, weights, params, step)
        for name, g in clipped(make_gradients(step)).items():
            first = params.beta1 * moments["exp_avg"][name] + (1 - params.beta1) * g
            second = params.beta2 * moments["exp_avg_sq"][name] + (1 - params.beta2) * g**2
            root = (second / (1 - params.beta2**step)).sqrt() + params.eps
            expected = before[name] * (1 - 0.02 * 0.1) - 0.02 * first / (1 - params.beta1**step) / root
            torch.testing.assert_close(weights[name].detach().double(), expected, rtol=2e-5, atol=2e-6)
            for kind, exact in (("exp_avg", first), ("exp_avg_sq", second)):
                stored, scales = dequantised(optimizer, kind, name, maps[kind])
                assert ((stored - exact).abs() <= BOUNDS[kind] * scales).all(), (step, kind, name)


def test_adamw_8bit_keeps_a_byte_for_each_moment_and_a_scale_for_each_block():
    optimizer = make_optimizer(make_weights(), PARAMS["adamw_8bit"])
    wide = {name: (tuple(t.shape), t.dtype) for name, t in optimizer.tensors.items() if name.endswith(".wide")}
    assert wide == {
        "exp_avg.wide": ((5, 90), torch.uint8),
        "exp_avg_sq.wide": ((5, 90), torch.uint8),
        "exp_avg_scale.wide": ((2,), torch.float32),
        "exp_avg_sq_scale.wide": ((2,), torch.float32),
    }


def test_adamw_8bit_arrives_where_adamw_does():
    """Minimizes a quadratic of condition 100, whose gradients differ by orders of magnitude within a block."""
    curvature = torch.logspace(-1, 1, 512)
    ends = []
    for params in (AdamParams(learning_rate=0.02), Adam8bitParams(learning_rate=0.02)):
        weights = {"w": nn.Parameter(torch.ones(512))}
        optimizer = make_optimizer(weights, params)
        for step in range(1, 201):
            weights["w"].grad = curvature * weights["w"].detach()
            optimizer.step(params, step, 1.0)
        ends.append((curvature * weights["w"].detach() ** 2).sum().item())
    assert ends[1] < 1e-3 * curvature.sum().item()


@pytest.mark.parametrize("name", PARAMS)
def test_a_gradient_below_the_limit_is_not_clipped(name):
    weights = [trained(replace(PARAMS[name], grad_clip_norm=limit), 2)[0] for limit in (0.0, 1e6)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("name", PARAMS)
def test_weights_without_a_gradient_stay_finite(name):
    weights, params = make_weights(), type(PARAMS[name])()
    optimizer = make_optimizer(weights, params)
    for step in (1, 2, 3):
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        optimizer.step(params, step, 0.0)
    before = make_weights()
    assert all(torch.equal(weights[key], before[key]) for key in weights)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_round_to_the_nearest_value_of_the_papers_map(signed):
    kept = BlockMap(torch.device("cpu"), signed=signed)
    values = kept.values.double()
    assert len(values.unique()) == 256
    assert (values.min().item(), values.max().item()) == pytest.approx((-0.993 if signed else 0.0, 1.0), abs=1e-4)
    tensor = 10 ** -torch.linspace(0, 9, 1000) * (torch.randn(1000, generator=torch.Generator().manual_seed(0)).sign())
    tensor = tensor if signed else tensor.abs()
    codes, scales = torch.zeros(1000, dtype=torch.uint8), torch.zeros(4)
    kept.pack(tensor, codes, scales)
    blocks = torch.nn.functional.pad(tensor, (0, 24)).view(4, 256)
    assert torch.equal(scales, blocks.abs().amax(1))
    errors = (kept.unpack(codes, scales).double() - tensor.double()).abs()
    scale = scales.double().repeat_interleave(256)[:1000, None]
    nearest = (values[None] * scale - tensor.double()[:, None]).abs()
    if not signed:
        nearest = nearest[:, 1:]  # Values above 0 are not rounded to 0.
    torch.testing.assert_close(errors, nearest.amin(1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bits_tell_neighbours_apart_at_every_middle_between_two_values(signed):
    kept = BlockMap(torch.device("cpu"), signed=signed)
    middles = ((kept.values[1:] + kept.values[:-1]) / 2)[0 if signed else 1 :]
    below, above = (torch.nextafter(middles, torch.full_like(middles, end)) for end in (-2.0, 2.0))
    for tensor, code in ((below, 0), (above, 1)):
        codes, scales = torch.zeros(256, dtype=torch.uint8), torch.zeros(1)
        kept.pack(torch.cat([tensor, torch.ones(256 - len(tensor))]), codes, scales)
        expected = torch.arange(len(middles)) + code + (0 if signed else 1)
        assert torch.equal(codes[: len(middles)].long(), expected)


def test_8_bits_keep_zeros_and_empty_blocks():
    kept = BlockMap(torch.device("cpu"), signed=True)
    tensor = torch.zeros(512)
    tensor[300] = -3.0
    codes, scales = torch.zeros(512, dtype=torch.uint8), torch.zeros(2)
    kept.pack(tensor, codes, scales)
    unpacked = kept.unpack(codes, scales)
    assert unpacked[300].item() == pytest.approx(-3.0, rel=0.0071)
    assert (unpacked != 0).sum() == 1


def test_8_bit_steps_stay_bounded_where_gradients_come_and_go():
    """Second moments far below their block's largest must not become 0 while the first moment remains."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (-6 * torch.rand(256, generator=generator))
    weights = {"w": nn.Parameter(torch.zeros(256))}
    params = Adam8bitParams(learning_rate=1.0)
    optimizer = make_optimizer(weights, params)
    for step in range(1, 51):
        before = weights["w"].detach().clone()
        present = torch.rand(256, generator=generator) < 0.3
        weights["w"].grad = torch.randn(256, generator=generator) * sizes * present
        optimizer.step(params, step, 1.0)
        assert (weights["w"].detach() - before).abs().max() < 4


def test_the_cases_clip():
    assert all(norm_of(make_gradients(step)) > COMMON["grad_clip_norm"] for step in range(1, STEPS + 1))
