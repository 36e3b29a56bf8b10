"""Tiny seeded vision-language models, built with transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_families import DELTA, QWEN_EXPERTS, SIZES

TEXT = {**SIZES, "num_hidden_layers": 2, "vocab_size": 320}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
}
QWEN25_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
QWEN3_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _llava(name: str, text: Any) -> transformers.PreTrainedConfig:
    vision = transformers.CLIPVisionConfig(**CLIP)
    made: Any = getattr(transformers, f"{name}Config")
    return made(vision_config=vision, text_config=text, image_token_index=98, image_token_id=98)


def _gemma3() -> transformers.PreTrainedConfig:
    text = transformers.Gemma3TextConfig(**{**TEXT, "head_dim": 16, "sliding_window": 6})
    vision = transformers.SiglipVisionConfig(**CLIP)
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


def _qwen35(name: str, **experts: Any) -> transformers.PreTrainedConfig:
    rope = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = {**TEXT, **ENDS, **DELTA, "num_hidden_layers": 3, "rope_parameters": rope, **experts}
    vision = {k: v for k, v in QWEN3_VISION.items() if k != "deepstack_visual_indexes"}
    made: Any = getattr(transformers, f"{name}Config")
    return made(text_config=text, vision_config=vision)


def config(name: str) -> transformers.PreTrainedConfig:
    qwen = {"text_config": {**TEXT, **ENDS, "rope_parameters": MROPE}}
    return {
        "LlavaForConditionalGeneration": lambda: _llava("Llava", transformers.LlamaConfig(**TEXT)),
        "LlavaNextForConditionalGeneration": lambda: _llava("LlavaNext", transformers.MistralConfig(**TEXT)),
        "LlavaOnevisionForConditionalGeneration": lambda: _llava(
            "LlavaOnevision", transformers.Qwen2Config(**TEXT)
        ),
        "Gemma3ForConditionalGeneration": _gemma3,
        "Mistral3ForConditionalGeneration": lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**TEXT),
            vision_config=transformers.PixtralVisionConfig(**{**CLIP, "head_dim": 16}),
        ),
        "Qwen2VLForConditionalGeneration": lambda: transformers.Qwen2VLConfig(
            **qwen, vision_config=QWEN_VISION, tie_word_embeddings=True
        ),
        "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
            **qwen, vision_config=QWEN25_VISION
        ),
        "Qwen3VLForConditionalGeneration": lambda: transformers.Qwen3VLConfig(
            text_config={**TEXT, **ENDS, "head_dim": 16, "rope_parameters": MROPE},
            vision_config=QWEN3_VISION,
        ),
        "Qwen3_5ForConditionalGeneration": lambda: _qwen35("Qwen3_5"),
        "Qwen3_5MoeForConditionalGeneration": lambda: _qwen35("Qwen3_5Moe", **QWEN_EXPERTS),
    }[name]()


def build(name: str) -> transformers.PreTrainedModel:
    """A model of the class `name`; its tower's biases and norms are not what they start as."""
    made = config(name)
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = getattr(transformers, name)(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.02))
    return model
