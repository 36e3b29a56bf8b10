"""ModelConfig: what a decoder is, in numbers. Families map checkpoints' own configs onto it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    theta: base. rotary_dim: leading features of a head that are rotated (partial rotary).
    scaling: the checkpoint's own `rope_scaling` mapping, {} for none; `rope.py` knows the kinds.
    interleaved: neighbouring features form a pair (GLM), else halves (NeoX).
    """

    theta: float
    rotary_dim: int
    scaling: dict[str, object] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Mixture of experts: sizes, routing and which layers have it.

    normalize_topk: the shares of a token's experts are made to add up to one. shared_intermediate_size: of
    the expert that all tokens pass, 0 for none; shared_expert_gate: whether it is weighed by a sigmoid.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_topk: bool
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta rule (linear attention) of hybrid models: head counts, head sizes, convolution."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are counts of features, tokens or layers."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeSpec
    layer_types: tuple[LayerType, ...]
    tie_embeddings: bool
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    norm_plus_one: bool = False
    """Norms multiply by 1 + w (Gemma, Qwen3.5)."""
    qk_norm: bool = False
    sandwich_norms: bool = False
    """A norm after attention and after the MLP as well (Gemma 2/3, GLM-4-0414)."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Multiplies q·k; None for head_dim ** −0.5."""
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    sliding_window: int | None = None
    """Tokens that a `sliding_attention` layer sees, itself included."""
    local_rope: RopeSpec | None = None
    """Rotary of the sliding layers where it differs (Gemma 3)."""
    attention_gate: bool = False
    """Attention output is gated by the sigmoid of a second half of q_proj (Qwen3.5)."""
    moe: MoESpec | None = None
    delta: DeltaSpec | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
