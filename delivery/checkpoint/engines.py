"""Which engines load a checkpoint: a table from their documentation and model registries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Engine → quantisation method that it reads → what it needs for that, "" for nothing.
_READS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "awq": "",
        "gptq": "",
        "compressed-tensors": "",
        "fp8": "compute capability 8.9 (weight-only from 7.5)",
    },
    "sglang": {"awq": "", "gptq": "", "compressed-tensors": "", "fp8": ""},
    "lmdeploy": {
        "awq": "float16 activations",
        "gptq": "float16 activations",
        "smooth_quant": "--backend pytorch",
        "fp8": "--backend pytorch",
    },
    "transformers": {
        "awq": "the package gptqmodel",
        "gptq": "the package gptqmodel",
        "compressed-tensors": "the package compressed-tensors",
        "fp8": "the package accelerate",
    },
}
# Engine → architectures, of those that deliver knows, for which it has no class of its own.
_LACKS: Mapping[str, frozenset[str]] = {
    "lmdeploy": frozenset(
        {
            "GlmForCausalLM",
            "GraniteForCausalLM",
            "LlavaOnevisionForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
        }
    ),
    "transformers": frozenset({"ChatGLMModel", "ChatGLMForConditionalGeneration", "InternLM2ForCausalLM"}),
}


def verdicts(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Engine → {"loads": bool, "why_not": sentence or None, "needs": words or None}."""
    return {name: _verdict(name, config, quantization) for name in _READS}


def _verdict(
    engine: str, config: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    name = next(iter(config.get("architectures") or ()), "")
    if name in _LACKS.get(engine, ()) and not config.get("auto_map"):
        return {"loads": False, "why_not": f"it has no class {name}", "needs": None}
    needs = ["--trust-remote-code"] if config.get("auto_map") else []
    if quantization is not None:
        method = str(quantization.get("quant_method"))
        reads = _READS[engine]
        if method not in reads:
            why = f"it does not read {method}; it reads {', '.join(sorted(reads))}"
            return {"loads": False, "why_not": why, "needs": None}
        needs += [reads[method]] if reads[method] else []
        if engine == "transformers" and _has_zero_points(quantization):
            needs.append("CompressedTensorsConfig(dequantize=True), for its zero points")
    return {"loads": True, "why_not": None, "needs": "; ".join(needs) or None}


def _has_zero_points(quantization: Mapping[str, Any]) -> bool:
    groups = (quantization.get("config_groups") or {}).values()
    weights = [g.get("weights") or {} for g in groups if isinstance(g, Mapping)]
    return any(w.get("symmetric") is False for w in weights)
