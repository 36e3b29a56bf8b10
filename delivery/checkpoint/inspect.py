"""What a checkpoint is, for a person: `describe`. Reads configs and headers, never a weight. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delivery.checkpoint.directory import read_config, read_json, read_tensors
from delivery.checkpoint.engines import verdicts
from delivery.checkpoint.header import TensorInfo
from delivery.checkpoint.layouts import family_of
from delivery.checkpoint.parameters import bits_of, parameters_of
from delivery.checkpoint.source import detect_format
from delivery.checkpoint.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON
from delivery.errors import DataError
from delivery.formats import method_of
from delivery.model.config import ModelConfig
from delivery.model.families import family_for

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)
_LICENSE_LINE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


def describe(path: Path | str) -> dict[str, Any]:
    """Facts about a Hugging Face directory, a `.bin` directory or a GGUF file, as JSON values.

    Keys: architecture, family, parameters, active_parameters (of a token, with experts), layers, experts,
    sliding_window, rope_scaling, context_tokens, dtypes, size_bytes, bits_per_weight, quantization,
    kv_bytes_per_token (at 16 bits), tokenizer, license, engines (name → loads, why_not, needs), format.
    What is not known is None. Raises DataError where the directory itself is damaged, `config-invalid` where
    a file says something of the wrong kind.
    """
    try:
        return _described(Path(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            "config-invalid",
            f"a JSON file in {path} says something of the wrong kind",
            why=f"{type(error).__name__}: {error}",
            hint="take config.json and the tokenizer files from the model's own repository",
        ) from error


def _described(place: Path) -> dict[str, Any]:
    if place.is_file() or (detect_format(place) == "gguf" and not (place / "config.json").is_file()):
        return _gguf(place)
    config = read_config(place)
    stored = detect_format(place)
    tensors = read_tensors(place) if stored == "safetensors" else {}
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else None
    facts = _model(config) | _weights(tensors, quantization)
    facts["active_parameters"] = _active(tensors, quantization, facts["experts"])
    if stored == "bin":
        facts["size_bytes"] = sum(p.stat().st_size for p in place.glob("*.bin"))
    facts |= {
        "format": stored,
        "quantization": _quantization(quantization),
        "tokenizer": _tokenizer(place),
        "license": _license(place, config),
    }
    return facts | {"engines": _engines(config, quantization, facts, stored)}


def _gguf(place: Path) -> dict[str, Any]:
    from delivery.checkpoint.gguf_config import rebuild_config
    from delivery.checkpoint.gguf_parts import GgufParts

    file = place if place.is_file() else next(iter(sorted(place.glob("*.gguf"))))
    with GgufParts(file) as opened:
        metadata = opened.metadata
        try:
            config, why_not = rebuild_config(opened, "bfloat16"), None
        except DataError as error:
            config, why_not = {"architectures": [metadata.get("general.architecture")]}, error.what
        count = size = 0
        kinds: dict[str, dict[str, int]] = {}
        for tensor in opened.tensors.values():
            elements = 1
            for length in tensor.shape:
                elements *= length
            count, size = count + elements, size + tensor.size_bytes
            entry = kinds.setdefault(tensor.kind, {"tensors": 0, "bytes": 0})
            entry["tensors"] += 1
            entry["bytes"] += tensor.size_bytes
        tokens = metadata.get("tokenizer.ggml.tokens")
    convert = why_not or "GGUF is converted first: deliver convert --model PATH"
    return _model(config) | {
        "parameters": count,
        "dtypes": kinds,
        "size_bytes": size,
        "bits_per_weight": 8 * size / count if count else None,
        "format": "gguf",
        "quantization": {"method": "gguf", "bits": None, "group_size": None, "format": None},
        "tokenizer": {
            "kind": metadata.get("tokenizer.ggml.model"),
            "vocab_size": len(tokens) if tokens else None,
            "chat_template": "tokenizer.chat_template" in metadata,
        },
        "license": metadata.get("general.license"),
        "engines": {"deliver": {"loads": False, "why_not": convert, "needs": None}},
    }


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"architecture": next(iter(config.get("architectures") or [None]), None)}
    try:
        family = family_for(config)
        known: ModelConfig | None = family.config(config)
    except DataError:
        known = None
    return facts | {
        "family": known.family if known else None,
        "layers": known.num_layers if known else config.get("num_hidden_layers"),
        "hidden_size": known.hidden_size if known else config.get("hidden_size"),
        "heads": known.num_heads if known else config.get("num_attention_heads"),
        "kv_heads": known.num_kv_heads if known else config.get("num_key_value_heads"),
        "head_dim": known.head_dim if known else config.get("head_dim"),
        "vocab_size": known.vocab_size if known else config.get("vocab_size"),
        "context_tokens": known.max_position if known else config.get("max_position_embeddings"),
        "rope_theta": known.rope.theta if known else config.get("rope_theta"),
        "tied_embeddings": known.tie_embeddings if known else config.get("tie_word_embeddings"),
        "kv_bytes_per_token": _kv_bytes(known) if known else None,
        "sliding_window": known.sliding_window if known else config.get("sliding_window"),
        "rope_scaling": known.rope.scaling.get("rope_type") if known else None,
        "experts": _experts(known) if known else None,
    }


def _experts(config: ModelConfig) -> dict[str, int] | None:
    moe = config.moe
    return None if moe is None else {"count": moe.num_experts, "per_token": moe.experts_per_token}


def _active(
    tensors: Mapping[str, TensorInfo],
    quantization: Mapping[str, Any] | None,
    experts: Mapping[str, int] | None,
) -> int | None:
    """Parameters that one token passes; None without experts."""
    if experts is None or not tensors:
        return None
    counts = parameters_of(tensors, quantization)
    routed = sum(count for name, count in counts.items() if ".experts." in name)
    return sum(counts.values()) - routed + routed * experts["per_token"] // experts["count"]


def _kv_bytes(config: ModelConfig) -> int:
    attention = sum(kind != "linear_attention" for kind in config.layer_types)
    return attention * 2 * config.num_kv_heads * config.head_dim * 2


def _weights(tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    parameters = sum(parameters_of(tensors, quantization).values())
    dtypes: dict[str, dict[str, int]] = {}
    for info in tensors.values():
        entry = dtypes.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.size_bytes
    size = sum(info.size_bytes for info in tensors.values())
    return {
        "parameters": parameters or None,
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1]["bytes"])),
        "size_bytes": size,
        "bits_per_weight": 8 * size / parameters if parameters else None,
    }


def _quantization(quantization: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if quantization is None:
        return None
    groups = [g for g in (quantization.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    sizes = {(g.get("weights") or {}).get("group_size") for g in groups} or {quantization.get("group_size")}
    method = quantization.get("quant_method")
    eight = {"fp8", "smooth_quant"}
    return {
        "method": method,
        "format": quantization.get("format") or quantization.get("checkpoint_format"),
        "bits": 8 if method in eight else bits_of(quantization),
        "group_size": next(iter(sizes)) if len(sizes) == 1 else sorted(str(s) for s in sizes),
        "kv_cache": (quantization.get("kv_cache_scheme") or {}).get("num_bits"),
        "plain_layers": list(quantization.get("ignore") or quantization.get("modules_to_not_convert") or ()),
    }


def _tokenizer(place: Path) -> dict[str, Any] | None:
    config = read_json(place / TOKENIZER_CONFIG)
    templates = (place / "chat_template.jinja").is_file() or (place / "chat_template.json").is_file()
    if not (place / TOKENIZER_JSON).is_file():
        found = [n for n in ("tokenizer.model", "vocab.json") if (place / n).is_file()]
        if not found:
            return None
        return {"kind": found[0], "vocab_size": None, "chat_template": templates or "chat_template" in config}
    data = read_json(place / TOKENIZER_JSON)
    vocab = (data.get("model") or {}).get("vocab") or {}
    added = {t["id"] for t in data.get("added_tokens") or [] if isinstance(t, Mapping)}
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    return {
        "kind": (data.get("model") or {}).get("type"),
        "vocab_size": len(ids | added),
        "chat_template": templates or bool(config.get("chat_template")),
    }


def _license(place: Path, config: Mapping[str, Any]) -> str | None:
    if isinstance(stated := config.get("license"), str):
        return stated
    readme = place / "README.md"
    if readme.is_file():
        front = _FRONT_MATTER.match(readme.read_text("utf-8", errors="replace"))
        if front and (line := _LICENSE_LINE.search(front[1])):
            return line[1].strip("\"'")
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"):
        if (place / name).is_file():
            lines = (place / name).read_text("utf-8", errors="replace").splitlines()
            return next((line.strip(" #") for line in lines if line.strip(" #")), None)
    return None


def _engines(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    stored: str,
) -> dict[str, dict[str, Any]]:
    ours: dict[str, Any] = {"loads": True, "why_not": None, "needs": None}
    if reason := _why_not_ours(config, quantization, facts, stored):
        ours = {"loads": False, "why_not": reason, "needs": None}
    return {"deliver": ours, **verdicts(config, quantization)}


def _why_not_ours(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    stored: str,
) -> str | None:
    try:
        family_of(config).config(config)
        if quantization is not None:
            method_of(quantization)
    except DataError as error:
        return error.what
    if stored == "bin":
        return ".bin weights are converted first: deliver convert --model PATH"
    return None if facts["tokenizer"] else "it has no tokenizer"
