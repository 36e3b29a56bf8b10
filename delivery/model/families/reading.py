"""Reading a Hugging Face config.json: required numbers, rotary settings in both spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

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


_MOST = 1 << 31
_MOST_LAYERS = 1 << 14


def need_int(hf: HfConfig, key: str, most: int = _MOST) -> int:
    """A positive integer of at most `most`. Raises DataError `config-invalid`."""
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        large = isinstance(value, int) and value > most
        raise _invalid(key, f"at most {most}" if large else "a positive integer", value)
    return value


def optional_int(hf: HfConfig, key: str, default: int) -> int:
    """As `need_int`, or `default` where it is absent or null."""
    return default if hf.get(key) is None else need_int(hf, key)


def num_layers(hf: HfConfig) -> int:
    """Limited before anything is made once per layer."""
    return need_int(hf, "num_hidden_layers", _MOST_LAYERS)


def max_window_layers(hf: HfConfig) -> int:
    """The layer where Qwen's sliding begins, or ends; it may be 0."""
    return 0 if hf.get("max_window_layers") == 0 else optional_int(hf, "max_window_layers", 28)


def number(hf: HfConfig, key: str, default: float, *, over: float = 0.0) -> float:
    """A finite number greater than `over`, or `default` where it is absent or null.

    Raises DataError `config-invalid`.
    """
    value = hf.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not over < value < math.inf:
        raise _invalid(key, f"a number over {over:g}", value)
    return float(value)


def cap(hf: HfConfig, key: str, default: float | None = None) -> float | None:
    """A soft cap: null switches off what the family has as its `default`. Raises as `number`."""
    return None if key in hf and hf[key] is None else number(hf, key, 0.0) or default


def sliding_window(hf: HfConfig, default: int | None = None) -> int | None:
    """Tokens that a sliding layer sees; null for all of them. Raises DataError `config-invalid`."""
    if "sliding_window" not in hf:
        return default
    return None if hf["sliding_window"] is None else need_int(hf, "sliding_window")


def _invalid(key: str, expected: str, value: object) -> DataError:
    return DataError(
        "config-invalid",
        f"config.json: {key} is wrong or missing",
        why=f"expected {expected}, got {value!r:.80}",
        hint="deliver inspect on the source; take config.json from the model's own repository",
    )


def head_dim(hf: HfConfig) -> int:
    if hf.get("head_dim") is not None:
        return need_int(hf, "head_dim")
    return need_int(hf, "hidden_size") // need_int(hf, "num_attention_heads")


def activation(hf: HfConfig, key: str = "hidden_act", default: str = "silu") -> Any:
    name = hf.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise DataError(
            "config-invalid",
            f"config.json: {key} is {name!r}",
            why=f"expected one of {', '.join(sorted(_ACTIVATIONS))}",
        )
    return _ACTIVATIONS[name]


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list or absent; what is no token id is passed over."""
    each = value if isinstance(value, list | tuple) else (value,)
    return tuple(v for v in each if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


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
    base = number(settings, "rope_theta", number(hf, "rope_theta", theta, over=1.0), over=1.0)
    share = number(settings, "partial_rotary_factor", number(hf, "partial_rotary_factor", partial))
    rotary_dim = int(dim * share)
    if not 0 < rotary_dim <= dim:
        raise _invalid("partial_rotary_factor", "a share of a head's features", share)
    stated_name = settings.get("rope_type") or settings.get("type") or "default"
    for key in ("rope_theta", "partial_rotary_factor", "rope_type", "type"):
        settings.pop(key, None)
    name = (renamed or {}).get(str(stated_name), str(stated_name))
    if name in ("default", "mrope"):
        # Multimodal rotary gives text tokens the same position in every section: plain rotary.
        return RopeSpec(base, rotary_dim, interleaved=interleaved)
    settings["rope_type"] = name
    if name in ("yarn", "longrope"):  # the others' numbers do not follow from lengths
        key, maximum = "original_max_position_embeddings", need_int(hf, "max_position_embeddings")
        settings[key] = optional_int(settings, key, optional_int(hf, key, maximum))
        settings["factor"] = number(settings, "factor", maximum / settings[key])
    return RopeSpec(base, rotary_dim, settings, interleaved)


def decoder(hf: HfConfig, family: str, **changes: Any) -> ModelConfig:
    """The fields that all of the Llama-like configs share; `changes` override or add."""
    layers = num_layers(hf)
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
        "rms_eps": number(hf, "rms_norm_eps", 1e-6),
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
    layers = range(num_layers(hf))
    if not isinstance(dense, list | tuple):
        raise _invalid("mlp_only_layers", "a list of layers", dense)
    return MoESpec(
        num_experts=need_int(hf, "num_experts" if hf.get("num_experts") is not None else "num_local_experts"),
        experts_per_token=need_int(hf, "num_experts_per_tok"),
        intermediate_size=need_int(hf, "moe_intermediate_size"),
        normalize_topk=bool(hf.get("norm_topk_prob", False)),
        shared_intermediate_size=need_int(hf, "shared_expert_intermediate_size") if shared else 0,
        shared_expert_gate=shared,
        layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
    )


def one_window(hf: HfConfig, default: int | None = None) -> dict[str, Any]:
    """`sliding_window` in every layer where it is a number, in none where it is null."""
    window = sliding_window(hf, default)
    kind: LayerType = "full_attention" if window is None else "sliding_attention"
    return {"sliding_window": window, "layer_types": (kind,) * num_layers(hf)}


def layer_types(hf: HfConfig, default: tuple[LayerType, ...]) -> tuple[LayerType, ...]:
    """`layer_types` as stated, else `default`. Raises DataError when their number is wrong."""
    stated = hf.get("layer_types")
    if stated is None:
        return default
    if not isinstance(stated, list | tuple):
        raise _invalid("layer_types", f"a list of {', '.join(get_args(LayerType))}", stated)
    if len(stated) != len(default):
        raise DataError(
            "config-invalid",
            "config.json: layer_types has the wrong length",
            why=f"expected {len(default)} (num_hidden_layers), got {len(stated)}",
        )
    for kind in stated:
        if kind not in get_args(LayerType):
            raise _invalid("layer_types", f"a list of {', '.join(get_args(LayerType))}", kind)
    return tuple(stated)
