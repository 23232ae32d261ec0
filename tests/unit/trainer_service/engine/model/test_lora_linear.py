"""The products of a run's low-rank factors: their values and gradients, in whatever dtype they are computed."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn

from trainer_service.engine.model.lora_linear import AdaptedLinear, Routing, Span

WIDTH, OUTS, SCALING = 48, (32, 16), 0.7


def layers_of(ranks):
    """Make two layers that share an input, each with factors of every run."""
    torch.manual_seed(0)
    layers = []
    for place, out in enumerate(OUTS):
        layer = AdaptedLinear(nn.Linear(WIDTH, out, bias=False).bfloat16(), "first", LoraConfig(r=ranks[0]), r=ranks[0])
        for name, rank in zip(("first", "second"), ranks, strict=True):
            layer.lora_A[name] = nn.Linear(WIDTH, rank, bias=False)
            layer.lora_B[name] = nn.Linear(rank, out, bias=False)
            layer.lora_dropout[name], layer.scaling[name] = nn.Identity(), SCALING
        layer.base_layer.requires_grad_(requires_grad=False)
        layer.routing, layer.index = Routing(), place
        layers.append(layer)
    return layers


def compute(layers, x, rows, gradients):
    """Return the outputs, then the gradients of x and of each factor, run by run."""
    spans = [Span("first", 0, rows[0], ((0, rows[0]),)), Span("second", rows[0], sum(rows), ((0, rows[1]),))]
    factors = [f[name].weight for name in ("first", "second") for layer in layers for f in (layer.lora_A, layer.lora_B)]
    outs = [layer(x, spans) for layer in layers]
    return [*outs, *torch.autograd.grad(outs, [x, *factors], gradients)]


def expected(layers, x, rows, gradients):
    """Return the same as `compute` from the definition, in float64."""
    x, factors = x.detach().double().requires_grad_(), []
    outs = [x @ layer.base_layer.weight.double().t() for layer in layers]
    parts = [[], []]
    for place, name in enumerate(("first", "second")):
        for layer, total in zip(layers, parts, strict=True):
            a, b = (f[name].weight.detach().double().requires_grad_() for f in (layer.lora_A, layer.lora_B))
            factors += [a, b]
            total.append(SCALING * torch.split(x, list(rows))[place] @ a.t() @ b.t())
    outs = [out + torch.cat(total) for out, total in zip(outs, parts, strict=True)]
    return [*outs, *torch.autograd.grad(outs, [x, *factors], [g.double() for g in gradients])]


def error(one, other):
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize("rows", [(5, 40), (300, 7), (200, 300)])
@pytest.mark.parametrize("ranks", [(4, 4), (8, 3)])
def test_outputs_and_gradients_in_bfloat16_are_those_of_the_definition(rows, ranks):
    layers = layers_of(ranks)
    x = torch.randn(sum(rows), WIDTH).bfloat16().requires_grad_()
    gradients = [torch.randn(sum(rows), out).bfloat16() for out in OUTS]
    mine, theirs = compute(layers, x, rows, gradients), expected(layers, x, rows, gradients)
    for one, other in zip(mine, theirs, strict=True):
        assert error(one, other) < 1e-2
    assert all(gradient.dtype == torch.float32 and gradient.is_contiguous() for gradient in mine[3:])
    # With few rows on a CPU, only the input and the layers' outputs are rounded to bfloat16.
    for count, place in zip(rows, (3, 7), strict=True):
        worst = max(error(one, other) for one, other in zip(mine[place : place + 4], theirs[place:], strict=False))
        assert (worst < 1e-5) == (count <= 128)


def test_a_run_whose_factors_are_not_finite_leaves_the_rows_of_others_as_they_are():
    layers, rows = layers_of((4, 4)), (20, 30)
    x = torch.randn(sum(rows), WIDTH).bfloat16().requires_grad_()
    gradients = [torch.randn(sum(rows), out).bfloat16() for out in OUTS]
    before = compute(layers, x, rows, gradients)
    layers[0].lora_A["first"].weight.data.fill_(torch.inf)
    after = compute(layers, x, rows, gradients)
    for one, other in zip(before[:3], after[:3], strict=True):
        assert torch.equal(one[rows[0] :], other[rows[0] :])
    for one, other in zip(before[7:], after[7:], strict=True):
        assert torch.equal(one, other)
