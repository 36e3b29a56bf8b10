"""Reading a Hugging Face config.json: required numbers, rotary settings in both spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from delivery.errors import DataError
from delivery.model.config import LayerType, ModelConfig, MoESpec, RopeSpec
from delivery.model.families.family import HfConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def need_int(hf: HfConfig, key: str) -> int:
    """A positive integer. Raises DataError `config-invalid`."""
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise DataError(
            "config-invalid",
            f"config.json: {key} is wrong or missing",
            why=f"expected a positive integer, got {value!r}",
            hint="deliver inspect on the source; take config.json from the model's own repository",
        )
    return value


def optional_int(hf: HfConfig, key: str, default: int) -> int:
    return default if hf.get(key) is None else need_int(hf, key)


def head_dim(hf: HfConfig) -> int:
    if hf.get("head_dim") is not None:
        return need_int(hf, "head_dim")
    return need_int(hf, "hidden_size") // need_int(hf, "num_attention_heads")


def activation(hf: HfConfig, key: str = "hidden_act", default: str = "silu") -> Any:
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise DataError(
            "config-invalid",
            f"config.json: {key} is {name!r}",
            why=f"expected one of {', '.join(sorted(_ACTIVATIONS))}",
        )
    return _ACTIVATIONS[name]


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list or absent."""
    if isinstance(value, int):
        return (value,)
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else ()


def rope(
    hf: HfConfig,
    dim: int,
    *,
    kind: str | None = None,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> RopeSpec:
    """The rotary settings: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`.

    dim: features of a head. kind: the layer type, for configs that hold one mapping per type. theta, partial:
    what the family means where its config is silent. renamed: other names that its configs give to kinds.
    """
    stated = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise DataError(
            "config-invalid", "config.json: the rope settings are not a mapping", why=repr(stated)
        )
    settings = dict(stated)
    if kind is not None and isinstance(settings.get(kind), Mapping):
        settings = dict(settings[kind])
    base = float(settings.pop("rope_theta", None) or hf.get("rope_theta") or theta)
    share = settings.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or partial
    rotary_dim = int(dim * share)
    name = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    name = (renamed or {}).get(name, name)
    if name in ("default", "mrope"):
        # Multimodal rotary gives text tokens the same position in every section: plain rotary.
        return RopeSpec(base, rotary_dim, interleaved=interleaved)
    settings["rope_type"] = name
    original = settings.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    maximum = hf.get("max_position_embeddings")
    if original is None:
        original = maximum
    settings["original_max_position_embeddings"] = original
    if settings.get("factor") is None and original and maximum:
        settings["factor"] = maximum / original
    return RopeSpec(base, rotary_dim, settings, interleaved)


def decoder(hf: HfConfig, family: str, **changes: Any) -> ModelConfig:
    """The fields that all of the Llama-like configs share; `changes` override or add."""
    layers = need_int(hf, "num_hidden_layers")
    heads = need_int(hf, "num_attention_heads")
    dim = changes.get("head_dim") or head_dim(hf)
    kind: LayerType = "full_attention"
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": need_int(hf, "vocab_size"),
        "hidden_size": need_int(hf, "hidden_size"),
        "intermediate_size": need_int(hf, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": optional_int(hf, "num_key_value_heads", heads),
        "head_dim": dim,
        "max_position": need_int(hf, "max_position_embeddings"),
        "rms_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "layer_types": (kind,) * layers,
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "activation": activation(hf),
        "dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
        "bos_token_id": hf.get("bos_token_id") if isinstance(hf.get("bos_token_id"), int) else None,
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
    }
    if "rope" not in changes:
        fields["rope"] = rope(hf, dim)
    config = ModelConfig(**{**fields, **changes})
    if config.num_heads % config.num_kv_heads:
        raise DataError(
            "config-invalid",
            "config.json: the head counts are inconsistent",
            why=f"num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}",
        )
    return config


def experts(hf: HfConfig, *, shared: bool) -> MoESpec:
    """Qwen's mixture of experts: which layers have it, how the router's shares are scaled.

    shared: whether the family has an expert that all tokens pass.
    """
    dense = hf.get("mlp_only_layers") or ()
    step = optional_int(hf, "decoder_sparse_step", 1)
    layers = range(need_int(hf, "num_hidden_layers"))
    return MoESpec(
        num_experts=need_int(hf, "num_experts" if "num_experts" in hf else "num_local_experts"),
        experts_per_token=need_int(hf, "num_experts_per_tok"),
        intermediate_size=need_int(hf, "moe_intermediate_size"),
        normalize_topk=bool(hf.get("norm_topk_prob", False)),
        shared_intermediate_size=need_int(hf, "shared_expert_intermediate_size") if shared else 0,
        shared_expert_gate=shared,
        layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
    )


def one_window(hf: HfConfig, default: int | None = None) -> dict[str, Any]:
    """`sliding_window` in every layer where it is a number, in none where it is null."""
    window = hf.get("sliding_window", default)
    kind: LayerType = "full_attention" if window is None else "sliding_attention"
    return {"sliding_window": window, "layer_types": (kind,) * need_int(hf, "num_hidden_layers")}


def layer_types(hf: HfConfig, default: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    """`layer_types` as stated, else `default`. Raises DataError when their number is wrong."""
    stated = hf.get("layer_types")
    if stated is None:
        return default
    if len(stated) != len(default):
        raise DataError(
            "config-invalid",
            "config.json: layer_types has the wrong length",
            why=f"expected {len(default)} (num_hidden_layers), got {len(stated)}",
        )
    return tuple(stated)
