"""The weights of one decoder block, by canonical names, and the layers made of them.

Canonical linear layers: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj; `router`,
`experts.3.gate_proj` …, `shared_expert.gate_proj` …, `shared_expert_gate` in a mixture of experts;
`attn_gate` beside q_proj where attention is gated; in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj in a
gated delta layer.
Canonical norms: input_norm, pre_mlp_norm; q_norm, k_norm; post_attention_norm, post_mlp_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from delivery.qtensor import QTensor

Activation = Any
"""What flows between layers: a Tensor, or a quantised one with its scale that a norm made for linears."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x·Wᵀ + b.

    name: prefix of the weight in the checkpoint. weight: [N, K], float or QTensor. bias: [N] or None.
    rows: int64 [N], which rows of the stored tensor these are and in which order; None for all of
        them as they stand. Whoever writes a changed weight back puts its rows there.
    expert: index in a stored tensor that stacks all experts; None otherwise.
    """

    name: str
    weight: torch.Tensor | QTensor
    bias: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    expert: int | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]. A QTensor is expanded to the dtype of x (the exact meaning of its values);
        activations are quantised per token where it asks for that."""
        if isinstance(self.weight, QTensor):
            if self.weight.act_dtype is not None:
                x = fake_quantize(x, self.weight.act_dtype, self.weight.input_scale)
            return functional.linear(x, self.weight.dequantize(x.dtype), self.bias)
        return functional.linear(x, self.weight, self.bias)

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])


def fake_quantize(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] rounded to `dtype` and back: per token, or with a static scale [1]; same dtype as x."""
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    values = x.float()
    if scale is None:
        scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / limit
    steps = (values / scale).clamp(-limit, limit)
    steps = steps.to(dtype).float() if dtype.is_floating_point else steps.round()
    return (steps * scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last dimension, formed in float32 (float64 for float64 inputs).

    plus_one: multiply by 1 + weight (Gemma, Qwen3.5). name: the weight's name in the checkpoint.
    """

    name: str
    weight: torch.Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        work = x if x.dtype == torch.float64 else x.float()
        work = work * torch.rsqrt(work.pow(2).mean(-1, keepdim=True) + self.eps)
        return (work * self.effective().to(work.dtype)).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Activation, torch.Tensor]:
        """(norm(x + residual), x + residual): one kernel where the engine has one."""
        total = x + residual
        return self(total), total

    def effective(self) -> torch.Tensor:
        """What the normalised input is multiplied by, in float32 or wider."""
        weight = self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        return 1.0 + weight if self.plus_one else weight


@dataclass(frozen=True, slots=True)
class Projection:
    """Outputs of several linear layers on one input; `joined` is their concatenation where it exists."""

    parts: tuple[torch.Tensor, ...]
    joined: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Several linear layers as one product: run(x) → [T, sum(sizes)]."""

    run: Callable[[Activation], torch.Tensor]
    sizes: tuple[int, ...]

    def __call__(self, x: Activation) -> Projection:
        joined = self.run(x)
        return Projection(joined.split(self.sizes, dim=-1), joined)


GatedActivation = Callable[[Projection], Activation]
"""(gate, up) of [T, I] each → act(gate) · up, [T, I]."""


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One decoder block's weights. Immutable; `with_linears` makes a changed copy.

    linears, norms: by canonical name. tensors: other per-layer tensors (convolutions, decay rates).
    gated: the MLP's activation. products: fused forms by the tuple of names that they compute, put in
        by the engine; where one is absent its linears are called one by one.
    experts: the engine's fused mixture of experts, or None.
    """

    linears: Mapping[str, Callable[[Any], torch.Tensor]]
    norms: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gated: GatedActivation | None = None
    products: Mapping[tuple[str, ...], Fused] = field(default_factory=dict)
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def with_linears(self, changed: Mapping[str, Callable[[Any], torch.Tensor]]) -> BlockWeights:
        """A copy in which the named linears are replaced: by wrapped ones that watch their inputs, or by
        quantised ones. Fused forms that hold one of them fall away. Raises KeyError for an unknown name."""
        for name in changed:
            if name not in self.linears:
                raise KeyError(name)
        products = {names: f for names, f in self.products.items() if not set(names) & set(changed)}
        keep_experts = not any(name.startswith("experts.") for name in changed)
        return replace(
            self,
            linears={**self.linears, **changed},
            products=products,
            experts=self.experts if keep_experts else None,
        )

    def project(self, names: tuple[str, ...], x: Activation) -> Projection:
        """The outputs of several linears that read the same input."""
        if names in self.products:
            return self.products[names](x)
        return Projection(tuple(self.linears[name](x) for name in names))
