"""Layers with hand-written backward passes equal the layers that they replace, in value and gradient; compiled, too."""

from __future__ import annotations

import pytest
import torch
from support.models.engine_cases import MAKERS, gradients, make_data, train, warmed
from support.models.tiny_models import VOCAB_SIZE, make_tiny_llama, make_tiny_qwen2
from torch.nn import functional
from transformers import AutoModelForCausalLM

from paceline.errors import Unsupported
from paceline.types import ForwardBackwardSpec, LoraConfig
from trainer_service.engine.model import fused_layers
from trainer_service.engine.model.base_model import output_head
from trainer_service.engine.model.fused_layers import (
    ElementWork,
    FusedAttention,
    FusedRmsNorm,
    FusedSwiglu,
    check_compiler,
    fuse_layers,
)
from trainer_service.engine.model.packed_attention import PACKED_ATTENTION
from trainer_service.engine.peft_engine import PeftEngine
from trainer_service.engine_link.options import EngineOptions


def cosine(one, other):
    a, b = (torch.cat([value.double().flatten() for value in values]) for values in (one, other))
    return functional.cosine_similarity(a, b, dim=0).item()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_bfloat16_gradients_point_where_float32_ones_do(tmp_path, model, loss):
    directory = MAKERS[model](tmp_path)
    # Weights of ordinary size that bfloat16 holds exactly, like published ones, so that only the arithmetic differs.
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    for parameter in stock.parameters():
        parameter.data *= 0.5 if parameter.dim() > 1 else 1.0
    stock.save_pretrained(directory)
    results = []
    for dtype in ("float32", "bfloat16"):
        engine = PeftEngine(EngineOptions(str(directory), "tiny", dtype=dtype, logprob_chunk=8))
        engine.create_run("run", LoraConfig(rank=4))
        warmed(engine)
        for name, parameter in engine.runs["run"].parameters.items():
            start = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(torch.randn(parameter.shape, generator=start) * 0.05)
        data = make_data((200, 90, 150, 17, 120))
        own = engine.forward_backward("run", data, ForwardBackwardSpec("cross_entropy", forward_only=True))
        for datum, output in zip(data, own.loss_fn_outputs, strict=True):
            datum.loss_fn_inputs["logprobs"] = output["logprobs"]
        train(engine, loss=loss, data=data)
        results.append(gradients(engine).values())
    assert cosine(*results) >= 0.999


def test_norm_equals_its_formula_with_both_gradients(generator):
    x = (torch.randn(3, 700, 48, generator=generator) * 3).requires_grad_()
    norm = FusedRmsNorm(torch.nn.Parameter(torch.randn(48, generator=generator)), 1e-6, ElementWork())
    upstream = torch.randn(x.shape, generator=generator)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    wanted = torch.autograd.grad(expected, (x, norm.weight), upstream)
    torch.testing.assert_close(torch.autograd.grad(norm(x), (x, norm.weight), upstream), wanted, rtol=1e-4, atol=1e-4)


def test_norm_leaves_the_gradient_that_it_is_given(generator):
    x = torch.randn(5, 48, generator=generator, requires_grad=True)
    upstream = torch.randn(1, 48, generator=generator).expand(5, 48)
    before = upstream.clone()
    torch.autograd.grad(FusedRmsNorm(torch.nn.Parameter(torch.full((48,), 2.0)), 1e-6, ElementWork())(x), x, upstream)
    assert torch.equal(upstream, before)


def packed_logits(model, parts):
    lengths = tuple(len(part) for part in parts)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = torch.cat(parts)[None]
    return model(input_ids=tokens, position_ids=positions, use_cache=False, segment_lengths=lengths).logits[0]


def test_sliding_windows_are_kept(tmp_path, generator):
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    directory = make_tiny_qwen2(tmp_path)
    fused, stock = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=name, **window).eval()
        for name in (PACKED_ATTENTION, "eager")
    )
    fuse_layers(fused, ElementWork())
    assert [layer.self_attn.sliding_window for layer in fused.model.layers] == [4, None]
    parts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (3, 19, 12)]
    expected = torch.cat([stock(input_ids=part[None]).logits[0] for part in parts])
    torch.testing.assert_close(packed_logits(fused, parts), expected, rtol=1e-4, atol=1e-4)


def test_known_families_are_fused_and_others_left_alone(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_llama(tmp_path))
    names = set(model.state_dict())
    model.config.model_type = "another"
    fuse_layers(model, ElementWork())
    kinds = (FusedAttention, FusedSwiglu, FusedRmsNorm)
    assert not any(isinstance(module, kinds) for module in model.modules())
    model.config.model_type = "llama"
    fuse_layers(model, ElementWork())
    assert [sum(isinstance(module, kind) for module in model.modules()) for kind in kinds] == [2, 2, 5]
    assert set(model.state_dict()) == names


def test_a_frozen_head_works_once_for_forward_and_backward(tmp_path):
    engine = PeftEngine(EngineOptions(str(make_tiny_llama(tmp_path)), "tiny", logprob_chunk=4))
    engine.create_run("run", LoraConfig(rank=4))
    rows = []
    output_head(engine.model).base_layer.register_forward_hook(lambda _module, args, _output: rows.append(len(args[0])))
    output = train(engine)
    assert sum(rows) == output.metrics["tokens:sum"]


def work_cases(rows, dtype):
    """Yield element-wise functions with their tensors, including those that they write, and constants."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, other, dout, weight = draw(rows, 48), draw(rows, 48), draw(rows, 48), draw(48)
    inverse, cosines = torch.rand(rows, 1, generator=generator), draw(rows, 8)
    heads = draw(rows, 3, 16).transpose(0, 1)
    yield fused_layers.normalise, (x, torch.zeros_like(x), torch.zeros(rows, 1), weight), {"eps": 1e-5}
    yield fused_layers.normalise_backward, (x, dout, torch.zeros_like(x), inverse, weight), {}
    yield fused_layers.swiglu, (x, other, torch.zeros_like(x)), {}
    yield fused_layers.swiglu_backward, (x, other, dout, torch.zeros_like(x), torch.zeros_like(x)), {}
    yield fused_layers.rotate, (heads, torch.zeros(3, rows, 16, dtype=dtype), cosines, cosines.flip(1)), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_work_gives_what_it_gives_as_written(dtype):
    written, compiled = ElementWork(), ElementWork("aot_eager")
    for rows in (7, 300):
        for ours, theirs in zip(work_cases(rows, dtype), work_cases(rows, dtype), strict=True):
            for work, (body, tensors, constants) in ((written, ours), (compiled, theirs)):
                with torch.no_grad():
                    work(body, *tensors, **constants)
            for one, other in zip(ours[1], theirs[1], strict=True):
                # When compiled, intermediate values of a body are not rounded to bfloat16.
                rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler, g\+\+"):
        PeftEngine(EngineOptions(str(make_tiny_llama(tmp_path / "model")), "tiny", compile=True))
    compiler = tmp_path / "c++-of-mine"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", compiler.name)
    check_compiler("cpu")
