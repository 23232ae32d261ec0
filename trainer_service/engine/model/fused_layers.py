"""Layers of Llama-like decoders with hand-written backward passes: few passes over memory, no autocast.

They replace transformers' layers and compute the same. Their element-wise work runs as written or compiled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, autograd, nn
from transformers import PreTrainedModel

from paceline.errors import Unsupported
from trainer_service.engine.model.packed_attention import packed_attention

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose decoder layers consist of these three modules and whose rotary halves are equal."""
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")

Body = Callable[..., None]
"""A function of tensors that writes its results into some of them."""


def has_fused_family(model: PreTrainedModel) -> bool:
    """Return whether fused layers exist for a model."""
    return model.config.model_type in _FAMILIES


def fuse_layers(model: PreTrainedModel, work: ElementWork) -> None:
    """Replace norms, MLPs and attention of a known family; leave any other model as it is.

    Names of weights and of linear layers stay. `work` runs the element-wise parts.
    """
    if not has_fused_family(model):
        return
    for parent in reversed(list(model.modules())):  # Inner layers first: outer ones take them over.
        for name, child in list(parent.named_children()):
            replacement = _fused(child, model, work)
            if replacement is not None:
                setattr(parent, name, replacement)


def _fused(module: nn.Module, model: PreTrainedModel, work: ElementWork) -> nn.Module | None:
    kind, config = type(module).__name__, model.config
    if kind in _NORMS:
        return FusedRmsNorm(module.weight, module.variance_epsilon, work)  # type: ignore[arg-type]
    if kind.endswith("MLP") and config.hidden_act == "silu":
        return FusedSwiglu(module, work)
    if kind.endswith("Attention"):
        return FusedAttention(module, work)
    return None


