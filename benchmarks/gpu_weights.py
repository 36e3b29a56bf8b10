"""Weights for the whole engine's benchmark, made on the card: the Llama-3-8B shape in every form.

`random` draws every number. `as-dummy` fills them as vLLM's `load_format=dummy` does, which the anchors were
measured with: floats uniform in ±1e-3, so fp8 weights round to 0 and to one smallest step either way, and
integers left as allocated, here zero. Products of such numbers take less power.
"""

from __future__ import annotations

from typing import Any

import torch

from delivery.qtensor import QTensor

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
}
KINDS = ("random", "as-dummy")
_DUMMY = 1e-3


class RandomWeights:
    """A WeightSource that draws weights on the device; linear layers in the asked-for form."""

    def __init__(self, config: dict[str, Any], form: str, kind: str = "random") -> None:
        self._config = config
        self._form = form
        self._dummy = kind == "as-dummy"

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def tensor(self, name: str, device: Any = "cpu") -> torch.Tensor:
        size = (self._config["hidden_size"],)
        return (
            _uniform(size, device) if self._dummy else torch.ones(size, dtype=torch.bfloat16, device=device)
        )

    def weight(self, prefix: str, device: Any = "cpu") -> torch.Tensor | QTensor:
        n, k = self._shape(prefix)
        if self._dummy:
            return self._as_dummy(prefix, n, k, device)
        if self._form == "bf16" or "layers" not in prefix:
            return torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5
        if self._form == "w4a16":
            qdata = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
            scale = (
                torch.rand(n, k // 128, device=device, dtype=torch.float32) * 0.2 * k**-0.5 + 0.05 * k**-0.5
            )
            zero = torch.full((n, k // 128), 8, dtype=torch.uint8, device=device)
            return QTensor(qdata, scale.to(torch.float16), zero, 128, 4)
        dtype = torch.int8 if self._form == "int8" else torch.float8_e4m3fn
        scale = torch.full((n, 1), k**-0.5 / (40.0 if dtype == torch.int8 else 1.0), device=device)
        if dtype == torch.int8:
            qdata = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        else:
            qdata = torch.randn(n, k, device=device).to(dtype)
        return QTensor(qdata, scale, None, -1, 8, act_dtype=dtype)

    def _as_dummy(self, prefix: str, n: int, k: int, device: Any) -> torch.Tensor | QTensor:
        if self._form == "bf16" or "layers" not in prefix:
            return _uniform((n, k), device)
        if self._form == "w4a16":
            qdata = torch.zeros(n, k, dtype=torch.uint8, device=device)
            zero = torch.zeros(n, k // 128, dtype=torch.uint8, device=device)
            return QTensor(qdata, _uniform((n, k // 128), device).half(), zero, 128, 4)
        dtype = torch.int8 if self._form == "int8" else torch.float8_e4m3fn
        numbers = torch.zeros(n, k, device=device) if dtype == torch.int8 else _uniform((n, k), device)
        scale = _uniform((n, 1), device).float()
        return QTensor(numbers.to(dtype), scale, None, -1, 8, act_dtype=dtype)

    def _shape(self, prefix: str) -> tuple[int, int]:
        c = self._config
        h, i, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
        kv = c["num_key_value_heads"] * c["head_dim"]
        return {
            "q_proj": (h, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, h),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
            "embed_tokens": (v, h),
            "lm_head": (v, h),
        }[prefix.rpartition(".")[2]]


def _uniform(size: tuple[int, ...], device: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(-_DUMMY, _DUMMY)
