"""Vision-language checkpoints: the language tower is a model of another family, found by structure.

Its config is `text_config`, or part of the top level in older files; its tensors are under one of
`family.ROOTS`. Text alone has one position a token, so multimodal rotary is plain rotary. What is not the
language tower is carried over unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delivery.errors import DataError
from delivery.model.config import ModelConfig
from delivery.model.families import families, naming
from delivery.model.families.family import Family, HfConfig

_TOWERS = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
# Published text_configs leave out what their class has as its default.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}
_FROM_OUTSIDE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")


def config(hf: HfConfig) -> ModelConfig:
    """The language tower's. Raises DataError `unknown-architecture` for a tower that no family knows."""
    text = hf.get("text_config")
    text = dict(text) if isinstance(text, Mapping) else dict(hf)
    kind = str(text.get("model_type"))
    if kind not in _TOWERS:
        raise DataError(
            "unknown-architecture",
            f"the language tower of this {hf['architectures'][0]} is of the unknown kind {kind!r}",
            why=f"supported: {', '.join(sorted(_TOWERS))}",
        )
    family = families()[_TOWERS[kind]]
    outside = {key: hf[key] for key in _FROM_OUTSIDE if hf.get(key) is not None}
    stated = {key: value for key, value in text.items() if value is not None or key == "sliding_window"}
    return family.config({**_DEFAULTS.get(family.name, {}), **stated, **outside})


FAMILY = Family(
    name="vision_language",
    architectures=(
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
