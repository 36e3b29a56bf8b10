"""Tiny seeded models of every family, built with transformers: the oracle of model and engine tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
MROPE = {**PLAIN, "mrope_section": [2, 1, 1]}
TIED = {"tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
GEMMA3 = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6, **TIED}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": PLAIN,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
DELTA = {
    "initializer_range": 0.1,  # with more, float32 itself is 2e-4 away from float64
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
}
QWEN_EXPERTS = {**QWEN_MOE, "mlp_only_layers": [], "shared_expert_intermediate_size": 48}
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-odd": ("Llama", {"hidden_size": 76, "head_dim": 20, "intermediate_size": 92}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "granite": ("Granite", MULTIPLIERS),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 7}),
    "phi4-partial": ("Phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, **TIED}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gemma": ("Gemma", {"head_dim": 24, **TIED}),
    "gemma2": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6, **CAPS, **TIED}),
    "gemma3": ("Gemma3", {**GEMMA3, "num_hidden_layers": 7}),
    "gemma3-linear": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPE}),
    "glm": ("Glm", {"head_dim": 24, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3-next": ("Qwen3Next", {**DELTA, **QWEN_EXPERTS, "partial_rotary_factor": 0.5}),
    "qwen3.5": ("Qwen3_5", {**DELTA, "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **QWEN_EXPERTS, "rope_parameters": MROPE, **TIED}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
}


def build(name: str, **changes: Any) -> transformers.PreTrainedModel:
    family, options = MODELS[name]
    made = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = made(**{**SIZES, **options, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    config.architectures = [f"{family}ForCausalLM"]
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start as zeros and ones: make them tell
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a published checkpoint of the model holds: experts apart, a tied head once."""
    tied = model.config.tie_word_embeddings
    stored = revert_weight_conversion(model, model.state_dict())
    return {k: v for k, v in stored.items() if not (tied and k == "lm_head.weight")}