class FusedAttention(nn.Module):
    """Projections, rotary embedding and attention within segments, with the modules of the layer that it replaces.

    The layer's sliding window, in positions, is its own or, in Mistral, that of the configuration.
    """

    def __init__(self, layer: Any, work: ElementWork) -> None:
        super().__init__()
        self._work = work
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        self.q_norm, self.k_norm = getattr(layer, "q_norm", None), getattr(layer, "k_norm", None)
        self.head_dim, self.scaling = layer.head_dim, layer.scaling
        self.config, self.sliding_window = layer.config, getattr(layer, "sliding_window", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        segment_lengths: tuple[int, ...],
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """Attend within each segment of `hidden_states`, [1, T, hidden].

        `position_embeddings` are the cosines and sines, [1, T, head_dim], with both halves of the last dimension equal.
        """
        shape = (hidden_states.shape[1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cosines, sines = (x[0, :, : self.head_dim // 2] for x in position_embeddings)
        query, key = (_Rotate.apply(x.transpose(0, 1), cosines, sines, self._work) for x in (query, key))  # type: ignore[no-untyped-call]
        attended, _ = packed_attention(
            self,
            query[None],
            key[None],
            value.transpose(0, 1)[None],
            None,
            segment_lengths=segment_lengths,
            scaling=self.scaling,
            sliding_window=self.config.sliding_window if self.config.model_type == "mistral" else self.sliding_window,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:2], -1)), None


class _Rotate(autograd.Function):
    """Rotary embedding (arXiv 2104.09864) in the half-split layout, of [heads, T, head_dim] by [T, head_dim / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, work: ElementWork) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.work = work
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        work(rotate, x, out, cosines, sines)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate back, laid out as the projection's output, [T, heads, head_dim]."""
        cosines, sines = ctx.saved_tensors
        heads, length, width = gradients[0].shape
        out = torch.empty(length, heads, width, dtype=gradients[0].dtype, device=gradients[0].device).transpose(0, 1)
        ctx.work(rotate, gradients[0], out, cosines, -sines)
        return out, None, None, None


def rotate(x: Tensor, out: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Write each head of `x` (heads, rows, size), rotated by its position, to `out`."""
    (first, second), (low, high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    low.copy_(first).mul_(cosines).addcmul_(second, sines, value=-1)
    high.copy_(second).mul_(cosines).addcmul_(first, sines)


class FusedSwiglu(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202, eq. 6), with the modules of the layer that it replaces."""

    def __init__(self, mlp: Any, work: ElementWork) -> None:
        super().__init__()
        self._work = work
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, [..., hidden], to the same shape."""
        inner = _Swiglu.apply(self.gate_proj(x), self.up_proj(x), self._work)  # type: ignore[no-untyped-call]
        return self.down_proj(inner)  # type: ignore[no-any-return]


class _Swiglu(autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, work: ElementWork) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.work = work
        out = torch.empty_like(gate)
        work(swiglu, gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        ctx.work(swiglu_backward, gate, up, gradients[0], dgate, dup)
        return dgate, dup, None


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to `out`."""
    torch.ops.aten.silu.out(gate, out=out).mul_(up)


def swiglu_backward(gate: Tensor, up: Tensor, dout: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Write the gradients of `swiglu` with respect to its inputs to `dgate` and `dup`."""
    torch.ops.aten.mul.out(dout, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    torch.ops.aten.silu.out(gate, out=dup).mul_(dout)


class FusedRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467, eq. 4), with float32 statistics.

    Saves x and one float32 per row for backward.
    """

    def __init__(self, weight: nn.Parameter, eps: float, work: ElementWork) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._work = work

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, [..., width], and keep its dtype."""
        return _RmsNorm.apply(x, self.weight, self.eps, self._work)  # type: ignore[no-any-return, no-untyped-call]


class _RmsNorm(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, work: ElementWork) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, inverse = torch.empty_like(rows), torch.empty(len(rows), 1, device=x.device)
        work(normalise, rows, out, inverse, weight, eps=eps)
        ctx.save_for_backward(rows, weight, inverse)
        ctx.work = work
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dout = gradients[0].reshape(x.shape)
        dx = torch.empty_like(x)
        ctx.work(normalise_backward, x, dout, dx, inverse, weight)
        dweight = (dout.float() * (x * inverse)).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx.view(gradients[0].shape), dweight, None, None


def normalise(x: Tensor, out: Tensor, inverse: Tensor, weight: Tensor, *, eps: float) -> None:
    """Write the rows of `x`, RMS-normalised and times `weight`, to `out`, and 1 / RMS of each to `inverse`."""
    exact = x.float()
    inverse.copy_(torch.linalg.vecdot(exact, exact).unsqueeze(1)).div_(x.shape[-1]).add_(eps).rsqrt_()
    out.copy_(exact * inverse).mul_(weight)


def normalise_backward(x: Tensor, dout: Tensor, dx: Tensor, inverse: Tensor, weight: Tensor) -> None:
    """Write dx = (g - n mean(g n)) / rms, where n = x / rms and g = dy * weight."""
    normed, g = x * inverse, dout.float() * weight.float()
    share = torch.linalg.vecdot(g, normed).unsqueeze(1).div_(-x.shape[1])
    dx.copy_(g.addcmul_(normed, share).mul_(inverse))


class ElementWork:
    """Runs the element-wise work of the fused layers.

    Without a torch.compile backend, each body runs eagerly. With one, such as "inductor", it is compiled into one loop
    at its first call for a dtype, which takes seconds.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self._compiled: dict[Body, Body] = {}

    def __call__(self, body: Body, *tensors: Tensor, **constants: float) -> None:
        """Apply `body` to tensors."""
        if self._backend is None:
            body(*tensors, **constants)
            return
        if body not in self._compiled:
            self._compiled[body] = torch.compile(body, dynamic=True, fullgraph=True, backend=self._backend)
        self._compiled[body](*tensors, **constants)


def check_compiler(device: str) -> None:
    """Raise Unsupported if torch.compile has no compiler for `device`: C++ on a CPU, Triton on a GPU."""
    if device.startswith("cuda"):
        found, needed = find_spec("triton") is not None, "Triton"
    else:
        compiler = os.environ.get("CXX") or "g++"  # As torch does.
        found, needed = shutil.which(compiler) is not None, f"a C++ compiler, {compiler} (CXX names another)"
    if not found:
        raise Unsupported(f"compile=true needs {needed}, which is not installed; install it, or set compile=false.")
